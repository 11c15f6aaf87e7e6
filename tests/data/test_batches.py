"""The corpus on the device gives the batches of the streamed one, bit for bit. The CPU is a device like any other."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rows import corpora, make_data, same

from conftest import SPECIAL
from electra.base.errors import MachineError
from electra.data import batches as batches_module
from electra.data.batches import STEPS_AHEAD, Loader, Resident, place_corpus
from electra.data.rows import RowsSettings, build_rows
from electra.data.shards import Shard
from electra.pretraining.run import pretrain
from electra.pretraining.settings import resolve
from electra.train.checkpoint import checkpoint_folders

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_loader(kind: str, documents=None, length: int = 17, steps: int = 150, data=None, **changes) -> Loader:
    data = data or make_data(documents or [[[7, 9, 4], [30], [5, 5]] * 20, [[12] * 9] * 15])
    rows = build_rows(RowsSettings(kind=kind, length=length), data, SPECIAL, 3)
    return Loader(**({"rows": rows, "batch": 12, "steps": steps, "seed": 3} | changes))


def on(device: torch.device, loader: Loader, vocab_size: int = 60_000) -> Resident:
    placed, _ = place_corpus(loader, vocab_size, "device", device)
    assert isinstance(placed, Resident)
    return placed


@given(corpora, st.sampled_from(["packed", "segments"]), st.integers(8, 32), st.integers(0, 30))
@settings(max_examples=40, deadline=None)
def test_resident_batches_are_the_streamed_ones(documents, kind, length, first_step):
    loader = make_loader(kind, documents, length, steps=first_step + 5)
    pairs = zip(on(CPU, loader).batches(first_step), loader.batches(first_step), strict=True)
    assert all([same(batch, expected) for batch, expected in pairs])


@pytest.mark.parametrize("kind", ["packed", "segments"])
def test_they_are_also_across_epochs_and_blocks_of_steps_and_in_every_process(kind):
    for rank in range(3):
        loader = make_loader(kind, rank=rank, world=3, steps=2 * STEPS_AHEAD + 7)
        assert loader.steps * loader.batch > 2 * len(loader.rows)
        batches = list(on(CPU, loader).batches(5))
        assert len(batches) == loader.steps - 5 and any(batch.padded for batch in batches)
        assert all(same(batch, loader.batch_at(step)) for step, batch in enumerate(batches, 5))
        assert same(on(CPU, loader).batch_at(9), loader.batch_at(9))


@pytest.mark.parametrize("place", [lambda loader: loader, lambda loader: on(CPU, loader)], ids=["streamed", "resident"])
def test_all_processes_take_a_step_for_padded_where_one_has_a_padded_row(place):
    alone = make_loader("packed", steps=40, batch=6)
    expected = [batch.padded for batch in alone.batches(0)]
    assert {*expected} == {False, True}
    ranks = [make_loader("packed", steps=40, batch=6, rank=rank, world=3) for rank in range(3)]
    assert all([batch.padded for batch in place(loader).batches(0)] == expected for loader in ranks)
    own = [[bool((~batch.is_real).any()) for batch in loader.batches(0)] for loader in ranks]
    assert own[0] != expected


def test_unpadded_batches_are_known_to_be_unpadded():
    loader = make_loader("packed", [[[149]]], length=16, batch=2)  # 150 tokens with [SEP]: ten full rows
    assert not any(batch.padded for batch in on(CPU, loader).batches(0))


@pytest.mark.parametrize("vocab_size, bits", [(1 << 15, 16), (1 << 16, 16), ((1 << 16) + 1, 32)])
def test_tokens_take_the_bits_that_the_vocabulary_needs(vocab_size, bits):
    tokens = np.linspace(5, vocab_size - 1, 400).astype(np.uint32)
    ends = np.array([100, 400])
    data = dataclasses.replace(make_data([[[1]]]), shards=(Shard(tokens, ends, ends),))
    loader = make_loader("packed", data=data, steps=30)
    placed = on(CPU, loader, vocab_size)
    assert placed.tokens.element_size() * 8 == bits
    batches = list(placed.batches(0))
    assert max(int(batch.ids.max()) for batch in batches) == vocab_size - 1
    assert all(same(batch, loader.batch_at(step)) for step, batch in enumerate(batches))


def test_a_corpus_is_placed_where_it_fits(monkeypatch):
    loader = make_loader("segments")
    needed = on(CPU, loader).tokens.nbytes
    free = {"bytes": 4 * needed}
    monkeypatch.setattr(batches_module, "free_bytes", lambda device: free["bytes"])
    monkeypatch.setattr(Resident, "__init__", lambda *arguments: None)
    gpu = torch.device("cuda")

    def placed(where, device=gpu):
        found, note = place_corpus(loader, 60_000, where, device)
        assert note.startswith(f"corpus: {len(loader.rows):,} rows, ")
        return isinstance(found, Resident), note

    assert placed("auto")[0] and "MiB on cuda" in placed("auto")[1]
    assert not placed("auto", CPU)[0] and not placed("stream")[0]
    free["bytes"] -= 1
    on_device, note = placed("auto")
    assert not on_device and "more than a quarter of the" in note
    assert placed("device")[0]
    free["bytes"] = needed - 1
    with pytest.raises(MachineError, match=r"train.corpus=device needs .* MiB, .* MiB are free on cuda. Use .*stream"):
        placed("device")


def test_moving_a_batch_to_where_it_lies_copies_nothing():
    batch = make_loader("segments").batch_at(0)
    assert batch.to("cpu").ids is batch.ids and batch.to(CPU).samples is batch.samples


def test_a_run_ends_with_the_same_weights_wherever_its_corpus_lies(recipe, prepared, tmp_path, caplog):
    caplog.set_level("INFO")

    def run(corpus: str, folder: str) -> bytes:
        words = [f"data={prepared}", f"run={tmp_path / folder}", f"train.corpus={corpus}"]
        pretrain(resolve(str(recipe), [*words, "train.steps=8", "schedule.warmup=2", "train.device=cpu"])[0])
        return (checkpoint_folders(tmp_path / folder / "checkpoints")[-1] / "model.safetensors").read_bytes()

    streamed = run("stream", "streamed")
    assert "rows, streamed from disk" in caplog.text
    assert run("device", "resident") == streamed
    assert "MiB on cpu" in caplog.text
    assert run("stream", "resident") == streamed  # a run may go on with another value


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["packed", "segments"])
def test_on_the_gpu_batches_are_the_same_and_nothing_waits_for_it(kind):
    loader = make_loader(kind)
    placed = on(torch.device("cuda"), loader)
    placed.batch_at(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = [batch.to("cuda") for batch in placed.batches(0)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step, batch in enumerate(batches):
        assert batch.ids.is_cuda and batch.to("cuda").ids is batch.ids
        assert same(batch.to("cpu"), loader.batch_at(step))


@pytest.mark.gpu
@needs_gpu
def test_streamed_batches_are_pinned_and_arrive_whole():
    plain, pinned = make_loader("segments"), make_loader("segments", pin=True, workers=2)
    assert pinned.batch_at(0).ids.is_pinned() and pinned.batch_at(0).is_real.is_pinned()
    arrived = [batch.to("cuda") for batch in pinned.batches(0)]
    assert all(same(batch.to("cpu"), plain.batch_at(step)) for step, batch in enumerate(arrived))


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_a_small_corpus_is_resident_by_default():
    assert isinstance(place_corpus(make_loader("packed"), 60_000, "auto", torch.device("cuda"))[0], Resident)
