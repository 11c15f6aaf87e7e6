"""Alarms must ring for the runs that went wrong unnoticed, and stay silent for healthy ones."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from conftest import TINY, inputs_for
from electra.model.generators import GeneratorSettings
from electra.objectives import build as build_objective
from electra.objectives.electra import ElectraSettings
from electra.objectives.metrics import Watch, area_under_curve, by_heart, effective_number
from electra.objectives.metrics import alarms as alarms_of

HEALTHY = {
    "mlm_loss": 3.0,
    "mlm_accuracy": 0.45,
    "sampled_accuracy": 0.35,
    "sampled_variety": 300.0,
    "target_variety": 350.0,
    "auc": 0.9,
    "recall": 0.5,
    "flagged_share": 0.05,
}


def history(length=40, **changes):
    return [HEALTHY | {"mlm_loss": 4.0 - 0.02 * n} | changes for n in range(length)]


def alarms(records, progress, step, *rest):
    """Of lines that were logged at even distances up to `step`."""
    watch = Watch()
    for number, record in enumerate(records, 1):
        watch.add(round(step * number / len(records)), record)
    return alarms_of(watch, progress, *rest)


def test_a_healthy_run_is_left_in_peace():
    assert alarms(history(), 0.5, 2000) == {}


def test_a_discriminator_that_answers_one_class_is_called_out():
    (text,) = alarms(history(auc=0.5, recall=0.0, flagged_share=0.0), 0.5, 2000).values()
    assert 'answers "original" for every token' in text and "optimizer.lr" in text


def test_a_cautious_but_ranking_discriminator_is_not_called_out():
    assert alarms(history(auc=0.75, recall=0.0, flagged_share=0.0), 0.5, 2000) == {}


def test_a_generator_that_stands_still_is_called_out_with_both_losses():
    (text,) = alarms(history(mlm_loss=5.7, mlm_accuracy=0.15), 0.5, 2000).values()
    assert "generator has stalled" in text and "5.70" in text and "generator.width" in text


def test_a_small_generator_that_goes_on_learning_is_not_called_out():
    """The quickstart's: losses after every 100 of its 1,800 steps. Within a tenth of the run it once gained less than 1 %."""
    losses = [7.13, 5.98, 5.66, 5.51, 5.37, 5.26, 5.14, 5.10, 5.08, 5.04, 4.985, 4.965, 4.941, 4.908]
    records = [
        record | {"mlm_loss": loss, "mlm_accuracy": 0.24} for record, loss in zip(history(14), losses, strict=True)
    ]
    for number in range(11, 15):
        assert alarms(records[:number], number / 18, 100 * number) == {}


def test_alarms_do_not_hang_on_how_often_a_line_is_logged():
    """A loss that falls by a tenth in 4,000 of 8,000 steps with the noise of small batches, a discriminator whose AUC is 0.75: in
    single batches the loss is no lower than long ago, and the AUC often below 0.6."""
    rng, steps = np.random.default_rng(0), np.arange(1, 4001)
    losses, aucs = 6 - 0.6 * steps / 4000 + 0.3 * rng.standard_normal(4000), 0.75 + 0.1 * rng.standard_normal(4000)
    quiet = {"mlm_accuracy": 0.2, "recall": 0.0, "flagged_share": 0.0}
    for every, is_level in itertools.product((1, 10, 100, 700), (False, True)):
        watch, rung = Watch(), set()
        for end in range(every, 4001, every):
            part = slice(end - every, end)
            loss = (losses[part] + 0.6 * steps[part] / 4000 * is_level).mean()
            watch.add(end, HEALTHY | quiet | {"mlm_loss": loss, "auc": aucs[part].mean()})
            rung |= alarms_of(watch, end / 8000).keys()
        assert rung == ({"generator stands still"} if is_level else set()), every
        assert len(watch.parts) < 30  # of 40: what nobody looks at any more is forgotten


def test_a_loss_of_zero_rings_no_alarm():
    assert alarms(history(mlm_loss=0.0, mlm_accuracy=0.2), 0.5, 2000) == {}


def test_a_good_generator_that_improves_slowly_is_not_called_out():
    assert alarms(history(mlm_loss=2.0, mlm_accuracy=0.6), 0.5, 2000) == {}


def test_both_networks_at_a_standstill_get_one_remedy_and_never_two_that_contradict():
    still = {"mlm_loss": 6.1, "mlm_accuracy": 0.1}
    one_class = {"auc": 0.51, "recall": 0.0, "flagged_share": 0.0}
    (text,) = alarms(history(**still, **one_class), 0.5, 2000).values()
    assert text.startswith("neither network learns") and "a third" in text and "three times" in text

    # one after the other: the second does not advise the opposite of the first
    first = alarms(history(**still, auc=0.7), 0.5, 2000)
    assert first.keys() == {"generator stands still"}
    assert alarms(history(**one_class), 0.6, 2400, (), first.keys()).keys() == {"neither learns"}
    assert alarms(history(**still, **one_class), 0.6, 2400, (), {"neither learns"}) == {}


def test_an_electric_whose_scores_are_all_the_same_is_called_out():
    (text,) = alarms(history(energy_variance=1e-12), 0.5, 2000).values()
    assert "every token has the same score" in text and "schedule.warmup" in text
    assert alarms(history(energy_variance=0.5), 0.5, 2000) == {}


def test_sampling_one_token_everywhere_is_called_out():
    (text,) = alarms(history(sampled_variety=1.0), 0.5, 2000).values()
    assert "sampling is degenerate" in text


def test_an_adversarial_generator_that_knows_less_than_the_most_frequent_token_gets_one_remedy():
    failed = {"mlm_accuracy": 0.02, "mlm_baseline": 0.05, "auc": 0.55, "flagged_share": 0.0, "recall": 0.0}
    (text,) = alarms(history(reward=1.8, **failed), 0.5, 2000).values()
    assert "0.020, of that guess 0.050" in text and "objective.likelihood_weight=1" in text
    assert alarms(history(reward=1.8, mlm_baseline=0.05), 0.5, 2000) == {}
    assert "objective.likelihood_weight" not in str(alarms(history(**failed), 0.5, 2000))


def test_the_beginning_of_a_run_rings_no_alarm():
    assert alarms(history(auc=0.5, recall=0.0, flagged_share=0.0, mlm_accuracy=0.0), 0.05, 2000) == {}


@pytest.mark.parametrize("length", [1, 10, 11, 12, 40, 2000])
@pytest.mark.parametrize("progress", [0.1, 0.1001, 0.25, 1.0])
def test_alarms_can_be_asked_at_any_moment(length, progress):
    assert alarms(history(length), progress, 2000) == {}


def test_metrics_that_are_not_numbers_ring_no_alarm_and_break_nothing():
    assert alarms(history(auc=math.nan, recall=math.nan, flagged_share=math.nan), 0.5, 2000) == {}


def test_area_under_the_curve_counts_ties_half():
    rng = np.random.default_rng(0)
    positives, negatives = rng.integers(0, 9, 300), rng.integers(0, 7, 900)
    histograms = (np.bincount(positives, minlength=9), np.bincount(negatives, minlength=9))
    truth = np.r_[np.ones(300), np.zeros(900)]
    expected = metrics.roc_auc_score(truth, np.r_[positives, negatives])
    assert area_under_curve(*histograms) == pytest.approx(expected)
    assert math.isnan(area_under_curve(np.zeros(9, int), histograms[1]))


def test_effective_number_is_the_exponential_of_the_entropy():
    counts = np.array([5, 0, 1, 7])
    assert effective_number(counts) == pytest.approx(np.exp(stats.entropy(counts)))


def test_the_first_steps_of_a_short_run_are_left_in_peace():
    bad = history(auc=0.5, recall=0.0, flagged_share=0.0, mlm_accuracy=0.0)
    assert alarms(bad, 0.9, 200) == {} and alarms(bad, 0.9, 500)


def test_a_generator_that_does_not_learn_is_not_blamed_for_standing_still():
    stuck = history(mlm_loss=5.7, mlm_accuracy=0.15)
    for kind, expected in (("unigram", set()), ("transformer", {"generator stands still"})):
        settings = GeneratorSettings(kind=kind, sharing="none")
        objective = build_objective(ElectraSettings(), inputs_for(97, TINY, settings))
        assert alarms(stuck, 0.5, 2000, objective.muted_alarms).keys() == expected


def test_text_that_is_learned_by_heart_is_called_out():
    """modern-tiny on 0.17 M tokens after 42 passes; the generator, which is smaller, lags behind."""
    (text,) = by_heart({"auc": 0.887, "mlm_loss": 4.14, "temperature": 1.0}, {"auc": 0.774, "mlm_loss": 5.1}).values()
    assert "by heart (AUC 0.89 in training, 0.77 on held-out text)" in text and "More text" in text
    (text,) = by_heart({"mlm_loss": 2.0}, {"mlm_loss": 4.1}).values()
    assert "MLM loss 2.00 in training, 4.10 on held-out text" in text


def test_what_is_not_learning_by_heart_is_left_in_peace():
    assert by_heart({"auc": 0.823, "mlm_loss": 4.56}, {"auc": 0.812, "mlm_loss": 4.64}) == {}  # 1.9 M tokens, 4 passes
    assert (
        by_heart({"auc": 0.92, "temperature": 1.6}, {"auc": 0.78}) == {}
    )  # hot samples are easier than those on held-out text
    assert by_heart({"auc": 0.78, "mlm_loss": 4.1}, {"auc": 0.92, "mlm_loss": 2.0}) == {}  # dropout, in training alone
    assert by_heart({"loss": 0.1}, {"auc": 0.7}) == {}  # fine-tuning: a score of a task
    assert by_heart({"auc": 0.9, "mlm_loss": 2.0}, {"auc": math.nan, "mlm_loss": math.nan}) == {}
    assert by_heart({}, {"auc": 0.7, "mlm_loss": 5.0}) == {}  # no line of training yet
