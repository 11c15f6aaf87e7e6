"""A run's networks as transformers' folders."""

import pytest

from electra.pretraining.load import export_run


@pytest.fixture(scope="module")
def exported(finished_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "model"
    export_run(finished_run, out)
    return out
