"""The engines that run the units of a preparation: several processes on this machine, or the workers of a Ray cluster.

Both call the same function on the same units, in any order, and only counts come back: the shards are written to the output folder.
"""

import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, starmap

from electra.base.errors import ElectraError, MachineError, first_line
from electra.base.jobs import run_jobs
from electra.base.remote import Place
from electra.data.corpus import Reading
from electra.data.plan import PreparePlan, Unit
from electra.data.units import (
    Done,
    PartEntry,
    TextPart,
    UnitEntry,
    finish_unit,
    read_unit,
    read_unit_entry,
    run_part,
    run_unit,
    start_worker,
    text_parts,
)

log = logging.getLogger(__name__)

_LARGE = 4
_TRIES = 3


def run_local(plan: PreparePlan, out: Place, workers: int) -> Iterator[Done]:
    """Worker processes read and encode units. A large file that cannot be divided would keep one worker busy while the others
    idle, so it is read in this process and handed out to all of them part by part. A single worker is this process."""
    streams = _Streams(plan.size // (_LARGE * workers))
    start = partial(start_worker, out, plan.tokenizer_sha256)
    jobs = streams.jobs(plan.all_units(out))
    for result in run_jobs(_do, jobs, workers, start=start) if workers > 1 else starmap(_do, jobs):
        yield from streams.finished()
        yield result if isinstance(result, Done) else streams.note(*result)
    yield from streams.finished()


def _do(unit: Unit, part: TextPart | None) -> "Done | tuple[Unit, int, PartEntry, int]":
    return run_unit(unit) if part is None else (unit, part.number, *run_part(unit, part))


@dataclass
class _Stream:
    unit: Unit
    reading: Reading
    removed: Counter[str] = field(default_factory=Counter)
    parts: dict[int, PartEntry] = field(default_factory=dict)
    sent: int = 0
    is_read: bool = False
    bytes_told: int = 0


@dataclass
class _Streams:
    """The units that are read in this process, and the parts that workers have encoded so far."""

    most_bytes: int
    open: dict[int, _Stream] = field(default_factory=dict)

    def jobs(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, TextPart | None]]:
        for unit in units:
            is_large = unit.is_one_file and unit.size > self.most_bytes
            if not is_large or isinstance(read_unit_entry(unit), UnitEntry):
                yield unit, None
                continue
            stream = self.open[unit.number] = _Stream(unit, read_unit(unit))
            for part in text_parts(unit, stream.reading, stream.removed):
                stream.sent += 1
                yield unit, part
            stream.is_read = True

    def note(self, unit: Unit, number: int, part: PartEntry, encoded: int) -> Done:
        stream = self.open[unit.number]
        stream.parts[number] = part
        read = min(stream.reading.bytes_read, unit.size)
        new, stream.bytes_told = read - stream.bytes_told, read
        return Done(new, encoded, list(part.shards.values()), is_unit=False)

    def finished(self) -> Iterator[Done]:
        for stream in [stream for stream in self.open.values() if stream.is_read and len(stream.parts) == stream.sent]:
            del self.open[stream.unit.number]
            parts = [stream.parts[number] for number in range(stream.sent)]
            finish_unit(stream.unit, stream.reading, stream.removed, parts)
            yield Done(stream.unit.size - stream.bytes_told, 0, [])


def run_ray(plan: PreparePlan, out: Place, workers: int) -> Iterator[Done]:
    """Runs units as Ray Core tasks, on the cluster that this machine belongs to, or else on a local one of `workers` processes that is
    shut down afterwards. Ray retries tasks whose worker or machine died. All machines of a cluster must see the same files."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise MachineError("the engine ray needs Ray. Install it from the clone: pip install '.[ray]'.") from None
    ours = not ray.is_initialized()
    if ours:
        listener = signal.getsignal(signal.SIGTERM)
        _join_or_start(workers)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, listener)  # Ray installed its own handler, which exits with 15
    try:
        task = ray.remote(num_cpus=1, max_retries=_TRIES)(run_unit)
        most = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        units = plan.all_units(out.resolve())
        pending = [task.remote(unit) for unit in islice(units, most)]
        while pending:
            ready, pending = ray.wait(pending, timeout=1)
            pending += [task.remote(unit) for unit in islice(units, len(ready))]
            yield from ray.get(ready)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, ElectraError | OSError) else error from None
    except ray.exceptions.RayError as error:
        remedy = "What is finished is kept: run the same command again"
        raise MachineError(f"Ray gave up after {_TRIES} tries ({first_line(error)}). {remedy}.") from None
    finally:
        if ours:
            ray.shutdown()


def _join_or_start(workers: int) -> None:
    import ray

    try:
        ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError:
        if address := os.environ.get("RAY_ADDRESS"):
            raise MachineError(f"no Ray cluster answers at {address} (RAY_ADDRESS). Start it, or unset that.") from None
        log.info("No Ray cluster is running: starting one with %d workers on this machine.", workers)
        ray.init(
            address="local",
            num_cpus=workers,
            include_dashboard=False,
            object_store_memory=1 << 27,  # results are small
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
