import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_reference import RowByRow

from conftest import SPECIAL
from electra.base.batch import Batch
from electra.base.randomness import permute
from electra.data.batches import HeldOut, Loader, collate
from electra.data.rows import PackedRows, RowsSettings, SegmentRows, build_rows, plan_segments
from electra.data.shards import Shard, TokenData


def make_data(documents_of_shards: list[list[list[int]]]) -> TokenData:
    """Shards from line lengths: one list a shard, of one list a document, of the tokens of each line. Every token is
    unique within its shard, so that lost or repeated text shows."""
    shards = []
    for documents in documents_of_shards:
        lines = np.cumsum([length for document in documents for length in document])
        ends = np.cumsum([sum(document) for document in documents])
        tokens = np.arange(5, 5 + (ends[-1] if len(ends) else 0)).astype(np.uint16)
        shards.append(Shard(tokens, ends.astype(np.int64), lines.astype(np.int64)))
    return TokenData(tuple(shards), SimpleNamespace())


def all_rows(rows, length):
    every = np.arange(len(rows))
    batch = collate(rows, every, every, seed=0)
    for ids, segments, is_real in zip(*map(np.asarray, (batch.ids, batch.segments, batch.is_real)), strict=True):
        real = is_real.sum()
        assert 2 <= real <= length == len(ids) and is_real[:real].all()
        assert not ids[real:].any() and not segments[real:].any() and ids[0] == SPECIAL.cls
        yield ids[:real], segments[:real]


corpora = st.lists(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=6), min_size=1, max_size=3
)


@given(corpora, st.integers(8, 32))
@settings(max_examples=60, deadline=None)
def test_packed_rows_hold_every_token_once_and_close_every_document(documents, length):
    data = make_data(documents)
    rows = list(all_rows(PackedRows(data, length, SPECIAL), length))
    stream = np.concatenate([ids[1:] for ids, _ in rows])
    expected = []
    for shard in data.shards:
        start = 0
        for end in shard.documents:
            expected += [*shard.tokens[start:end], SPECIAL.sep]
            start = end
    assert stream.tolist() == expected


@given(corpora, st.integers(8, 32), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_segment_rows_hold_every_token_once_in_order_and_never_cross_documents(documents, length, seed):
    data = make_data(documents)
    rows = SegmentRows(data, length, SPECIAL, seed)
    tokens = []
    for ids, segments in all_rows(rows, length):
        separators = np.flatnonzero(ids == SPECIAL.sep)
        assert len(separators) in (1, 2) and separators[-1] == len(ids) - 1
        assert segments.tolist() == [0] * (separators[0] + 1) + [1] * (len(ids) - separators[0] - 1)
        tokens += ids[(ids != SPECIAL.sep) & (ids != SPECIAL.cls)].tolist()
    assert tokens == [token for shard in data.shards for token in shard.tokens.tolist()]
    for start, _, stop in rows.plan[: rows.first_row[1]]:
        ends = data.shards[0].documents
        assert np.searchsorted(ends, start, side="right") == np.searchsorted(ends, stop, side="left")


def test_segments_follow_the_originals_probabilities():
    """Lines of 10 tokens, rows of 128: one in ten a single segment; of the others the first holds 60 tokens (six lines
    stay strictly below the target of 62) or, after a fair coin, 70; one in twenty aims shorter."""
    lines = np.arange(10, 10 * 400_001, 10)
    documents = lines[399::400]
    plan = plan_segments(lines, documents, 128, np.random.default_rng(0))
    first, second = plan[:, 1] - plan[:, 0], plan[:, 2] - plan[:, 1]
    inner = plan[:, 2] % 4000 != 0  # the end of a document cuts the row before it short
    single = (second == 0) & (first == 126)
    assert single[inner].mean() == pytest.approx(0.1 * 0.95, abs=0.015)
    aligned = inner & (plan[:, 0] % 10 == 0) & (first + second == 125) & (second > 0)
    assert np.isin(first[aligned], (60, 70)).mean() > 0.98  # the rest: targets drawn just below 128
    assert (first[aligned] == 70).mean() == pytest.approx(0.5, abs=0.05)
    short = first[inner] + second[inner] < 110
    assert short.mean() == pytest.approx(0.05 * 0.85, abs=0.015)


def test_a_line_longer_than_a_row_is_carried_over_and_not_dropped():
    data = make_data([[[1000]]])
    rows = SegmentRows(data, 32, SPECIAL, seed=0)
    assert sum(int(row[2] - row[0]) for row in rows.plan) == 1000


def make_loader(**changes) -> Loader:
    data = make_data([[[7, 9, 4], [30], [5, 5]] * 20, [[12] * 9] * 15])
    rows = build_rows(RowsSettings(kind="segments", length=16), data, SPECIAL, 3)
    return Loader(**({"rows": rows, "batch": 8, "steps": 200, "seed": 3} | changes))


def collected(loader: Loader, first: int, count: int) -> np.ndarray:
    batches = loader.batches(first)
    return np.concatenate([next(batches).ids.numpy() for _ in range(count)])


def same(batch: Batch, expected: Batch) -> bool:
    """To the bit, and of the same types."""
    return all(
        (found == wanted).all() and found.dtype == wanted.dtype if torch.is_tensor(wanted) else found == wanted
        for found, wanted in zip(dataclasses.astuple(batch), dataclasses.astuple(expected), strict=True)
    )


@given(corpora, st.sampled_from(["packed", "segments"]), st.integers(8, 32), st.integers(0, 5), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_rows_made_at_once_are_the_rows_made_one_by_one(documents, kind, length, seed, world):
    rows = build_rows(RowsSettings(kind=kind, length=length), make_data(documents), SPECIAL, seed)
    steps = 2 + len(rows) // 12  # more than an epoch
    for rank in range(world):
        loader = Loader(rows, 12, steps, seed, rank, world)
        expected = RowByRow(rows)
        for step, batch in enumerate(loader.batches(0)):
            assert same(batch, expected.batch(loader, step))


def test_the_first_thousand_rows_are_the_same_for_any_number_of_loader_workers():
    expected = collected(make_loader(), 0, 125)
    assert len(expected) == 1000
    for workers in (2, 3):
        assert np.array_equal(collected(make_loader(workers=workers), 0, 125), expected)


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_processes_sees_the_same_global_order(world):
    expected = collected(make_loader(), 0, 20)
    ranks = [collected(make_loader(rank=rank, world=world), 0, 20) for rank in range(world)]
    parts = [part.reshape(20, -1, 16) for part in ranks]
    assert np.array_equal(np.concatenate(parts, axis=1).reshape(-1, 16), expected)


def test_starting_at_a_step_gives_what_an_uninterrupted_run_gets_there():
    assert np.array_equal(collected(make_loader(), 30, 5), collected(make_loader(), 0, 35)[30 * 8 :])


def test_an_epoch_passes_once_over_every_row_and_the_next_one_in_another_order():
    loader = make_loader()
    size = len(loader.rows)
    first, second = (loader.row_indices(np.arange(size) + epoch * size) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(size))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, make_loader(seed=4).row_indices(np.arange(size)))


@given(st.integers(1, 3000), st.integers(0, 2**62))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_bijection(size, key):
    assert sorted(permute(np.arange(size), size, key)) == list(range(size))


def test_permute_mixes_well():
    order = permute(np.arange(100_000), 100_000, 1)
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02
    assert (np.abs(np.diff(order)) < 10).mean() < 0.001


def test_held_out_batches_are_the_same_every_time_and_spread_over_all_rows():
    rows = make_loader().rows
    heldout = HeldOut(rows, batch=8, limit=20, seed=1)
    once, again = ([dataclasses.astuple(batch)[0] for batch in heldout] for _ in range(2))
    assert all((a == b).all() for a, b in zip(once, again, strict=True))
    chosen = np.concatenate(heldout.parts)
    assert len(chosen) == 20 and chosen[0] == 0 and chosen[-1] == len(rows) - 1
