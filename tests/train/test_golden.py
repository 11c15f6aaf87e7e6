"""The losses of a short run, pinned. Whatever changes them changes what people's runs learn."""

import json
import os
from pathlib import Path

import pytest

from electra.train.runlog import read_metrics

GOLDEN = Path(__file__).parents[1] / "golden" / "electra.json"
KEYS = ("step", "loss", "mlm_loss", "rtd_loss", "gradient_norm", "lr")
MESSAGE = """the losses of a short run are no longer those in {file}.
If you meant to change the data order, the masking, the initial weights, the network, the losses or the optimizer, say so in
CHANGELOG.md and store the new ones:  UPDATE_GOLDEN=1 pytest tests/train/test_golden.py
If you meant to change none of these (a refactoring, a faster kernel), this is a bug: find it before you go on."""


def test_the_losses_of_a_short_run_are_the_stored_ones(finished_run):

    found = [
        {key: record[key] for key in KEYS}
        for record in read_metrics(finished_run)
        if record["kind"] == "train"
    ]
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    expected = json.loads(GOLDEN.read_text())
    assert len(found) == len(expected) == 8
    for ours, stored in zip(found, expected, strict=True):
        assert ours == pytest.approx(stored, rel=2e-3), MESSAGE.format(file=GOLDEN.name)
