import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from conftest import SPECIAL, VOCABULARY, make_batch
from electra.base.randomness import uniform
from electra.model.heads import inverse_cdf, sample_tokens
from electra.objectives import corruption
from electra.objectives.corruption import MaskingSettings, SamplingSettings, maskable, replace_at, sample


def choose(batch, share=0.15):
    continues = torch.zeros(VOCABULARY, dtype=torch.bool)
    positions, used, *_ = corruption.choose(batch, MaskingSettings(share=share), SPECIAL, continues)
    return positions, used


def test_special_tokens_and_padding_are_never_chosen_but_unk_is():
    batch = make_batch(rows=6, length=24)
    chosen = set()
    for seed in range(200):
        positions, used = choose(replace(batch, seed=seed), share=0.3)
        chosen |= set(batch.ids.gather(1, positions)[used].tolist())
    assert not chosen & {SPECIAL.pad, SPECIAL.cls, SPECIAL.sep, SPECIAL.mask}
    assert SPECIAL.unk in chosen


@pytest.mark.parametrize(("length", "share", "count"), [(128, 0.15, 19), (512, 0.15, 77), (512, 0.25, 128)])
def test_full_rows_get_exactly_the_papers_number_of_distinct_positions(length, share, count):
    batch = make_batch(rows=4, length=length, padded=False)
    positions, used = choose(batch, share)
    assert positions.shape[1] == count and used.all()
    assert all(len(set(row)) == count for row in positions.tolist())


def test_short_rows_get_their_own_share_and_at_least_one():
    batch = make_batch(rows=11, length=24)
    batch.ids[10, :4] = torch.tensor([SPECIAL.cls, 7, SPECIAL.sep, SPECIAL.pad])
    batch.is_real[10] = torch.arange(24) < 3  # its share rounds to none
    _, used = choose(batch)
    real = batch.is_real.sum(1)
    assert used.sum(1).tolist() == [max(1, round(n * 0.15)) for n in real.tolist()]


def test_a_row_with_nothing_to_choose_is_left_alone():
    batch = make_batch(rows=2, length=8, padded=False)
    batch.ids[0] = SPECIAL.sep
    _, used = choose(batch)
    assert not used[0].any() and used[1].any()


def test_every_maskable_position_is_equally_likely():
    row = make_batch(rows=1, length=24, padded=False)
    many = [tensor.expand(20_000, -1) for tensor in (row.ids, row.segments, row.is_real)]
    positions, _ = choose(row.with_tensors([*many, torch.arange(20_000)]))
    counts = np.bincount(positions.flatten().numpy(), minlength=24)[maskable(row, SPECIAL)[0].numpy()]
    assert stats.chisquare(counts).pvalue > 1e-4


def test_replacing_changes_only_marked_positions():
    ids = torch.arange(12).view(2, 6)
    positions = torch.tensor([[1, 4], [0, 5]])
    where = torch.tensor([[True, False], [True, True]])
    replaced = replace_at(ids, positions, torch.full_like(positions, 99), where)
    assert replaced.tolist() == [[0, 99, 2, 3, 4, 5], [99, 7, 8, 9, 10, 99]]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("vocabulary", [7, 300])
def test_sampling_follows_the_softmax(vocabulary, temperature):
    logits = 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(1))
    draws = 200_000
    noise = uniform(0, "sample", torch.arange(draws), 2)
    sampled = sample_tokens(logits.expand(draws, -1), noise, temperature)
    expected = torch.softmax(logits.double() / temperature, 0).numpy() * draws
    counts = np.bincount(sampled.numpy(), minlength=vocabulary)
    enough = expected >= 5
    observed = np.append(counts[enough], counts[~enough].sum())
    wanted = np.append(expected[enough], expected[~enough].sum())
    keep = wanted > 0
    assert stats.chisquare(observed[keep], wanted[keep]).pvalue > 1e-4


def test_disallow_correct_never_samples_the_original_and_keeps_the_other_proportions():
    logits = torch.tensor([3.0, 1.0, 0.0, -1.0])
    draws = 100_000
    noise = uniform(0, "sample", torch.arange(draws), 2)
    targets = torch.zeros(draws, dtype=torch.long)
    settings = SamplingSettings(disallow_correct=True)
    counts = np.bincount(sample(logits.expand(draws, -1), noise, settings, 1.0, targets).numpy(), minlength=4)
    expected = torch.softmax(logits[1:].double(), 0).numpy() * draws
    assert counts[0] == 0
    assert stats.chisquare(counts[1:], expected).pvalue > 1e-4


def test_sampling_takes_half_precision_logits_without_drawing_in_half_precision():
    """Gumbel noise in bfloat16 cannot exceed 5.5 and ties by the thousand; a flat distribution shows it at once."""
    logits = torch.zeros(1, 30_522, dtype=torch.bfloat16).expand(4000, -1)
    sampled = sample_tokens(logits, uniform(0, "sample", torch.arange(4000), 2), 1.0)
    assert len(set(sampled.tolist())) > 3600  # 4000 draws from 30,522: about 3,750 distinct
    assert stats.kstest(sampled.numpy() / 30_522, "uniform").pvalue > 1e-4


def test_the_inverse_of_the_distribution_function_at_its_edges():
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]]).expand(5, -1)
    noise = torch.tensor([1e-7, 0.2499, 0.25, 0.2501, 1 - 1e-7])
    assert inverse_cdf(weights, noise).tolist() == [1, 1, 3, 3, 3]


def test_uniform_numbers_are_uniform_and_independent_of_the_batch_around_them():
    samples = torch.arange(5000)
    numbers = uniform(3, "anything", samples, 40)
    assert numbers.min() > 0 and numbers.max() < 1
    assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(numbers[:-1].flatten(), numbers[1:].flatten())[0, 1]) < 4 / math.sqrt(numbers.numel())
    assert torch.equal(uniform(3, "anything", samples[17:19], 40), numbers[17:19])
    assert not torch.equal(uniform(3, "other", samples[:2], 40), numbers[:2])
    assert not torch.equal(uniform(4, "anything", samples[:2], 40), numbers[:2])
