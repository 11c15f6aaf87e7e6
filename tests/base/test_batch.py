"""Rows in batches for inference, against every way to cut them."""

import itertools

import numpy as np
import pytest

from electra.base.batch import CALL_TOKENS, by_length


def cost(batches: list[list[int]], device: str) -> int:
    return sum(CALL_TOKENS[device] + len(it) * max(it) for it in batches)


def every_cut(lengths: list[int]) -> list[list[list[int]]]:
    ordered = sorted(lengths, reverse=True)
    cuts = []
    for is_cut in itertools.product([False, True], repeat=len(ordered) - 1):
        batches = [[ordered[0]]]
        for length, begins in zip(ordered[1:], is_cut, strict=True):
            batches.append([length]) if begins else batches[-1].append(length)
        cuts.append(batches)
    return cuts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("most_rows", "most_tokens"), [(64, 1 << 62), (3, 1 << 62), (64, 200)])
@pytest.mark.parametrize("seed", range(5))
def test_no_other_way_to_cut_rows_of_these_lengths_is_cheaper(seed, most_rows, most_tokens, device):
    lengths = np.random.default_rng(seed).integers(3, 129, 10)
    chosen = by_length(lengths, device, most_rows, most_tokens)

    def is_allowed(batches: list[list[int]]) -> bool:
        fits = (len(it) == 1 or len(it) * max(it) <= most_tokens for it in batches)
        return all(fits) and max(map(len, batches)) <= most_rows

    ours = [lengths[it].tolist() for it in chosen]
    assert sorted(np.concatenate(chosen)) == list(range(10)) and is_allowed(ours)
    assert cost(ours, device) == min(cost(it, device) for it in every_cut(lengths.tolist()) if is_allowed(it))


@pytest.mark.parametrize("most", [1, 7, 64])
def test_the_longest_come_first_and_equal_rows_keep_their_order(most):
    batches = by_length([5, 3, 9, 9, 4], "cpu", most)
    assert np.concatenate(batches).tolist() == [2, 3, 0, 4, 1]


def test_no_rows_are_no_batches():
    assert by_length([], "cpu", 8) == []
