"""Batches built row by row, as the definition of a row reads: for the vectorised ones to agree with."""

from dataclasses import replace

import numpy as np
import torch

from electra.base.batch import Batch
from electra.base.randomness import mix
from electra.data.batches import Loader
from electra.data.rows import PackedRows, Rows


class RowByRow:
    """`fill` writes a row into arrays of padding and of zeros, and returns how many tokens of it are real."""

    def __init__(self, rows: Rows):
        self.rows, self.special = rows, rows.special
        self.fill = self.fill_packed if isinstance(rows, PackedRows) else self.fill_segments
        self.ends = [shard.documents + np.arange(1, len(shard.documents) + 1) for shard in rows.shards]

    def fill_packed(self, index: int, ids: np.ndarray, segments: np.ndarray) -> int:
        number = int(np.searchsorted(self.rows.first_row, index, side="right")) - 1
        shard, ends = self.rows.shards[number], self.ends[number]
        start = (index - int(self.rows.first_row[number])) * (len(ids) - 1)
        stop = min(start + len(ids) - 1, int(ends[-1]))
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, stop, side="left"))
        real = stop - start + 1
        ids[0] = self.special.cls
        separators = ends[first : last + 1] - 1 - start
        is_token = np.ones(stop - start, dtype=bool)
        is_token[separators[separators < stop - start]] = False
        body = ids[1:real]
        body[~is_token] = self.special.sep
        body[is_token] = shard.tokens[start - first : start - first + int(is_token.sum())]
        return real

    def fill_segments(self, index: int, ids: np.ndarray, segments: np.ndarray) -> int:
        shard = self.rows.shards[int(np.searchsorted(self.rows.first_row, index, side="right")) - 1]
        start, middle, stop = (int(edge) for edge in self.rows.plan[index])
        first, second = middle - start, stop - middle
        ids[0] = self.special.cls
        ids[1 : 1 + first] = shard.tokens[start:middle]
        ids[1 + first] = self.special.sep
        if not second:
            return first + 2
        real = first + second + 3
        ids[2 + first : real - 1] = shard.tokens[middle:stop]
        ids[real - 1] = self.special.sep
        segments[2 + first : real] = 1
        return real

    def batch(self, loader: Loader, step: int) -> Batch:
        """`padded` is that of the batch of all processes."""
        if loader.world > 1:
            whole = self.batch(replace(loader, rank=0, world=1), step)
            return replace(self.batch_alone(loader, step), padded=whole.padded)
        return self.batch_alone(loader, step)

    def batch_alone(self, loader: Loader, step: int) -> Batch:
        samples = loader.samples(step)
        ids = np.full((len(samples), self.rows.length), self.special.pad, np.int64)
        segments = np.zeros_like(ids)
        indices = loader.row_indices(samples)
        real = np.array([self.fill(int(row), ids[n], segments[n]) for n, row in enumerate(indices)])
        is_real = np.arange(self.rows.length) < real[:, None]
        return Batch(
            *map(torch.from_numpy, (ids, segments, is_real, samples)),
            seed=mix(loader.seed, "corruption"),
            padded=bool((real < self.rows.length).any()),
            progress=step / loader.steps,
        )
