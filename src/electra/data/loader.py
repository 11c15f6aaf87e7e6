"""Rows -> batches, in an order that is a pure function of (seed, step).

Sample i of a run (i = step * batch + place in the batch) is row permute(i mod rows) of epoch i div rows. A process takes
its places of every global batch, so any number of processes sees the same data in the same order; worker threads
compute whole batches ahead, so their number changes nothing. The only state is the step.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from electra.batch import Batch
from electra.data.rows import Rows
from electra.errors import DataError
from electra.randomness import mix, permute


class Loader:
    """Batches of `batch` rows a step, of which this process (`rank` of `world`) gets its consecutive part."""

    def __init__(
        self,
        rows: Rows,
        length: int,
        batch: int,
        steps: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        workers: int = 1,
    ):
        assert batch % world == 0, "the global batch divides evenly among processes"
        if not len(rows):
            raise DataError("the prepared text makes no rows. Prepare more text.")
        self.rows, self.length, self.batch, self.steps, self.seed = rows, length, batch, steps, seed
        self.rank, self.world, self.workers = rank, world, workers

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
        return collate(
            self.rows, self.row_indices(samples), self.length, samples, self.seed, step / self.steps
        )

    def batches(self, first_step: int) -> Iterator[Batch]:
        """The batch of every step from `first_step` to the last, computed ahead by `workers` threads."""
        with ThreadPoolExecutor(self.workers) as pool:
            ahead: list[Future[Batch]] = []
            for step in range(first_step, self.steps):
                while len(ahead) < 2 * self.workers and step + len(ahead) < self.steps:
                    ahead.append(pool.submit(self.batch_at, step + len(ahead)))
                yield ahead.pop(0).result()


def collate(
    rows: Rows, indices: np.ndarray, length: int, samples: np.ndarray, seed: int, progress: float = 1.0
) -> Batch:
    ids = np.full((len(indices), length), rows.special.pad, np.int64)
    segments = np.zeros_like(ids)
    real = np.array([rows.fill(int(row), ids[n], segments[n]) for n, row in enumerate(indices)])
    is_real = np.arange(length) < real[:, None]
    return Batch(
        ids=torch.from_numpy(ids),
        segments=torch.from_numpy(segments),
        is_real=torch.from_numpy(is_real),
        samples=torch.from_numpy(samples),
        seed=mix(seed, "corruption"),
        padded=bool((real < length).any()),
        progress=progress,
    )


class HeldOut:
    """The same rows with the same corruption at every evaluation: at most `limit` rows, spread evenly over all."""

    def __init__(self, rows: Rows, length: int, batch: int, limit: int, seed: int):
        chosen = np.linspace(0, len(rows) - 1, min(limit, len(rows))).round().astype(np.int64)
        self.rows, self.length, self.seed = rows, length, seed
        self.parts = np.array_split(chosen, -(-len(chosen) // batch)) if len(chosen) else []

    def __iter__(self) -> Iterator[Batch]:
        for part in self.parts:
            yield collate(self.rows, part, self.length, part, mix(self.seed, "heldout"))

    def __len__(self) -> int:
        return len(self.parts)
