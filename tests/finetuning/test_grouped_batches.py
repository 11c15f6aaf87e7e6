"""Batches: every example once, like lengths together, no more padding than needed, the same order for the same seed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from electra.base.batch import SpecialIds
from electra.finetuning import Example
from electra.finetuning.plan import MethodSettings, PlannedTask
from electra.finetuning.training import Encoded, ExampleBatches, Prepared, collate, epoch_order, sorted_order


class NoTargets:
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    settings = SimpleNamespace(epochs=2)

    def targets(self, examples, length):
        return {"row": torch.tensor([example.row for example in examples])}


@given(st.lists(st.integers(3, 60), min_size=1, max_size=400), st.integers(1, 33), st.integers(0, 5))
def test_every_example_is_in_exactly_one_batch_of_at_most_the_size(lengths, batch, seed):
    batches = epoch_order(np.array(lengths), batch, seed, epoch=1)
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    assert max(map(len, batches)) <= batch and len(batches) == -(-len(lengths) // batch)


def test_the_order_is_a_function_of_seed_and_epoch():
    lengths = np.random.default_rng(0).integers(3, 60, 1000)

    def order(seed, epoch):
        return np.concatenate(epoch_order(lengths, 32, seed, epoch)).tolist()

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1) != order(2, 1)
    widths = [int(lengths[batch].max()) for batch in epoch_order(lengths, 32, 1, 0)]
    assert widths[0] == max(widths), "what does not fit must fail at once"
    assert widths[1:] not in (sorted(widths[1:]), sorted(widths[1:], reverse=True))


def test_grouping_pads_little():
    lengths = np.random.default_rng(0).geometric(0.08, 5000) + 3
    padded = sum(len(b) * lengths[b].max() for b in epoch_order(lengths, 32, 0, 0))
    random = sum(len(b) * lengths[b].max() for b in np.array_split(np.arange(5000), 157))
    assert padded < 1.06 * lengths.sum() < 0.5 * random


def test_a_batch_is_as_wide_as_its_longest_and_needs_no_mask_when_all_are_equal():
    examples = [Example([2, 7, 3], 3, 0), Example([2, 8, 3, 9, 3], 3, 1)]
    inputs = collate(NoTargets(), examples, with_targets=True)
    assert inputs.ids.tolist() == [[2, 7, 3, 0, 0], [2, 8, 3, 9, 3]]
    assert inputs.segments.tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]
    assert inputs.padded and inputs.is_real.sum().item() == 8
    assert collate(NoTargets(), examples[1:], with_targets=False).padded is False


def batches_of(examples, min_steps=0) -> ExampleBatches:
    plan = SimpleNamespace(method=MethodSettings(batch=8, min_steps=min_steps))
    planned = PlannedTask(plan, NoTargets(), None, {})
    return ExampleBatches(Prepared(planned, Encoded([], examples), {"dev": Encoded([], [])}), seed=5)


def test_training_passes_over_all_examples_once_an_epoch():
    examples = [Example([2] * (3 + row % 9), 3, row) for row in range(70)]
    batches = list(batches_of(examples).batches(0))
    rows = [row for batch in batches for row in batch.targets["row"].tolist()]
    assert len(batches) == 18 and sorted(rows) == sorted([*range(70), *range(70)])


@pytest.mark.parametrize("step", [1, 8, 9, 10, 17, 18])
def test_batches_from_any_step_on_are_those_of_the_whole_run(step):
    examples = [Example([2] * (3 + row % 9), 3, row) for row in range(70)]

    def rows(first: int) -> list[list[int]]:
        return [batch.targets["row"].tolist() for batch in batches_of(examples).batches(first)]

    assert rows(step) == rows(0)[step:]


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_evaluation_starts_with_the_longest_and_misses_nothing(batch):
    lengths = np.array([5, 3, 9, 9, 4])
    order = sorted_order(lengths, batch)
    assert sorted(np.concatenate(order)) == [0, 1, 2, 3, 4] and lengths[order[0][0]] == 9


@pytest.mark.parametrize(("min_steps", "epochs"), [(0, 2), (18, 2), (19, 3), (100, 12)])
def test_a_small_table_is_gone_through_until_there_are_enough_steps(min_steps, epochs):
    examples = [Example([2] * 5, 3, row) for row in range(70)]
    assert len(list(batches_of(examples, min_steps).batches(0))) == 9 * epochs
