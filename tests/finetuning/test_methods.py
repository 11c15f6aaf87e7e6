"""Which settings a name stands for: the paper's protocol, and the robust one."""

import json

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from electra.base.errors import SettingsError
from electra.data.tokenizer import load_tokenizer
from electra.finetuning.classification import ClassificationSettings
from electra.finetuning.plan import MethodSettings, make_plan, method_defaults
from electra.finetuning.run import Start, build_model, prepare_task
from electra.finetuning.training import calibrate, infer
from electra.interop.read import Pretrained
from electra.model import encoder_alone, initialise
from electra.model.electra import ElectraEncoderSettings
from electra.model.modern import ModernEncoderSettings

ROWS = [{"text": f"the barak walks {number}", "label": "ab"[number % 2]} for number in range(20)]


@pytest.fixture
def planned(tmp_path):
    """With settings on the command line, or as a task of one's own."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    recipe = tmp_path / "mine.toml"

    def make(encoder, toml="", **overrides):
        recipe.write_text(f'kind = "classification"\n{toml}')
        return make_plan(str(recipe), {"data": str(tmp_path), **overrides}, method_defaults(encoder))

    return make


def electra_of(hidden):
    return ElectraEncoderSettings(hidden=hidden, heads=4)


def modern_of(hidden):
    return ModernEncoderSettings(hidden=hidden, heads=4)


@pytest.mark.parametrize("encoder", [electra_of(64), modern_of(64)])
def test_the_paper_s_protocol_keeps_its_name(planned, encoder):
    plan = planned(encoder, method="paper")
    method = plan.method
    assert (method.lr, method.layer_decay, method.min_steps, method.bias_correction) == (3e-4, 0.8, 0, False)
    assert plan.task.pooling == "cls" and method.method == "paper"


def test_the_robust_one_reads_the_mean_where_transformers_can_and_steps_wider_the_narrower_a_network_is(planned):
    modern, electra = (planned(encoder, method="robust") for encoder in (modern_of(64), electra_of(64)))
    assert (modern.task.pooling, electra.task.pooling) == ("mean", "cls")
    assert modern.method.bias_correction and modern.method.min_steps > 0 and modern.method.layer_decay == 1.0
    rates = [planned(electra_of(hidden), method="robust").method.lr for hidden in (32, 64, 128, 256, 768)]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 5


def test_settings_win_over_a_method_and_a_task_s_file_may_name_one(planned):
    plan = planned(modern_of(64), 'method = "robust"\nlr = 1e-5\n', layer_decay=0.7, pooling="cls")
    assert plan.method.method == "robust" and plan.method.bias_correction
    assert (plan.method.lr, plan.method.layer_decay, plan.task.pooling) == (1e-5, 0.7, "cls")


def test_epochs_that_people_set_mean_so_many_and_no_more(planned):
    assert planned(modern_of(64), method="robust").method.min_steps > 0
    assert planned(modern_of(64), "epochs = 2", method="robust").method.min_steps == 0
    assert planned(modern_of(64), method="robust", epochs=2).method.min_steps == 0
    assert planned(modern_of(64), method="robust", epochs=2, min_steps=30).method.min_steps == 30


def test_another_name_is_refused(planned):
    with pytest.raises(SettingsError, match="paper"):
        planned(modern_of(64), method="best")


@pytest.mark.parametrize(("rows", "calibrated"), [(99, False), (100, True), (1999, True), (2000, False)])
def test_small_tables_are_calibrated_by_the_robust_method(tmp_path, rows, calibrated):
    for split, count in (("train", rows), ("dev", 4)):
        lines = (json.dumps({"text": f"barak {split} {n}", "label": "ab"[n % 2]}) for n in range(count))
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    words = {"kind": "classification", "text": ["text"], "label": "label"}
    for method, expected in (("robust", calibrated), ("paper", False)):
        plan = make_plan(str(tmp_path), {**words, "method": method}, method_defaults(modern_of(64)))
        assert plan.method.calibrate is expected
    off = make_plan(str(tmp_path), {**words, "method": "robust", "calibrate": False}, method_defaults(modern_of(64)))
    assert not off.method.calibrate


def test_calibration_holds_rows_out_and_shrinks_logits_towards_the_shares_of_the_classes(toy_model, tmp_path):
    """The weight and the new logits against scipy and numpy; labels are noise, so the frequent class must win."""
    rng = np.random.default_rng(0)
    rows = [{"text": f"the barak walks {n}", "label": "ab"[int(rng.random() < 0.3)]} for n in range(300)]
    for split, part in (("train", rows[:280]), ("dev", rows[280:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    settings = modern_of(32)
    encoder = encoder_alone(settings, 300)
    initialise(encoder, settings, 1)
    start = Start("toy", Pretrained(encoder, None, "encoder", load_tokenizer(toy_model)), encoder.state_dict())
    words = {"kind": "classification", "text": ["text"], "label": "label", "method": "robust", "device": "cpu"}
    plan = make_plan(str(tmp_path), words, method_defaults(settings))
    task = plan.task.build(start.network.tokenizer, 24, plan.splits)
    prepared = prepare_task(task, plan, start)
    assert (len(prepared.train.rows), len(prepared.held_out.rows)) == (252, 28)
    assert not {row["text"] for row in prepared.train.rows} & {row["text"] for row in prepared.held_out.rows}

    model = build_model(plan, task, start, seed=0)
    torch.nn.init.normal_(model.head.label.output.weight, std=3.0)  # sure of itself without a reason
    held_out, dev = prepared.held_out.examples, prepared.others["dev"].examples

    def logits(examples):
        return np.stack([it["logits"] for it in infer(model, task, examples, plan.method, 0)]).astype(float)

    before, of_dev = logits(held_out), logits(dev)
    targets = np.array([example.target for example in held_out])
    counts = 1 + np.bincount([example.target for example in prepared.train.examples])
    prior = np.log(counts / counts.sum())

    def loss(weight):
        mixed = weight * before + (1 - weight) * prior
        return (np.logaddexp.reduce(mixed, 1) - mixed[np.arange(28), targets]).mean()

    weight = calibrate(model, prepared, plan.method)
    best = minimize_scalar(loss, bounds=(0.1, 1), method="bounded").x
    assert weight == pytest.approx(best, abs=0.011) and weight < 0.9
    np.testing.assert_allclose(logits(dev), weight * of_dev + (1 - weight) * prior, atol=1e-4)


def test_what_is_no_share_of_right_answers_is_not_calibrated(toy_model):
    tokenizer = load_tokenizer(toy_model)
    for settings in ({"metric": "mcc"}, {"kind": "multilabel"}, {"kind": "regression"}):
        labels = {} if settings.get("kind") == "regression" else {"labels": ("a", "b")}
        assert not ClassificationSettings(**settings, **labels).build(tokenizer, 24, {}).output_layer
    assert not MethodSettings().calibrate
