"""Electric on a language small enough to write out: its energies must find the true probabilities."""

import numpy as np
import torch
from scipy import stats

from conftest import SPECIAL, TINY, inputs_for, make_batch
from electra.base.batch import Batch
from electra.model.generators import GeneratorSettings
from electra.objectives import build as build_objective
from electra.objectives.corruption import MaskingSettings
from electra.objectives.electric import ElectricSettings
from electra.objectives.metrics import summarise

LETTERS, LENGTH, TOPICS, FIRST = 6, 16, 3, 5
LETTER = np.random.default_rng(4).dirichlet(np.full(LETTERS, 0.4), TOPICS) * 0.9 + 0.1 / LETTERS


def write(rng, count):
    """A sentence has a topic, drawn evenly, and each of its letters is drawn as that topic likes it."""
    topics = rng.integers(0, TOPICS, (count, 1))
    draws = rng.random((count, LENGTH, 1))
    return (LETTER[topics].cumsum(2) < draws).sum(2).clip(max=LETTERS - 1)


def log_likelihood(sentences):
    """Which topic it was is not known: the sum over all of them."""
    by_topic = np.log(LETTER[:, sentences]).sum(2)
    return np.logaddexp.reduce(by_topic, axis=0) - np.log(TOPICS)


def exact_pseudo_log_likelihood(sentences):
    """log p(x_t | x_\\t) of every token, by writing out every letter that could stand there."""
    result = np.zeros(sentences.shape)
    for t in range(LENGTH):
        others = np.repeat(sentences[:, None], LETTERS, 1)
        others[:, np.arange(LETTERS), t] = np.arange(LETTERS)
        joint = np.exp(log_likelihood(others.reshape(-1, LENGTH))).reshape(-1, LETTERS)
        result[:, t] = np.log(joint[np.arange(len(joint)), sentences[:, t]] / joint.sum(1))
    return result


def rows_of(sentences, first_sample=0):
    body = torch.from_numpy(sentences) + FIRST
    ends = [torch.full((len(body), 1), token) for token in (SPECIAL.cls, SPECIAL.sep)]
    ids = torch.cat([ends[0], body, ends[1]], 1)
    samples = torch.arange(len(ids)) + first_sample
    real = torch.ones_like(ids, dtype=torch.bool)
    return Batch(ids, torch.zeros_like(ids), real, samples, seed=1, padded=False)


def test_the_learned_energies_rank_as_the_true_probabilities_do():
    encoder = TINY.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0})
    masking, generator = (MaskingSettings(share=0.15), GeneratorSettings(kind="two_tower", width=0.5, depth=0.5))
    objective = build_objective(ElectricSettings(), inputs_for(FIRST + LETTERS, encoder, generator, masking))
    rng = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=5e-3, betas=(0.9, 0.98))
    steps = 300
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(1.0, (step + 1) / 30) * (1 - step / steps)
        objective(rows_of(write(rng, 64), step * 64)).total.backward()
        torch.nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    objective.eval()
    # Sentences of the language and of no language: a score must tell both apart and rank within each.
    unseen = np.concatenate([write(rng, 300), rng.integers(0, LETTERS, (300, LENGTH))])
    with torch.no_grad():
        found = -objective.networks()["discriminator"].detect(rows_of(unseen))[:, 1:-1].numpy()
    exact = exact_pseudo_log_likelihood(unseen)
    assert stats.spearmanr(found.sum(1), exact.sum(1)).statistic >= 0.9
    assert stats.spearmanr(found[:300].sum(1), exact[:300].sum(1)).statistic >= 0.9
    assert stats.spearmanr(found.ravel(), exact.ravel()).statistic >= 0.9
    assert np.abs(found - exact)[:300].mean() < 0.35  # where there was data to learn from, the scale is right too


def test_the_variance_of_the_scores_is_that_of_the_energies_at_real_tokens():
    generator = GeneratorSettings(kind="two_tower", width=0.5, depth=0.5)
    objective = build_objective(ElectricSettings(), inputs_for(97, TINY, generator)).eval()
    batch = make_batch()
    with torch.no_grad():
        corrupted = objective.corruptor(batch)
        metrics = summarise(objective(batch, corrupted).sums, objective.extra_metrics)
        energies = objective.networks()["discriminator"].detect(corrupted.batch)
    expected = energies[batch.is_real].double().numpy().var()
    np.testing.assert_allclose(metrics["energy_variance"], expected, rtol=1e-4)
