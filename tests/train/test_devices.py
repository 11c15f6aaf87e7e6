"""On a CUDA device: the same randomness and losses as on the CPU, bfloat16 training that learns and resumes exactly."""

import json
from pathlib import Path

import pytest
import torch

from conftest import TINY, inputs_for, make_batch
from electra.base.randomness import uniform
from electra.model.generators import GeneratorSettings
from electra.objectives import build as build_objective
from electra.objectives.electra import ElectraSettings
from electra.train.checkpoint import checkpoint_folders
from electra.train.log import read_metrics

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_numbers_are_the_same_bits_on_every_device():
    samples = torch.arange(1000)
    assert torch.equal(uniform(5, "sample", samples, 64), uniform(5, "sample", samples.cuda(), 64).cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_step_on_the_gpu_equals_the_step_on_the_cpu():
    quiet = TINY.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0})
    objective = build_objective(ElectraSettings(), inputs_for(300, quiet, GeneratorSettings(width=0.5)))
    batch = make_batch(vocabulary=300)
    expected, ids = objective(batch).total.item(), objective.corruptor(batch).batch.ids
    objective.cuda()
    assert torch.equal(objective.corruptor(batch.to("cuda")).batch.ids.cpu(), ids)
    assert objective(batch.to("cuda")).total.item() == pytest.approx(expected, rel=1e-4)


def run_to_the_end(recipe: str, prepared: Path, run: Path, device: str, stop_at: int | None = None) -> dict[str, bytes]:
    """In this process, so that shapes are checked too. `stop_at` plays an interruption."""
    from electra.pretraining.run import pretrain
    from electra.pretraining.settings import resolve
    from electra.train import loop as trainer

    words = [f"data={prepared}", f"run={run}", "train.deterministic=true", f"train.device={device}"]
    words += ["train.fast=off"]  # the fast step cannot be compiled with the checks: test_fast_step.py
    settings, _ = resolve(recipe, words)
    if stop_at:
        saved = trainer.checkpoint.save_checkpoint

        def save_and_stop(root, step, *rest):
            saved(root, step, *rest)
            if step >= stop_at:
                raise KeyboardInterrupt

        trainer.checkpoint.save_checkpoint = save_and_stop
        try:
            with pytest.raises(KeyboardInterrupt):
                pretrain(settings, "")
        finally:
            trainer.checkpoint.save_checkpoint = saved
    pretrain(settings, "")
    folder = checkpoint_folders(run / "checkpoints")[-1]
    return {name: (folder / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("joined", ["", "+muon", "+gdes+muon"])
def test_training_learns_and_an_interrupted_run_ends_with_the_same_weights(joined, device, recipe, prepared, tmp_path):
    whole = run_to_the_end(f"{recipe}{joined}", prepared, tmp_path / "whole", device)
    parts = run_to_the_end(f"{recipe}{joined}", prepared, tmp_path / "parts", device, stop_at=12)
    assert whole == parts
    losses = [record["mlm_loss"] for record in read_metrics(tmp_path / "whole") if record["kind"] == "heldout"]
    assert losses[-1] < losses[0]
    environment = json.loads((tmp_path / "whole" / "environment.json").read_text())
    assert environment["gpu"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else None)
