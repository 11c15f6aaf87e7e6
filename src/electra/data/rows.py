"""Documents -> rows of a length chosen when training, not when preparing.

Two builders. `packed`: [CLS] and then the endless stream of documents, each closed by [SEP], cut into rows. `segments`:
the original's examples of one or two segments, each within one document. Both give row i without having built row i-1,
so that the order can be a pure function of (seed, step).
"""

from typing import Literal, Protocol

import numpy as np
from pydantic import Field

from electra.batch import SpecialIds
from electra.config import Settings
from electra.data.shards import TokenData
from electra.randomness import mix

SINGLE_SEGMENT_SHARE = 0.1
SHORT_ROW_SHARE = 0.05
SHORTEST_TARGET = 5


class RowsSettings(Settings):
    """`length` counts [CLS] and [SEP]."""

    kind: Literal["segments", "packed"] = "segments"
    length: int = Field(128, ge=8)


class Rows(Protocol):
    """Random access to rows: `fill` writes row `index` into arrays of padding and of zeros, and returns how many tokens
    of it are real."""

    special: SpecialIds

    def __len__(self) -> int: ...

    def fill(self, index: int, ids: np.ndarray, segments: np.ndarray) -> int: ...


def build_rows(settings: RowsSettings, data: TokenData, special: SpecialIds, seed: int) -> Rows:
    match settings.kind:
        case "packed":
            return PackedRows(data, settings.length, special)
        case "segments":
            return SegmentRows(data, settings.length, special, seed)


class NoRows:
    """What is held out where nothing is."""

    def __init__(self, special: SpecialIds):
        self.special = special

    def __len__(self) -> int:
        return 0

    def fill(self, index: int, ids: np.ndarray, segments: np.ndarray) -> int:
        raise AssertionError("there are no rows")


class PackedRows:
    """Row i holds tokens i*(length-1) … (i+1)*(length-1) of the stream, behind a [CLS]. Within a shard document d
    occupies its tokens and one [SEP]; the last row of a shard may be short."""

    def __init__(self, data: TokenData, length: int, special: SpecialIds):
        self.shards, self.special, self.content = data.shards, special, length - 1
        # Ends of documents in the stream: each document is one token longer there, for its [SEP].
        self.ends = [shard.documents + np.arange(1, len(shard.documents) + 1) for shard in data.shards]
        rows = [-(-int(ends[-1]) // self.content) if len(ends) else 0 for ends in self.ends]
        self.first_row = np.concatenate([[0], np.cumsum(rows)])

    def __len__(self) -> int:
        return int(self.first_row[-1])

    def fill(self, index: int, ids: np.ndarray, segments: np.ndarray) -> int:
        number = int(np.searchsorted(self.first_row, index, side="right")) - 1
        shard, ends = self.shards[number], self.ends[number]
        start = (index - int(self.first_row[number])) * self.content
        stop = min(start + self.content, int(ends[-1]))
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, stop, side="left"))
        real = stop - start + 1
        ids[0] = self.special.cls
        # A [SEP] stands at the last stream position of each document; before it, `documents passed` of them.
        separators = ends[first : last + 1] - 1 - start
        separators = separators[separators < stop - start]
        is_token = np.ones(stop - start, dtype=bool)
        is_token[separators] = False
        body = ids[1:real]
        body[~is_token] = self.special.sep
        body[is_token] = shard.tokens[start - first : start - first + int(is_token.sum())]
        return real


class SegmentRows:
    """The original's examples, by its own probabilities: lines of one document are taken until a target is reached;
    one in ten examples is a single segment, the others put about half into the first; one in twenty aims at a random
    shorter target. Two differences from the original: what does not fit opens the next row instead of being dropped,
    and once the second segment has begun no later line goes back to the first, so that text stays in order."""

    def __init__(self, data: TokenData, length: int, special: SpecialIds, seed: int):
        self.shards, self.special = data.shards, special
        plans = [
            plan_segments(
                shard.lines, shard.documents, length, np.random.default_rng(mix(seed, "segments", number))
            )
            for number, shard in enumerate(data.shards)
        ]
        self.plan = np.concatenate(plans) if plans else np.zeros((0, 3), np.int64)
        self.first_row = np.concatenate([[0], np.cumsum([len(plan) for plan in plans])])

    def __len__(self) -> int:
        return len(self.plan)

    def fill(self, index: int, ids: np.ndarray, segments: np.ndarray) -> int:
        shard = self.shards[int(np.searchsorted(self.first_row, index, side="right")) - 1]
        start, middle, stop = (int(edge) for edge in self.plan[index])
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


def plan_segments(
    lines: np.ndarray, documents: np.ndarray, length: int, rng: np.random.Generator
) -> np.ndarray:
    """(start, middle, stop) of every example of a shard, as offsets into its tokens; middle == stop means one segment."""
    plan: list[tuple[int, int, int]] = []
    line_ends = lines.tolist()
    line, start, target = 0, 0, length
    for document_end in documents.tolist():
        while start < document_end:
            single = rng.random() < SINGLE_SEGMENT_SHARE
            first_target = length * 1000 if single else (target - 3) // 2
            middle, stop = start, start
            while stop < document_end and stop - start < target:
                end = line_ends[line]
                in_first = (
                    middle == start
                    or end - start < first_target
                    or (middle == stop and stop - start < first_target and rng.random() < 0.5)
                )
                line += 1
                if in_first and middle == stop:
                    middle = end
                stop = end
            middle = min(middle, start + length - 2)
            stop = max(middle, min(stop, start + length - 3)) if stop > middle else middle
            plan.append((start, middle, stop))
            start = stop
            while line and line_ends[line - 1] > start:
                line -= 1
            target = (
                int(rng.integers(SHORTEST_TARGET, length + 1)) if rng.random() < SHORT_ROW_SHARE else length
            )
    return np.array(plan, np.int64).reshape(-1, 3)
