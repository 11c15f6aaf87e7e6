"""Who does the units of a preparation: this process, several on this machine, or the workers of a Ray cluster.

All call the same function on the same units, in whatever order, and only sums come back: what was made lies in the output folder.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from electra.base.jobs import run_jobs
from electra.base.remote import Place
from electra.data.corpus import Reading
from electra.data.plan import PreparePlan, Unit
from electra.data.units import (
    Done,
    PartEntry,
    TextPart,
    damage,
    finish_unit,
    parts_of,
    read_unit,
    read_unit_entry,
    run_part,
    run_unit,
    start_worker,
)

_LARGE = 4


def run_here(units: Iterable[Unit]) -> Iterator[Done]:
    return map(run_unit, units)


def run_local(plan: PreparePlan, out: Place, workers: int) -> Iterator[Done]:
    """Workers read and encode units. A file that only one can read, and that would keep it busy while the others have nothing
    left to do, is read here and goes to all of them part by part."""
    streams = _Streams(plan.size // (_LARGE * workers))
    start = partial(start_worker, out, plan.tokenizer_sha256)
    for result in run_jobs(_do, streams.jobs(plan.all_units(out)), workers, start=start):
        yield from streams.finished()
        yield result if isinstance(result, Done) else streams.note(*result)
    yield from streams.finished()


def _do(unit: Unit, part: TextPart | None) -> "Done | tuple[Unit, int, PartEntry, int]":
    return run_unit(unit) if part is None else (unit, part.number, *run_part(unit, part))


@dataclass
class _Stream:
    unit: Unit
    reading: Reading
    parts: dict[int, PartEntry] = field(default_factory=dict)
    sent: int = 0
    is_read: bool = False
    bytes_told: int = 0


@dataclass
class _Streams:
    """Units that are read here."""

    most_bytes: int
    open: dict[int, _Stream] = field(default_factory=dict)

    def jobs(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, TextPart | None]]:
        for unit in units:
            if not unit.is_one_file or unit.size <= self.most_bytes or self._is_done(unit):
                yield unit, None
                continue
            stream = self.open[unit.number] = _Stream(unit, read_unit(unit))
            for part in parts_of(unit, stream.reading):
                stream.sent += 1
                yield unit, part
            stream.is_read = True

    def _is_done(self, unit: Unit) -> bool:
        entry = read_unit_entry(unit)
        return not isinstance(entry, str) and not damage(unit.out, [shard for _, shard in entry.shards])

    def note(self, unit: Unit, number: int, part: PartEntry, encoded: int) -> Done:
        stream = self.open[unit.number]
        stream.parts[number] = part
        read = min(stream.reading.bytes_read, unit.size)
        new, stream.bytes_told = read - stream.bytes_told, read
        return Done(new, encoded, list(part.shards.values()), is_unit=False)

    def finished(self) -> Iterator[Done]:
        for stream in [stream for stream in self.open.values() if stream.is_read and len(stream.parts) == stream.sent]:
            del self.open[stream.unit.number]
            finish_unit(stream.unit, stream.reading, [stream.parts[number] for number in range(stream.sent)])
            yield Done(stream.unit.size - stream.bytes_told, 0, [])


def run_ray(plan: PreparePlan, out: Place, workers: int) -> Iterator[Done]:
    raise NotImplementedError
