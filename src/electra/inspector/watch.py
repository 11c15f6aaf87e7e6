"""Follows a run by reading its folder: from another process, from another machine that shares the disk, or after its end."""

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from electra.base import config
from electra.base.errors import ElectraError
from electra.base.files import json_text, parse_json, read_object
from electra.inspector.gallery import Gallery
from electra.pretraining.load import load_settings
from electra.pretraining.samples import SAMPLES, read_samples
from electra.train.log import METRICS, RUN_STATE, Record, is_gone, is_record

MOST_RECORDS = 1000  # of each kind: more than a screen can show
MOST_BYTES, LAST_BYTES = 1 << 26, 1 << 15
SECONDS_BETWEEN_READS, SECONDS_OF_SILENCE = 1.0, 15.0
RATE_OVER = 10  # records from which the time left is estimated
TRAIN_LINE = b'{"kind": "train"'


class Tail:
    """Reads the records of metrics.jsonl as they are added. A run that resumes writes a new file, without the steps that it is about
    to repeat."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES):
        self.path, self.place, self.inode, self.most_bytes = folder / METRICS, 0, 0, most_bytes

    def read(self) -> tuple[list[Record], bool]:
        """The new records, and whether the file is another one, so that they replace all earlier records."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_other = status.st_ino != self.inode or status.st_size < self.place
                if is_other:
                    self.inode, self.place = status.st_ino, max(0, status.st_size - self.most_bytes)
                file.seek(self.place)
                data = file.read(self.most_bytes)
        except FileNotFoundError:
            is_other, self.inode, self.place = self.inode != 0, 0, 0
            return [], is_other
        whole = data[: data.rfind(b"\n") + 1] or data[: self.most_bytes * (len(data) == self.most_bytes)]
        self.place += len(whole)
        return list(records_in(whole)), is_other


def records_in(data: bytes) -> Iterable[Record]:
    """Parses the lines. Of a long run not every train record is parsed: parsing is far slower than reading, and most would be dropped."""
    lines = data.split(b"\n")
    stride = len(lines) // (4 * MOST_RECORDS)
    if stride > 1:
        ends = len(lines) - RATE_OVER - 1
        lines = [
            line
            for number, line in enumerate(lines)
            if number % stride == 0 or number > ends or not line.startswith(TRAIN_LINE)
        ]
    for line in lines:
        with suppress(ValueError):
            record = parse_json(line)
            if isinstance(record, dict) and is_record(record):
                yield record


def thinned(records: Sequence[Record]) -> list[Record]:
    """At most MOST_RECORDS of each kind, always with the last."""
    kinds: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        kinds[record["kind"]].append(record)
    kept = []
    for own in kinds.values():
        stride = -(-len(own) // MOST_RECORDS)
        kept += own[(len(own) - 1) % stride :: stride]
    return sorted(kept, key=lambda record: record["step"])


def last_records(folder: Path) -> list[Record]:
    """The newest few records: enough to tell how far a run is."""
    return Tail(folder, LAST_BYTES).read()[0]


def run_state(folder: Path, records: Sequence[Record]) -> dict[str, Any]:
    """How far a run is and whether it is still running. A killed process cannot report that: if it ran on this machine we look for it;
    otherwise people see how old the last record is."""
    stored: dict[str, Any] = {}
    with suppress(ElectraError):
        stored = read_object(folder / RUN_STATE)
    name = stored.get("state")
    state: dict[str, Any] = {
        "state": name if isinstance(name, str) else "unknown",
        "reason": str(stored.get("reason", "")),
    }
    if state["state"] == "running" and is_gone(stored):
        state |= {
            "state": "killed",
            "reason": "its process is gone; the same command resumes from the newest checkpoint",
        }
    step = max([record["step"] for record in records], default=0)
    with suppress(OSError):
        state["seconds_since_news"] = max(0.0, time.time() - (folder / METRICS).stat().st_mtime)
    return state | {"step": step, "resume": str(stored.get("resume", "")), **horizon(folder, records, step)}


def horizon(folder: Path, records: Sequence[Record], step: int) -> dict[str, Any]:
    """The planned steps (None if the budget is time) and the seconds left."""
    train = [record for record in records if record["kind"] == "train" and record.get("seconds") is not None]
    planned, left = None, None
    with suppress(ElectraError):
        settings = load_settings(folder).train
        planned = None if settings.minutes else settings.steps
        if settings.minutes and train:
            left = max(0.0, 60 * settings.minutes - (train[-1].get("training_seconds") or 0))
    last = train[-RATE_OVER:]
    if planned and len(last) > 1 and (steps := last[-1]["step"] - last[0]["step"]) > 0:
        left = max(0, planned - step) * max(0.0, last[-1]["seconds"] - last[0]["seconds"]) / steps
    return {"planned_steps": planned, "seconds_left": left}


def run_settings(folder: Path) -> dict[str, str]:
    """Every setting of a run as text, to compare with another run's."""
    try:
        flat = config.flatten(config.dump(load_settings(folder)))
    except ElectraError:
        return {}
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat.items()}


def run_view(folder: Path) -> dict[str, Any]:
    """Everything that a page shows about a run."""
    records = thinned(Tail(folder).read()[0])
    return {
        "state": run_state(folder, records),
        "records": records,
        "settings": run_settings(folder),
        "samples": read_samples(folder),
    }


def runs_view(gallery: Gallery) -> dict[str, Any]:
    """Every run with its number and how far it is."""
    gallery.look()
    states = [{"name": it.name, **run_state(it.path, last_records(it.path))} for it in gallery.runs]
    return {"runs": [{"number": number, **state} for number, state in enumerate(states)]}


class News:
    """Returns what has changed in a run's folder since the last `read`, as events for a page."""

    def __init__(self, folder: Path):
        self.folder, self.tail = folder, Tail(folder)
        self.records: list[Record] = []
        self.state: dict[str, Any] = {}
        self.samples = 0.0

    def read(self) -> list[tuple[str, Any]]:
        events: list[tuple[str, Any]] = []
        fresh, is_all = self.tail.read()
        if is_all:
            self.records = thinned(fresh)
            events.append(("history", self.records))
        elif fresh:
            self.records = thinned([*self.records, *fresh])
            events.append(("records", fresh))
        state = run_state(self.folder, self.records)
        if {**state, "seconds_since_news": 0} != {**self.state, "seconds_since_news": 0}:
            events.append(("state", state))
            self.state = state
        changed = 0.0
        with suppress(OSError):
            changed = (self.folder / SAMPLES).stat().st_mtime
        if changed != self.samples:
            self.samples = changed
            events.append(("samples", read_samples(self.folder)))
        return events


async def follow(folders: Mapping[int, Path], is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yields server-sent events of runs, with their numbers as ids, until the server stops or the client leaves."""
    news, spoken = {number: News(folder) for number, folder in folders.items()}, time.monotonic()
    while not is_over():
        for number, own in news.items():
            for name, content in await asyncio.to_thread(own.read):
                yield f"event: {name}\nid: {number}\ndata: {json_text(content)}\n\n".encode()
                spoken = time.monotonic()
        if time.monotonic() - spoken > SECONDS_OF_SILENCE:  # to find out whether the client is still there
            yield b": nothing new\n\n"
            spoken = time.monotonic()
        await asyncio.sleep(SECONDS_BETWEEN_READS)
