"""Twelve updates of google-research/electra (make_original_rows.py says how they were made), repeated by ours: padded rows of two segments, its masks with
positions drawn twice, its samples, clipping, Adam without correction, decay and rates."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from electra.objectives.losses import masked_lm_loss
from electra.train import optimizers

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import original_replay

STORED = Path(__file__).parent / "original"


def test_the_updates_of_the_original_code_are_ours():
    found = original_replay.repeat(STORED)
    assert np.array(found["original"]).shape == (12, 2) and found["weights"]["moved"] > 0.05
    assert np.max(found["difference"]) < 3e-6
    assert found["weights"]["difference"] < 1e-5


@pytest.mark.parametrize(
    "mistake", ["mean of rows", "no clipping", "optimizer.bias_correction=true", "optimizer.eps=1e-4"]
)
def test_a_mistake_would_be_seen(monkeypatch, mistake):
    resolve = original_replay.resolve
    match mistake:
        case "mean of rows":
            monkeypatch.setattr(original_replay, "masked_lm_loss", mean_of_rows)
        case "no clipping":
            monkeypatch.setattr(optimizers.nn.utils, "clip_grad_norm_", lambda *_: torch.ones(()))
        case _:
            monkeypatch.setattr(original_replay, "resolve", lambda recipe, words: resolve(recipe, [*words, mistake]))
    found = original_replay.repeat(STORED)
    assert max(np.max(found["difference"]), found["weights"]["difference"]) > 1e-4


def mean_of_rows(logits, targets, used):
    rows = zip(logits, targets, used, strict=True)
    return torch.stack([masked_lm_loss(*(it[None] for it in row)) for row in rows]).mean()
