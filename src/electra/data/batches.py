"""Rows -> batches, in an order that is a pure function of (seed, step).

Sample i of a run (i = step * batch + place in the batch) is row permute(i mod rows) of epoch i div rows. A process takes
its places of every global batch, so any number of processes sees the same data in the same order. Worker threads
prepare whole batches ahead of time, so their number changes nothing. The only state is the step.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from electra.base.batch import Batch
from electra.base.errors import DataError, MachineError, counted
from electra.base.jobs import cpu_count
from electra.base.randomness import mix, permute
from electra.data.rows import Rows, cumulated
from electra.data.shards import token_dtype

CorpusPlace = Literal["auto", "device", "stream"]
FREE_MEMORY_DIVISOR = 4  # a quarter for the corpus: training needs the rest
ROWS_AT_ONCE = 2048
STEPS_AHEAD = 64  # `permute` takes hardly longer for many steps than for one


@dataclass(frozen=True)
class Loader:
    """Batches of `batch` rows per step. Of each of the `parts` that a step accumulates one after the other, this process (`rank` of
    `world`) gets a consecutive slice, so that all processes compute the same part at the same time. `pin`: in pinned memory,
    from which a GPU copies asynchronously."""

    rows: Rows
    batch: int
    steps: int
    seed: int
    rank: int = 0
    world: int = 1
    parts: int = 1
    workers: int = 1
    pin: bool = False

    def __post_init__(self) -> None:
        assert self.batch % (self.world * self.parts) == 0, "the global batch divides evenly among processes"
        if not len(self.rows):
            raise DataError("the prepared text makes no rows. Prepare more text.")

    def samples(self, step: int) -> np.ndarray:
        places = np.arange(self.batch, dtype=np.int64).reshape(self.parts, self.world, -1)[:, self.rank]
        return step * self.batch + places.ravel()

    def row_indices(self, samples: np.ndarray) -> np.ndarray:
        """The row of each sample: every epoch passes once over all rows, in an order of its own."""
        epochs, places = samples // len(self.rows), samples % len(self.rows)
        rows = np.empty_like(samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = permute(places[here], len(self.rows), mix(self.seed, "order", int(epoch)))
        return rows

    def padded(self, steps: range, real: np.ndarray) -> np.ndarray:
        """For each step, whether a row of any process is padded; `real` are the lengths of this process's rows. All processes must take
        the same path through a step: a CUDA graph that contains collectives must be the same on every GPU."""
        if self.world > 1:
            samples = np.arange(steps.start * self.batch, steps.stop * self.batch, dtype=np.int64)
            _, real = self.rows.lengths(self.row_indices(samples))
        return real.reshape(len(steps), -1).min(axis=1) < self.rows.length

    def batch_at(self, step: int) -> Batch:
        samples = self.samples(step)
        indices = self.row_indices(samples)
        padded = bool(self.padded(range(step, step + 1), self.rows.lengths(indices)[1])[0])
        batch = collate(self.rows, indices, samples, self.seed, step / self.steps, padded)
        return batch.pinned() if self.pin else batch

    def batches(self, first_step: int) -> Iterator[Batch]:
        """The batch of every step from `first_step` to the last, computed ahead by `workers` threads."""
        with ThreadPoolExecutor(self.workers) as pool:
            ahead: list[Future[Batch]] = []
            for step in range(first_step, self.steps):
                while len(ahead) < 2 * self.workers and step + len(ahead) < self.steps:
                    ahead.append(pool.submit(self.batch_at, step + len(ahead)))
                yield ahead.pop(0).result()


def collate(
    rows: Rows, indices: np.ndarray, samples: np.ndarray, seed: int, progress: float = 1.0, padded: bool | None = None
) -> Batch:
    """The batch of some rows. `padded` is computed from them unless the caller knows it of the larger batch they belong to."""
    lengths, key = rows.lengths(indices), mix(seed, "corruption")
    ids, first, real, places = map(torch.from_numpy, (rows.ids(indices), *lengths, samples))
    padded = bool((real < rows.length).any()) if padded is None else padded
    return lay_out(ids, first, real, places, key, padded, progress)


def lay_out(
    ids: Tensor, first: Tensor, real: Tensor, samples: Tensor, seed: int, padded: bool, progress: float
) -> Batch:
    """The batch of `ids`, on their device. In each row the first `real` tokens are real, and the first `first` of those belong to
    the first segment."""
    places = torch.arange(ids.shape[1], device=ids.device)
    is_real = places < real[:, None]
    segments = (is_real & (places >= first[:, None])).long()
    return Batch(ids, segments, is_real, samples, seed, padded, progress)


class HeldOut:
    """The same rows with the same corruption at every evaluation: at most `limit` rows, spread evenly over all. Empty if nothing
    was held out."""

    def __init__(self, rows: Rows | None, batch: int, limit: int, seed: int):
        count = len(rows) if rows else 0
        chosen = np.linspace(0, count - 1, min(limit, count)).round().astype(np.int64)
        self.rows, self.seed = rows, seed
        self.parts = np.array_split(chosen, -(-len(chosen) // batch)) if len(chosen) else []

    def __iter__(self) -> Iterator[Batch]:
        for part in self.parts:
            assert self.rows
            yield collate(self.rows, part, part, mix(self.seed, "heldout"))

    def __len__(self) -> int:
        return len(self.parts)


def place_corpus(
    loader: Loader, vocab_size: int, where: CorpusPlace, device: torch.device
) -> tuple["Loader | Resident", str]:
    """The loader to use, and a line about it. `auto` copies to GPUs only: on a CPU the file cache has the same effect."""
    rows = f"corpus: {counted(len(loader.rows), 'row')}"
    if where == "stream" or (where == "auto" and device.type != "cuda"):
        return loader, f"{rows}, streamed from disk"
    offsets = row_offsets(loader.rows)
    needed = (int(offsets[-1]) + loader.rows.length) * np.dtype(token_dtype(vocab_size)).itemsize
    free = free_bytes(device)
    if where == "auto" and needed > free // FREE_MEMORY_DIVISOR:
        sizes = f"{in_bytes(needed)} is more than a quarter of the {in_bytes(free)} free on {device}"
        return loader, f"{rows}, streamed from disk ({sizes})"
    if needed > free:
        sizes = f"{in_bytes(needed)}, {in_bytes(free)} are free on {device}"
        raise MachineError(f"train.corpus=device needs {sizes}. Use train.corpus=stream.")
    return Resident(loader, offsets, vocab_size, device), f"{rows}, {in_bytes(needed)} on {device}"


class Resident:
    """The batches of `loader`, bit for bit, gathered on `device`: a step moves four numbers per row instead of its tokens.

    All rows are concatenated in one tensor, with special tokens but without padding, in 16 bits per token if the
    vocabulary allows. The host computes which rows a step takes and where they begin (cycle walking in `permute` has no
    fixed number of steps, which does not suit a GPU); the device does the rest. Nothing waits for the device."""

    def __init__(self, loader: Loader, offsets: np.ndarray, vocab_size: int, device: torch.device):
        self.loader, self.rows, self.offsets, self.device = loader, loader.rows, offsets, device
        self.dtype = np.dtype(token_dtype(vocab_size))
        # torch's integers are signed, so a large id comes back negative: `bits` makes it positive again.
        self.bits = (1 << 8 * self.dtype.itemsize) - 1
        # a gather reads `length` tokens for the last row, too
        size, signed = int(offsets[-1]) + self.rows.length, getattr(torch, f"int{8 * self.dtype.itemsize}")
        self.tokens = torch.zeros(size, dtype=signed, device=device)
        self.places = torch.arange(self.rows.length, device=device)
        with ThreadPoolExecutor(cpu_count()) as pool:
            list(pool.map(self._load, chunks(self.rows)))

    def _load(self, indices: np.ndarray) -> None:
        _, real = self.rows.lengths(indices)
        ids = self.rows.ids(indices)[np.arange(self.rows.length) < real[:, None]].astype(self.dtype)
        begin = int(self.offsets[indices[0]])
        self.tokens[begin : begin + len(ids)] = torch.from_numpy(ids.view(f"i{self.dtype.itemsize}"))

    def batch_at(self, step: int) -> Batch:
        return next(self._block(range(step, step + 1)))

    def batches(self, first_step: int) -> Iterator[Batch]:
        """The batch of every step from `first_step` to the last."""
        for begin in range(first_step, self.loader.steps, STEPS_AHEAD):
            yield from self._block(range(begin, min(begin + STEPS_AHEAD, self.loader.steps)))

    def _block(self, steps: range) -> Iterator[Batch]:
        """The batches of some steps. `padded` is computed on the host, so that nothing has to wait for the device."""
        samples = np.concatenate([self.loader.samples(step) for step in steps])
        indices = self.loader.row_indices(samples)
        first, real = self.rows.lengths(indices)
        padded = self.loader.padded(steps, real)
        table = np.stack([samples, self.offsets[indices], first, real]).reshape(4, len(steps), -1)
        moved = torch.from_numpy(table)
        moved = (moved.pin_memory() if self.device.type == "cuda" else moved).to(self.device, non_blocking=True)
        key = mix(self.loader.seed, "corruption")
        for number, step in enumerate(steps):
            samples_here, begins, first_here, real_here = moved[:, number]
            ids = self.tokens[begins[:, None] + self.places].long() & self.bits
            ids.masked_fill_(self.places >= real_here[:, None], self.rows.special.pad)
            progress = step / self.loader.steps
            yield lay_out(ids, first_here, real_here, samples_here, key, bool(padded[number]), progress)


def chunks(rows: Rows) -> Iterator[np.ndarray]:
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        yield np.arange(begin, min(begin + ROWS_AT_ONCE, len(rows)))


def row_offsets(rows: Rows) -> np.ndarray:
    """The start of each row if all are concatenated, and the end of the last one."""
    return cumulated(np.concatenate([rows.lengths(indices)[1] for indices in chunks(rows)]))


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:  # macOS does not say
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def in_bytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
