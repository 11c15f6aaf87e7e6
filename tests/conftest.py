from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Corpora that are too large or not ours to commit; tests that need them are skipped elsewhere."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared corpora at {folder}")
    return folder
