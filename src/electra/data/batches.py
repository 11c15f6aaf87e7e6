"""Rows -> batches, in an order that is a pure function of (seed, step).

Sample i of a run (i = step * batch + place in the batch) is row permute(i mod rows) of epoch i div rows. A process takes
its places of every global batch, so any number of processes sees the same data in the same order; worker threads
compute whole batches ahead, so their number changes nothing. The only state is the step.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from electra.base.batch import Batch
from electra.base.errors import DataError
from electra.base.randomness import mix, permute
from electra.data.rows import Rows


class Loader:
    """Batches of `batch` rows a step, of which this process (`rank` of `world`) gets its consecutive part.
    `pin`: in memory from which a GPU copies while everybody goes on."""

    def __init__(
        self,
        rows: Rows,
        batch: int,
        steps: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        workers: int = 1,
        pin: bool = False,
    ):
        assert batch % world == 0, "the global batch divides evenly among processes"
        if not len(rows):
            raise DataError("the prepared text makes no rows. Prepare more text.")
        self.rows, self.batch, self.steps, self.seed = rows, batch, steps, seed
        self.rank, self.world, self.workers, self.pin = rank, world, workers, pin

    def samples(self, step: int) -> np.ndarray:
        share = self.batch // self.world
        return step * self.batch + self.rank * share + np.arange(share, dtype=np.int64)

    def row_indices(self, samples: np.ndarray) -> np.ndarray:
        """Which row each sample is: every epoch passes once over all rows, each in an order of its own."""
        epochs, places = samples // len(self.rows), samples % len(self.rows)
        rows = np.empty_like(samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = permute(places[here], len(self.rows), mix(self.seed, "order", int(epoch)))
        return rows

    def batch_at(self, step: int) -> Batch:
        samples = self.samples(step)
        batch = collate(self.rows, self.row_indices(samples), samples, self.seed, step / self.steps)
        return batch.pinned() if self.pin else batch

    def batches(self, first_step: int) -> Iterator[Batch]:
        """The batch of every step from `first_step` to the last, computed ahead by `workers` threads."""
        with ThreadPoolExecutor(self.workers) as pool:
            ahead: list[Future[Batch]] = []
            for step in range(first_step, self.steps):
                while len(ahead) < 2 * self.workers and step + len(ahead) < self.steps:
                    ahead.append(pool.submit(self.batch_at, step + len(ahead)))
                yield ahead.pop(0).result()


def collate(rows: Rows, indices: np.ndarray, samples: np.ndarray, seed: int, progress: float = 1.0) -> Batch:
    first, real = rows.lengths(indices)
    padded = bool((real < rows.length).any())
    move = torch.from_numpy
    ids, key = move(rows.ids(indices)), mix(seed, "corruption")
    return lay_out(ids, move(first), move(real), move(samples), key, padded, progress)


def lay_out(
    ids: Tensor, first: Tensor, real: Tensor, samples: Tensor, seed: int, padded: bool, progress: float
) -> Batch:
    """The batch of `ids`, of which `real` are real in each row, and `first` of those in the first segment; on the
    device of the tensors."""
    places = torch.arange(ids.shape[1], device=ids.device)
    is_real = places < real[:, None]
    segments = (is_real & (places >= first[:, None])).long()
    return Batch(ids, segments, is_real, samples, seed, padded, progress)


class HeldOut:
    """The same rows with the same corruption at every evaluation: at most `limit` rows, spread evenly over all."""

    def __init__(self, rows: Rows, batch: int, limit: int, seed: int):
        chosen = np.linspace(0, len(rows) - 1, min(limit, len(rows))).round().astype(np.int64)
        self.rows, self.seed = rows, seed
        self.parts = np.array_split(chosen, -(-len(chosen) // batch)) if len(chosen) else []

    def __iter__(self) -> Iterator[Batch]:
        for part in self.parts:
            yield collate(self.rows, part, part, mix(self.seed, "heldout"))

    def __len__(self) -> int:
        return len(self.parts)
