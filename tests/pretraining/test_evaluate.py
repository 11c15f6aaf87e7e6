"""Trained and untrained networks are asked about the same text, and runs can be asked about one text."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from electra.base import config
from electra.base.errors import DataError, SettingsError
from electra.data.tokenizer import load_tokenizer, special_ids
from electra.objectives import metrics
from electra.pretraining import evaluate as evaluation
from electra.pretraining.evaluate import evaluate_run
from electra.pretraining.load import load_run, load_settings
from electra.pretraining.run import build_heldout, pretrain
from electra.pretraining.settings import resolve
from electra.train.log import read_metrics
from helpers import electra

GENERATOR = ("mlm_loss", "mlm_accuracy", "sampled_accuracy", "sampled_variety")


@pytest.fixture(scope="module")
def train(tmp_path_factory, recipe, prepared):
    def run(addition):
        folder = tmp_path_factory.getbasetemp() / f"evaluate-{addition}"
        if not folder.exists():
            words = [f"data={prepared}", f"run={folder}", "train.steps=4", "train.evaluate_every=4"]
            pretrain(resolve(f"{recipe}+{addition}", words)[0])
        return folder

    return run


@pytest.mark.parametrize("addition", ["electra-15", "electric", "all-tokens", "corrective", "adversarial"])
def test_the_untrained_network_reads_what_the_trained_generator_wrote(addition, train):
    trained, untrained = evaluate_run(train(addition))
    assert untrained["replaced_share"] == trained["replaced_share"]
    assert untrained["rtd_loss"] != trained["rtd_loss"]
    assert not set(GENERATOR) & untrained.keys()


def test_the_untrained_column_of_a_recovery_is_of_the_untrained_network(train):
    trained, untrained = evaluate_run(train("replace-mlm"))
    assert untrained.keys() == {"recovery_loss"} and untrained["recovery_loss"] > trained["recovery_loss"]


@pytest.mark.parametrize("rows", [0, -3])
def test_a_number_of_rows_below_one_is_refused(rows, tmp_path):
    with pytest.raises(SettingsError, match=f"cannot evaluate {rows} rows. Give at least 1"):
        evaluate_run(tmp_path, rows=rows)


def test_a_masked_language_model_is_compared_with_an_untrained_one(train):
    trained, untrained = evaluate_run(train("masked-lm"))
    assert untrained["mlm_loss"] > trained["mlm_loss"]


def test_another_runs_generator_gives_every_run_the_same_text(train, tmp_path, monkeypatch):
    """`rtd_loss` and AUC by hand for one of them, on the text that the other run itself reads."""
    yardstick, texts, build = train("electra-15"), [], evaluation.yardstick

    def remember(*inputs):
        settings, corruptor = build(*inputs)
        corruptor.register_forward_hook(lambda _, inputs, corrupted: texts[-1].append(corrupted.batch.ids))
        return settings, corruptor

    monkeypatch.setattr(evaluation, "yardstick", remember)
    for addition in ("whole-word", "electric", "all-tokens"):
        texts.append([])
        run = train(addition)
        if addition == "electric":  # one that has other rows
            run = shutil.copytree(run, tmp_path / "run")
            settings = load_settings(run)
            other = settings.train.model_copy(update={"evaluate_rows": 5, "batch": 4, "precision": "bfloat16"})
            changed = settings.model_copy(update={"data": "nowhere", "seed": 9, "train": other})
            (run / "config.toml").write_text(config.to_toml(changed))
        trained, untrained = evaluate_run(run, generator=yardstick)
        assert not set(GENERATOR) & trained.keys() and trained["rtd_loss"] != untrained["rtd_loss"]

    settings, objective = load_run(yardstick)
    special = special_ids(load_tokenizer(yardstick / "tokenizer.json"))
    batches = list(build_heldout(settings, Path(settings.data), special))
    with torch.no_grad():
        expected = [objective.corruptor(batch) for batch in batches]
    for text in texts:
        assert len(text) == 2 * len(expected)  # trained and untrained
        assert all(torch.equal(a, b.batch.ids) for a, b in zip(text, [*expected, *expected], strict=True))
    _, judge = load_run(train("all-tokens"))
    with torch.no_grad():
        logits = [judge.networks()["discriminator"].detect(one.batch) for one in expected]
    real = torch.cat([batch.is_real.flatten() for batch in batches])
    answers = torch.cat([part.flatten() for part in logits])[real]
    truth = torch.cat([one.is_replaced.flatten() for one in expected])[real]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(answers, truth.float())
    assert trained["rtd_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert trained["replaced_share"] == pytest.approx(truth.float().mean().item())


def test_a_masked_language_model_can_be_the_yardstick_and_not_be_measured(train, tmp_path):
    masked_lm, run = train("masked-lm"), train("electra-15")
    done = electra("evaluate", run, "--generator", masked_lm)
    assert done.returncode == 0 and "corrupted by" in done.stdout, done.stderr
    shutil.copytree(masked_lm, other := tmp_path / masked_lm.name)
    assert electra("evaluate", run, "--generator", other).returncode == 0
    kept = [json.loads(file.read_text("utf-8")) for file in run.glob("evaluation-by-evaluate-masked-lm-*.json")]
    assert sorted(it["options"]["generator"] for it in kept) == sorted(map(str, (masked_lm, other)))
    assert electra("evaluate", run, "--rows", "2").returncode == 0
    assert json.loads((run / "evaluation.json").read_text("utf-8"))["options"] == {
        "data": None,
        "rows": 2,
        "generator": None,
    }
    with pytest.raises(DataError, match="has no discriminator"):
        evaluate_run(masked_lm, generator=run)
    with pytest.raises(DataError, match="no generator that can be reused"):
        evaluate_run(run, generator=train("generator-unigram"))


def test_what_is_learned_by_heart_is_asked_at_every_evaluation_and_told_once(recipe, prepared, tmp_path, monkeypatch):
    """Of the means of training up to there, and of the held-out metrics that stand in the file."""
    asked = []

    def ask(training, heldout):
        asked.append((training.get("mlm_loss"), heldout["mlm_loss"]))
        return {metrics.BY_HEART: "by heart"}

    monkeypatch.setattr("electra.train.loop.by_heart", ask)
    monkeypatch.setattr(metrics, "PART", 4)
    words = [
        f"data={prepared}",
        f"run={tmp_path / 'run'}",
        "train.steps=8",
        "train.evaluate_every=4",
        "train.log_every=2",
    ]
    pretrain(resolve(str(recipe), words)[0])
    losses = {kind: [it["mlm_loss"] for it in read_metrics(tmp_path / "run", kind)] for kind in ("train", "heldout")}
    means = [sum(losses["train"][at : at + 2]) / 2 for at in (0, 2)]
    assert asked == [pytest.approx(pair) for pair in zip(means, losses["heldout"], strict=True)]
    assert [it["step"] for it in read_metrics(tmp_path / "run", "alarm") if it["alarm"] == metrics.BY_HEART] == [4]
