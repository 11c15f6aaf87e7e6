"""One world for all tests of a process."""

from pathlib import Path

import pytest

from faults.world import make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))
