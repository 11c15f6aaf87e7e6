"""Documents -> rows of a length chosen when training, not when preparing.

Two builders. `packed`: the stream of documents, each followed by [SEP], cut into rows that start with [CLS]. `segments`:
the original's examples of one or two segments, each within one document. Both can build row i without row i-1,
so that the order can be a pure function of (seed, step).
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from pydantic import Field

from electra.base.batch import SpecialIds
from electra.base.config import Settings
from electra.base.randomness import mix
from electra.data.shards import Shard, TokenData

SINGLE_SEGMENT_SHARE = 0.1
SHORT_ROW_SHARE = 0.05
SHORTEST_TARGET = 5


class RowsSettings(Settings):
    """`length` is in tokens, [CLS] and [SEP] included."""

    kind: Literal["segments", "packed"] = "segments"
    length: int = Field(128, ge=8, le=1_000_000)


class Rows(Protocol):
    """Random access to many rows at once: entry n of a result belongs to row `indices[n]`."""

    special: SpecialIds
    length: int

    def __len__(self) -> int: ...

    def lengths(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many tokens of each row are in its first segment, and how many are real, special tokens included."""
        ...

    def ids(self, indices: np.ndarray) -> np.ndarray:
        """Rows of `length` ids (int64), padded at the end."""
        ...


def build_rows(settings: RowsSettings, data: TokenData, special: SpecialIds, seed: int) -> Rows:
    match settings.kind:
        case "packed":
            return PackedRows(data, settings.length, special)
        case "segments":
            return SegmentRows(data, settings.length, special, seed)


class PackedRows:
    """Row i holds tokens i*(length-1) … (i+1)*(length-1) of the stream, after a [CLS]. In the stream a document is its tokens
    and one [SEP]; the last row of a shard may be short, because every shard begins with a new row."""

    def __init__(self, data: TokenData, length: int, special: SpecialIds):
        self.shards, self.special, self.length, self.content = data.shards, special, length, length - 1
        # ends of documents in the shard's stream, where each document is one token longer, for its [SEP]
        ends = [shard.documents + np.arange(1, len(shard.documents) + 1) for shard in data.shards]
        sizes = np.array([int(own[-1]) if len(own) else 0 for own in ends])
        self.first_row = cumulated(-(-sizes // self.content))
        self.first_document = cumulated([len(own) for own in ends])
        self.begins = self.first_row[:-1] * self.content
        self.stops = self.begins + sizes
        self.ends = np.concatenate([begin + own for begin, own in zip(self.begins, ends, strict=True)])

    def __len__(self) -> int:
        return int(self.first_row[-1])

    def lengths(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        real = 1 + np.minimum(self.content, self.stops[self.shard_of(indices)] - indices * self.content)
        return real, real

    def ids(self, indices: np.ndarray) -> np.ndarray:
        shard, start, body = self.shard_of(indices), indices * self.content, np.arange(self.content)
        stop = np.minimum(start + self.content, self.stops[shard])
        # documents first … last - 1 end in the row, each with a [SEP]; `passed` counts the [SEP] up to each place
        first, last = (np.searchsorted(self.ends, edge, side="right") for edge in (start, stop))
        count = last - first
        row = np.repeat(np.arange(len(indices)), count)
        end = self.ends[np.arange(len(row)) + np.repeat(last - np.cumsum(count), count)]
        is_separator = np.zeros((len(indices), self.content), bool)
        is_separator[row, end - 1 - start[row]] = True
        passed = np.cumsum(is_separator, axis=1)
        offset = start - self.begins[shard] - (first - self.first_document[shard])
        tokens = gather(self.shards, shard, offset[:, None] + body - passed)
        tokens[is_separator] = self.special.sep
        tokens[body >= (stop - start)[:, None]] = self.special.pad
        return np.insert(tokens, 0, self.special.cls, axis=1)

    def shard_of(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.first_row, indices, side="right") - 1


class SegmentRows:
    """The original's examples, with its probabilities: lines of one document are taken until a target length is reached;
    one in ten examples is a single segment, the others have about half in the first; one in twenty has a random shorter
    target. Two differences from the original: what does not fit begins the next row instead of being dropped,
    and once the second segment has begun, no later line is added to the first, so that text stays in order."""

    def __init__(self, data: TokenData, length: int, special: SpecialIds, seed: int):
        self.shards, self.special, self.length = data.shards, special, length
        plans = [
            plan_segments(shard.lines, shard.documents, length, np.random.default_rng(mix(seed, "segments", number)))
            for number, shard in enumerate(data.shards)
        ]
        assert plans, "open_data refuses a corpus without shards"
        self.plan = np.concatenate(plans)
        self.first_row = cumulated([len(plan) for plan in plans])

    def __len__(self) -> int:
        return len(self.plan)

    def lengths(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        start, middle, stop = self.plan[indices].T
        first = middle - start + 2
        return first, first + np.where(stop > middle, stop - middle + 1, 0)

    def ids(self, indices: np.ndarray) -> np.ndarray:
        """[CLS] first segment [SEP], then, if there is a second one, second segment [SEP]. The two are consecutive text: place p
        of the row holds token p - 1 of it before the inner [SEP], and token p - 2 after it."""
        shard = np.searchsorted(self.first_row, indices, side="right") - 1
        (first, real), row, places = self.lengths(indices), np.arange(len(indices)), np.arange(self.length)
        start = self.plan[indices, 0]
        ids = gather(self.shards, shard, (start - 1)[:, None] + places - (places >= first[:, None]))
        ids[:, 0] = self.special.cls
        ids[row, first - 1] = ids[row, real - 1] = self.special.sep
        ids[places >= real[:, None]] = self.special.pad
        return ids


def cumulated(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """The offset at which each part begins, and the total at the end."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def gather(shards: tuple[Shard, ...], numbers: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The tokens at `positions[n]` of shard `numbers[n]`, as int64. Positions beyond the shard return an arbitrary token of it:
    they belong to padding."""
    tokens = np.empty(positions.shape, np.int64)
    for number in np.unique(numbers):
        here = numbers == number
        tokens[here] = shards[number].tokens.take(positions[here], mode="clip")
    return tokens


def plan_segments(lines: np.ndarray, documents: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
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
            target = int(rng.integers(SHORTEST_TARGET, length + 1)) if rng.random() < SHORT_ROW_SHARE else length
    return np.array(plan, np.int64).reshape(-1, 3)
