"""The losses of short runs, pinned. Whatever changes them changes what people's runs learn."""

import json
import os
from pathlib import Path

import pytest
import torch

from electra.model.electra import ElectraEmbeddings
from electra.pretraining.evaluate import evaluate_run
from electra.pretraining.load import load_network, load_run
from electra.pretraining.run import build_parts, pretrain
from electra.pretraining.settings import resolve
from electra.train.checkpoint import checkpoint_folders
from electra.train.log import read_metrics
from helpers import shipped_additions, words_of

GOLDEN = Path(__file__).parents[1] / "golden"
KEYS = ("step", "loss", "mlm_loss", "rtd_loss", "gradient_norm", "lr")
MESSAGE = """the losses of a short run are no longer those in {file}.
If you meant to change the data order, the masking, the initial weights, the network, the losses or the optimizer, say so in
CHANGELOG.md and store the new ones:  UPDATE_GOLDEN=1 pytest tests/pretraining/test_golden.py
If you meant to change none of these (a refactoring, a faster kernel), this is a bug: find it before you go on."""

VARIANTS = [*shipped_additions(), "masked-lm+whole-word"]


def compare_with_stored(name, run, records):
    found = [
        {key: record[key] for key in KEYS if key in record} for record in read_metrics(run) if record["kind"] == "train"
    ]
    path = GOLDEN / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    expected = json.loads(path.read_text())
    assert len(found) == len(expected) == records
    for ours, stored in zip(found, expected, strict=True):
        assert ours == pytest.approx(stored, rel=2e-3), MESSAGE.format(file=path.name)


def test_the_losses_of_a_short_run_are_the_stored_ones(finished_run):
    compare_with_stored("electra", finished_run, 8)


@pytest.fixture(scope="module")
def masked_lm_run(tmp_path_factory, recipe, prepared):
    """What two-stage training begins with."""
    run = tmp_path_factory.mktemp("stage") / "run"
    settings, _ = resolve(f"{recipe}+masked-lm", [f"data={prepared}", f"run={run}", "train.steps=4"])
    pretrain(settings)
    return run


def words_for(name, prepared, run, masked_lm_run, finished_run):
    words = [f"data={prepared}", f"run={run}", "train.steps=20", "train.evaluate_every=20"]
    return words + words_of(name, masked_lm_run, finished_run)


@pytest.mark.parametrize("name", VARIANTS)
def test_twenty_steps_of_every_objective_and_generator(name, recipe, prepared, tmp_path, masked_lm_run, finished_run):
    run = tmp_path / "run"
    settings, _ = resolve(f"{recipe}+{name}", words_for(name, prepared, run, masked_lm_run, finished_run))
    figures = pretrain(settings)
    assert figures["step"] == 20
    compare_with_stored(name, run, 4)
    trained, untrained = evaluate_run(run)
    assert trained["mlm_loss"] == pytest.approx(figures["mlm_loss"], rel=1e-3)
    assert ("auc" in untrained) == ("auc" in trained)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("generator-unigram", "adversarial")]


@pytest.mark.parametrize("name", ["two-stage", "replaced-span", *SLOW])
def test_a_run_goes_on_without_the_folders_it_began_from(
    name, recipe, prepared, tmp_path, masked_lm_run, finished_run, monkeypatch
):
    """Checkpoints hold everything: frozen weights, corpus frequencies, baselines. The end is the same, bit for bit."""
    run = tmp_path / "run"
    settings, _ = resolve(f"{recipe}+{name}", words_for(name, prepared, run, masked_lm_run, finished_run))
    pretrain(settings)
    whole = {f.name: f.read_bytes() for f in checkpoint_folders(run / "checkpoints")[-1].glob("*.safetensors")}
    for folder in checkpoint_folders(run / "checkpoints")[1:]:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    monkeypatch.setattr("electra.pretraining.run.take_weights", None)
    monkeypatch.setattr("electra.data.shards.TokenData.token_counts", None)
    pretrain(settings)
    again = {f.name: f.read_bytes() for f in checkpoint_folders(run / "checkpoints")[-1].glob("*.safetensors")}
    assert again.keys() == whole.keys() and all(again[name] == whole[name] for name in whole)


def test_two_stages_begin_with_the_weights_of_the_first(recipe, prepared, tmp_path, masked_lm_run):
    words = words_for("two-stage", prepared, tmp_path / "run", masked_lm_run, None)
    settings, _ = resolve(f"{recipe}+two-stage", words)
    objective = build_parts(settings, torch.device("cpu")).objective
    trained = {name: p for name, p in objective.discriminator.named_parameters()}
    frozen = dict(objective.corruptor.generator.encoder.named_parameters())
    assert trained.keys() == frozen.keys()
    for name in trained:
        assert trained[name].equal(frozen[name]) and trained[name] is not frozen[name]
    untrained = build_parts(settings, torch.device("cpu"), fresh=False).objective
    assert not untrained.discriminator.layers[0].expand.weight.equal(trained["layers.0.expand.weight"])


def test_a_disentangled_discriminator_can_be_taken_out_of_its_run(recipe, prepared, tmp_path):
    """To another device, into an export, as the start of another run: with its own whole word table."""
    run = tmp_path / "run"
    settings, _ = resolve(f"{recipe}+gdes", [f"data={prepared}", f"run={run}", "train.steps=4"])
    pretrain(settings)
    _, objective = load_run(run)
    inside = objective.discriminator.eval()
    ids = torch.arange(5, 25)[None]
    expected = inside(ids, torch.zeros_like(ids), None)
    encoder = load_network(run, "encoder").encoder
    detector, exported = load_network(run, "discriminator"), load_network(run / "export", "encoder")
    for alone in (encoder, detector.encoder, exported.encoder):
        assert isinstance(alone.embeddings, ElectraEmbeddings)
        torch.testing.assert_close(alone(ids, torch.zeros_like(ids), None), expected, atol=1e-6, rtol=0)
    assert encoder.double()(ids, torch.zeros_like(ids), None).dtype == torch.float64  # all of it moves
