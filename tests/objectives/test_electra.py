from collections import Counter

import numpy as np
import pytest
import reference
import torch
from sklearn import metrics

from conftest import SPECIAL, TINY, inputs_for, make_batch
from electra.base.randomness import uniform
from electra.model.generators import GeneratorSettings
from electra.model.heads import masked_head
from electra.objectives import build as build_objective
from electra.objectives.corruption import SamplingSettings
from electra.objectives.electra import ElectraSettings
from electra.objectives.metrics import summarise

VOCABULARY = 300  # more than two sampling blocks
QUIET = TINY.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0})
HALF = GeneratorSettings(width=0.5, depth=0.5)


def build(settings=None, generator=HALF, noisy=True, sampling=None):
    made = inputs_for(VOCABULARY, QUIET, generator, sampling=sampling or SamplingSettings())
    objective = build_objective(settings or ElectraSettings(), made)
    if noisy:  # a fresh network samples almost uniformly: larger weights make every part matter
        draws = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in objective.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=draws))
    return objective


def arrays(objective):
    """Weights under the names that the reference uses."""
    names = {"corruptor.generator.encoder.": "generator.", "corruptor.generator.head.": "token_head."}
    weights = {}
    for name, tensor in objective.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        weights[name] = tensor.detach().numpy()
    return weights


@pytest.mark.parametrize("sharing", ["tied", "none", "all"])
@pytest.mark.parametrize(("temperature", "disallow"), [(1.0, False), (1.7, True)])
def test_the_whole_step_equals_a_float64_reference_written_from_the_paper(sharing, temperature, disallow):
    generator = (
        GeneratorSettings(width=1, depth=1, sharing="all")
        if sharing == "all"
        else HALF.model_copy(update={"sharing": sharing})
    )
    sampling = SamplingSettings(temperature=temperature, start_temperature=temperature, disallow_correct=disallow)
    objective = build(generator=generator, sampling=sampling).double()
    batch = make_batch(vocabulary=VOCABULARY)
    loss = objective(batch)
    corrupted = objective.corruptor(batch)
    logits = objective.networks()["discriminator"].detect(corrupted.batch)

    weights = arrays(objective)
    small = objective.corruptor.generator.encoder.settings
    sizes = (
        (small.layers, small.heads, "generator.embeddings"),
        (QUIET.layers, QUIET.heads, "discriminator.embeddings"),
    )
    count = corrupted.chosen.positions.shape[1]
    noise = {
        name: uniform(batch.seed, name, batch.samples, width).double().numpy()
        for name, width in (("choose", batch.ids.shape[1]), ("mask", count), ("sample", 2 * count))
    }
    special = [SPECIAL.pad, SPECIAL.unk, SPECIAL.cls, SPECIAL.sep, SPECIAL.mask]
    rows = batch.ids.numpy(), batch.segments.numpy(), batch.is_real.numpy()
    expected = reference.step(weights, sizes, special, *rows, noise, 0.15, 0.85, (1, 50), temperature, disallow)

    assert np.array_equal(corrupted.batch.ids.numpy(), expected["corrupted"])
    assert np.array_equal(corrupted.is_replaced.numpy(), expected["is_replaced"])
    real = batch.is_real.numpy()
    np.testing.assert_allclose(logits.detach().numpy()[real], expected["logits"][real], atol=1e-10)
    assert corrupted.generated.mlm_loss.item() == pytest.approx(expected["mlm"], rel=1e-10)
    assert loss.total.item() == pytest.approx(expected["total"], rel=1e-10)
    assert expected["is_replaced"].any()


@pytest.mark.parametrize("disallow", [False, True])
def test_a_sampled_token_that_equals_the_original_is_original_unless_it_is_disallowed(disallow):
    objective = build(sampling=SamplingSettings(disallow_correct=disallow))
    batch = make_batch(vocabulary=VOCABULARY)
    words, bias = torch.eye(VOCABULARY), torch.zeros(VOCABULARY)
    objective.corruptor.generator.fill = lambda masked, positions, targets, *rest: masked_head(
        50 * words[targets.flatten()], words, bias, targets.flatten(), *rest
    )
    corrupted = objective.corruptor(batch)
    assert corrupted.chosen.used.any()
    assert corrupted.is_replaced.sum() == (corrupted.chosen.used.sum() if disallow else 0)
    assert torch.equal(corrupted.batch.ids, batch.ids) is not disallow


def test_the_asked_shares_of_tokens_are_chosen_and_masked():
    objective, batch = build(), make_batch(rows=400, length=40, vocabulary=VOCABULARY, padded=False)
    corrupted = objective.corruptor(batch)
    chosen, masked = corrupted.chosen.used.sum().item(), corrupted.masked.ids
    assert chosen == 400 * 6
    masks = (masked == SPECIAL.mask).sum().item()
    assert masks / chosen == pytest.approx(0.85, abs=3 * (0.85 * 0.15 / chosen) ** 0.5)
    assert ((masked != batch.ids) & (masked != SPECIAL.mask)).sum() == 0  # never random words


def gradients(objective, part):
    return {
        name
        for name, p in objective.named_parameters()
        if p.grad is not None and p.grad.abs().sum() > 0 and name.startswith(part)
    }


@pytest.mark.parametrize("sharing", ["tied", "none"])
def test_the_discriminators_gradient_never_reaches_the_generators_body(sharing):
    objective = build(ElectraSettings(generator_weight=0), HALF.model_copy(update={"sharing": sharing}))
    objective(make_batch(vocabulary=VOCABULARY)).total.backward()
    assert gradients(objective, "discriminator.layers") and gradients(objective, "detection_head")
    assert not gradients(objective, "corruptor")


def test_the_generators_gradient_never_reaches_the_discriminators_body():
    objective = build(ElectraSettings(detection_weight=0))
    objective(make_batch(vocabulary=VOCABULARY)).total.backward()
    assert gradients(objective, "corruptor.generator.encoder.layers")
    assert gradients(objective, "corruptor.generator.head")
    assert not gradients(objective, "discriminator.layers") and not gradients(objective, "detection_head")
    assert gradients(objective, "discriminator.embeddings")  # tied: both learn the tables


def test_tied_shares_word_position_type_and_norm_and_none_shares_nothing():
    tied = build()
    generator = tied.corruptor.generator.encoder
    assert generator.embeddings is tied.discriminator.embeddings
    assert generator.project is not tied.discriminator.project
    names = [name for name, _ in tied.named_parameters()]
    assert not any(name.startswith("corruptor.generator.encoder.embeddings") for name in names)
    none = build(generator=HALF.model_copy(update={"sharing": "none"}))
    assert not {id(p) for p in none.corruptor.parameters()} & {id(p) for p in none.discriminator.parameters()}


def test_accumulated_micro_batches_are_corrupted_as_the_whole_batch_is():
    objective, batch = build(), make_batch(vocabulary=VOCABULARY)
    whole = objective.corruptor(batch).batch.ids
    parts = torch.cat([objective.corruptor(part).batch.ids for part in batch.split(3)])
    assert torch.equal(whole, parts)


def test_the_temperature_cools_in_a_straight_line_and_evaluation_is_cold():
    sampling = SamplingSettings(start_temperature=2.0, cooling=0.5)
    assert [sampling.temperature_at(p) for p in (0.0, 0.25, 0.5, 1.0)] == [2.0, 1.5, 1.0, 1.0]


def test_metrics_equal_sklearn_on_the_same_answers():
    objective, batch = build(), make_batch(rows=200, vocabulary=VOCABULARY, padded=False)
    sums = objective(batch).sums
    corrupted = objective.corruptor(batch)
    logits = objective.networks()["discriminator"].detect(corrupted.batch).detach()[batch.is_real].numpy()
    truth = corrupted.is_replaced[batch.is_real].numpy()
    measured = summarise(sums)
    assert measured["auc"] == pytest.approx(metrics.roc_auc_score(truth, logits), abs=2e-3)
    assert measured["precision"] == pytest.approx(metrics.precision_score(truth, logits > 0))
    assert measured["recall"] == pytest.approx(metrics.recall_score(truth, logits > 0))
    assert measured["rtd_accuracy"] == pytest.approx(metrics.accuracy_score(truth, logits > 0))
    assert measured["rtd_loss"] == pytest.approx(
        metrics.log_loss(truth, 1 / (1 + np.exp(-logits.astype(float)))), rel=1e-5
    )
    assert measured["majority_baseline"] == pytest.approx(max(truth.mean(), 1 - truth.mean()))
    targets = batch.ids.gather(1, corrupted.chosen.positions)
    sampled = corrupted.batch.ids.gather(1, corrupted.chosen.positions)
    assert measured["sampled_accuracy"] == pytest.approx((targets == sampled).float().mean().item())
    commonest = Counter(targets.flatten().tolist()).most_common(1)[0][1]
    assert measured["mlm_baseline"] == pytest.approx(commonest / targets.numel())


def test_metrics_of_two_batches_add_up():
    objective = build()
    first, second = (make_batch(rows=8, vocabulary=VOCABULARY, seed=seed, padded=False) for seed in (1, 2))
    sums = [objective(batch).sums for batch in (first, second)]
    together = summarise({name: sums[0][name] + sums[1][name] for name in sums[0]})
    alone = [summarise(part) for part in sums]
    assert together["rtd_loss"] == pytest.approx((alone[0]["rtd_loss"] + alone[1]["rtd_loss"]) / 2, rel=1e-5)
    assert together["mlm_loss"] == pytest.approx((alone[0]["mlm_loss"] + alone[1]["mlm_loss"]) / 2, rel=1e-5)
