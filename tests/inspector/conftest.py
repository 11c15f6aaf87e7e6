"""A run's networks as transformers' folders."""

from importlib.util import find_spec

import pytest

from electra.pretraining.load import export_run

# these need the extra `serve`
collect_ignore = [] if find_spec("uvicorn") else ["test_attacks.py", "test_serve.py"]


@pytest.fixture(scope="module")
def exported(finished_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "model"
    export_run(finished_run, out)
    return out
