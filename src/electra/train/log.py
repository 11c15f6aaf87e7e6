"""What a run writes for people and programs: metrics.jsonl, metrics for trackers, run_state.json, curves."""

import io
import json
import logging
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import Any

from electra.base.config import GREATEST, LARGEST
from electra.base.errors import ElectraError
from electra.base.files import (
    is_running,
    read_json_lines,
    read_object,
    remove_leftovers,
    write_atomically,
    write_json,
    writing,
)
from electra.base.progress import visible
from electra.train.trackers import Tracked, TrackerName, Trackers

log = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
DAMAGED = "metrics.damaged.jsonl"
RUN_STATE = "run_state.json"
PANELS = (
    ("loss", (("mlm_loss", "generator (MLM)"),)),
    ("loss", (("rtd_loss", "discriminator (RTD)"),)),
    ("ROC-AUC and shares", (("auc", "AUC"), ("recall", "recall"), ("mlm_accuracy", "generator accuracy"))),
)
FLATTEST = 0.1  # least height of an axis of scores, so that small changes look small

Values = Mapping[str, float | str]
Record = dict[str, Any]


class RunLog:
    """The metrics of a run: one JSON line per record, also sent to all trackers. Opening at step n drops what an interrupted
    process wrote beyond n, because those steps will be repeated. Of several processes one `writes`; the others only keep the
    same records in memory. Of the many training records, memory keeps only the newest; the file has them all."""

    def __init__(self, run: Tracked, track: Sequence[TrackerName], writes: bool = True):
        self.folder, self.writes = run.folder, writes
        self.records: list[Record] = []
        self.writer = {"pid": os.getpid(), "host": platform.node()}
        if writes:
            self.open(run, track)

    def open(self, run: Tracked, track: Sequence[TrackerName]) -> None:
        folder = run.folder
        records, damaged = read_records(folder)
        self.records = [record for record in records if record["step"] <= run.step]
        if damaged:
            with (folder / DAMAGED).open("ab") as aside:
                aside.writelines(line + b"\n" for line in damaged)
            log.warning("%s: %d damaged lines are kept in %s.", folder / METRICS, len(damaged), DAMAGED)
        remove_leftovers(folder, METRICS)
        write_atomically(folder / METRICS, b"".join(map(as_line, self.records)))
        self.file = (folder / METRICS).open("ab", buffering=0)
        self.trackers = Trackers(track, run, told={record["kind"]: record["step"] for record in records})

    def write(self, kind: str, step: int, values: Values) -> None:
        finite = {key: finite_or_none(value) for key, value in values.items()}
        if kind == "train":
            self.records = [record for record in self.records if record["kind"] != kind]
        self.records.append({"kind": kind, "step": step, **finite})
        if not self.writes:
            return
        line = as_line(self.records[-1])
        with writing(self.folder / METRICS, len(line)):
            self.file.write(line)
        self.trackers.log(kind, step, values)

    def of_kind(self, kind: str) -> list[Record]:
        """Step and values of all records of a kind, oldest first; null becomes nan."""
        return [
            {key: math.nan if value is None else value for key, value in record.items() if key != "kind"}
            for record in self.records
            if record["kind"] == kind
        ]

    def last(self, kind: str) -> Record:
        """The newest record of a kind, as it is in the file; empty if there is none."""
        return next((record for record in reversed(self.records) if record["kind"] == kind), {})

    def state(self, state: str, step: int, **more: str | int | Mapping[str, float]) -> None:
        if self.writes:
            write_json(self.folder / RUN_STATE, {"state": state, "step": step, **self.writer, **more})

    def fail_for_writer(self, reason: str) -> None:
        """Mark the run as failed in place of the process that wrote it, unless another has started since."""
        say_failed(self.folder, reason, lambda stored: stored.items() >= self.writer.items())

    def close(self) -> None:
        if self.writes:
            self.file.close()
            self.trackers.close()


def say_failed(folder: Path, reason: str, is_ours: Callable[[dict[str, Any]], bool]) -> bool:
    """Mark a run as failed whose writer cannot do so itself, if run_state.json still says running. Returns whether it did."""
    with suppress(ElectraError, OSError):  # not every machine need have the folder
        stored = read_object(folder / RUN_STATE)
        if stored.get("state") == "running" and is_ours(stored):
            write_json(folder / RUN_STATE, stored | {"state": "failed", "reason": reason})
            return True
    return False


def is_gone(stored: dict[str, Any]) -> bool:
    """Whether the process that wrote run_state.json ran on this machine and has ended."""
    return stored.get("host") == platform.node() and not is_running(stored.get("pid"))


def read_metrics(folder: Path, kind: str = "") -> list[Record]:
    """All records of a run, or those of one kind. A last line cut off by a kill is left out; so are damaged lines, with a warning."""
    records, damaged = read_records(folder)
    if damaged:
        log.warning("%s has %d damaged lines, which are left out.", folder / METRICS, len(damaged))
    return [record for record in records if kind in ("", record["kind"])]


def read_records(folder: Path) -> tuple[list[Record], list[bytes]]:
    records: list[Record] = []
    objects, damaged = read_json_lines(folder / METRICS)
    for it in objects:
        records.append(it) if is_record(it) else damaged.append(as_line(it).rstrip())
    return records, damaged


def is_record(record: Record) -> bool:
    """Whether a record has a kind, a step, and values that are numbers or null; those of an alarm may be text."""
    kind, step, values = record.get("kind"), record.get("step"), [it for key, it in record.items() if key != "kind"]
    allowed = (int, float, str, NoneType) if kind == "alarm" else (int, float, NoneType)
    numbers = [it for it in values if isinstance(it, int | float)]
    return (
        isinstance(kind, str)
        and isinstance(step, int)
        and 0 <= step <= LARGEST
        and all(isinstance(it, allowed) for it in values)
        and all(abs(it) <= GREATEST for it in numbers)
    )


def as_line(record: Record) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode()


def finite_or_none(value: Any) -> Any:
    """The value, or None (null) if it is not finite: JSON has no nan."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot_run(folder: Path, out: Path) -> Path | None:
    """Plot the curves of a pre-training run; None if there is nothing to draw yet."""
    records = read_metrics(folder)
    train, heldout = ([record for record in records if record["kind"] == kind] for kind in ("train", "heldout"))
    if not train:
        return None
    title = (
        f"{folder.name}: {train[-1]['step']:,} steps, {(train[-1].get('seconds') or 0) / 60:.1f} minutes of training"
    )
    with panels(out, title, [*(label for label, _ in PANELS), "learning rate"], (19, 4.2)) as axes:
        draw_schedule(axes[-1], train)
        for axis, (_, curves) in zip(axes, PANELS, strict=False):
            for key, name in curves:
                points = axis.plot(*series(train, key), alpha=0.55, linewidth=1, label=f"{name}, training")
                like = {"color": points[0].get_color(), "marker": "o", "markersize": 3}
                axis.plot(*series(heldout, key), **like, label=f"{name}, held-out")
    return out


def draw_schedule(axis: Any, train: Sequence[Record]) -> None:
    """Plot the learning rate, and the sampling temperature if it changes: while it falls, replacements get harder to detect."""
    axis.plot(*series(train, "lr"), color="tab:purple", label="learning rate")
    temperatures = series(train, "temperature")
    if temperatures[0]:
        right = axis.twinx()
        right.plot(*temperatures, color="tab:red", linestyle="--")
        right.set_ylabel("sampling temperature")
        axis.plot([], [], color="tab:red", linestyle="--", label="sampling temperature (right)")


def plot_scores(
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    levels: Mapping[str, float],
    losses: Mapping[str, Sequence[tuple[int, float]]],
    key: str,
    out: Path,
) -> Path:
    """Plot the dev score of each curve against the step, with a horizontal line for each level to compare it with. Beside it are
    the losses: one that falls to zero while the score stands still has memorised its rows."""
    with panels(out, f"{out.parent.name}: dev {key}", [key, "training loss"], (11, 4.2)) as (axis, beside):
        for name, records in curves.items():
            (line,) = axis.plot(*series(records, key), marker="o", markersize=3, label=name)
            beside.plot(*zip(*losses.get(name, ()), strict=True), color=line.get_color(), linewidth=1, label=name)
        beside.set_ylim(bottom=0)
        for (name, level), style in zip(levels.items(), (":", "--", "-."), strict=False):
            axis.axhline(level, color="0.4", linestyle=style, linewidth=1, label=name)
        values = [value for records in curves.values() for value in series(records, key)[1]]
        low, high = axis.get_ylim()
        low = max(low, -0.01) if values and min(values) >= 0 else low  # no negative axis without negative scores
        axis.set_ylim(low, max(high, low + FLATTEST))
    return out


@contextmanager
def panels(out: Path, title: str, labels: Sequence[str], size: tuple[float, float]) -> Iterator[Sequence[Any]]:
    """Yield empty axes, side by side, with the step as x."""
    with picture(out, title, [range(len(labels))], size) as axes:
        yield axes
        for axis, label in zip(axes, labels, strict=True):
            axis.set(xlabel="step", ylabel=label)
            if axis.lines:
                axis.legend(fontsize=8)


@contextmanager
def picture(
    out: Path, title: str, places: Sequence[Sequence[int]], size: tuple[float, float], **how: Any
) -> Iterator[Sequence[Any]]:
    """Yield axes in the order of their numbers, and write them as a PNG when the caller has drawn. `places` is rows of these numbers:
    one that occurs several times is that wide, -1 is a gap. `how` goes to matplotlib's `subplot_mosaic`. Names of runs and recipes
    are shown as they are: a $ in them starts no formula."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    content = io.BytesIO()
    with plt.rc_context({"text.parse_math": False}):
        mosaic: list[list[Any]] = [list(row) for row in places]
        figure, by_number = plt.subplot_mosaic(mosaic, figsize=size, empty_sentinel=-1, **how)
        axes = [by_number[number] for number in sorted(by_number)]
        yield axes
        for axis in axes:
            axis.grid(alpha=0.3)
            if axis.get_xscale() == "log":
                mark_powers(axis.xaxis)
        figure.suptitle(visible(title), fontsize=11)
        figure.tight_layout()
        figure.savefig(content, dpi=110)
        plt.close(figure)
    remove_leftovers(out.parent, out.name)
    write_atomically(out, content.getvalue())


def mark_powers(axis: Any) -> None:
    """Label a few round numbers of a logarithmic axis in plain digits: matplotlib's own labels are formulas."""
    from matplotlib import ticker

    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    powers = ticker.LogLocator(subs=(1.0,) if decades > 3 else (1.0, 2.0, 5.0))
    axis.set_major_locator(ticker.MaxNLocator(4) if decades < 0.7 else powers)
    axis.set_major_formatter(lambda value, _: f"{value:.2g}".replace("e+", "e"))
    axis.set_minor_formatter(ticker.NullFormatter())


def series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]
