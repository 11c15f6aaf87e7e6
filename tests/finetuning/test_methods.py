"""Which settings a name stands for: the paper's protocol, and the robust one."""

import json

import pytest

from electra.base.errors import SettingsError
from electra.finetuning.plan import make_plan, method_defaults
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


def test_scores_of_weights_that_dev_chose_are_said_to_be_optimistic(planned):
    chosen = {"keep": "best"}, {"patience": 2}, {}
    plans = [planned(modern_of(64), **settings) for settings in chosen]
    assert [any("optimistic" in note for note in plan.notes) for plan in plans] == [True, True, False]


def test_epochs_that_people_set_mean_so_many_and_no_more(planned):
    assert planned(modern_of(64), method="robust").method.min_steps > 0
    assert planned(modern_of(64), "epochs = 2", method="robust").method.min_steps == 0
    assert planned(modern_of(64), method="robust", epochs=2).method.min_steps == 0
    assert planned(modern_of(64), method="robust", epochs=2, min_steps=30).method.min_steps == 30


def test_another_name_is_refused(planned):
    with pytest.raises(SettingsError, match="paper"):
        planned(modern_of(64), method="best")
