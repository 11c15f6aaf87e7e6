"""On a GPU: a group of one, with NCCL inside the captured step, trains to the bit like a process alone; weights in pieces too,
up to rounding."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from electra.train.log import read_metrics
from helpers import environment

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),
]
pytestmark = gpu
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "electra"]
PLAIN = [sys.executable, "-m", "electra"]


def losses(start: list[str], recipe: Path, prepared: Path, run: Path, *more: str) -> list[tuple[float, float]]:
    words = ["pretrain", recipe, f"data={prepared}", f"run={run}", "train.device=cuda", *more]
    done = subprocess.run([*start, *map(str, words)], env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "cannot be captured" not in done.stderr and "cannot be compiled" not in done.stderr, done.stderr[-4000:]
    return [(record["loss"], record["gradient_norm"]) for record in read_metrics(run) if record["kind"] == "train"]


def test_a_group_of_one_is_captured_and_trains_like_a_process_alone(recipe, prepared, tmp_path):
    alone = losses(PLAIN, recipe, prepared, tmp_path / "alone")
    together = losses(TORCHRUN, recipe, prepared, tmp_path / "together")
    assert together == alone
    assert json.loads((tmp_path / "together" / "run_state.json").read_text())["state"] == "finished"


def test_weights_in_pieces_train_on_a_gpu(recipe, prepared, tmp_path):
    more = ["encoder.dropout=0", "encoder.attention_dropout=0", "train.fast=off", "train.precision=float32"]
    alone = losses(PLAIN, recipe, prepared, tmp_path / "alone", *more)
    pieces = losses(TORCHRUN, recipe, prepared, tmp_path / "pieces", *more, "train.parallel=fsdp")
    for (loss, _), (reference, _) in zip(pieces, alone, strict=True):
        assert loss == pytest.approx(reference, abs=1e-3)
