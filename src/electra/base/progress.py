"""What people are shown: progress while something runs (a live bar if the command line asked for one, else plain lines through
`logging`), and tables as values, which reports write as Markdown and the command line draws."""

import logging
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich import progress as rich_progress

log = logging.getLogger(__name__)

LABELS = {"mlm_loss": "mlm", "rtd_loss": "rtd", "auc": "AUC", "tokens_per_second": "tok/s", "mfu": "MFU"}
MOST_UNFINISHED = 0.99

# Control characters but tabs and line ends, marks of writing direction, lone surrogates.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_live_bars = False


def show_live_bars(wanted: bool) -> None:
    """Switch live bars on or off; the command line does if standard error is a terminal. While a bar is shown, sys.stderr goes
    through it: a logging handler must look up sys.stderr for each message, or it writes across the bar."""
    global _live_bars
    _live_bars = wanted


def live_bars() -> bool:
    return _live_bars


class Progress:
    """Progress of one long piece of work. `advance` moves the bar; `report` adds a text: beside the bar, or as a line of its
    own, at most one in `seconds_between_lines` and always the last. Steps are counted, bytes are shown in percent;
    a total of 0 means unknown. All bytes may be read long before the work is done: 100 % is shown only when the block
    ends without an error. What was `done` before does not count for the rate."""

    def __init__(
        self,
        title: str,
        total: int,
        done: int = 0,
        unit: Literal["steps", "bytes"] = "steps",
        seconds_between_lines: float = 0.0,
    ) -> None:
        self.title, self.total, self.done, self.unit = title, total, done, unit
        self.first, self.began = done, time.monotonic()
        self.seconds_between_lines, self.last_line = seconds_between_lines, self.began
        self.last_state: tuple[int, int, str, bool] | None = None
        self.last_text: str | None = None
        self.is_finished = unit == "steps"  # steps are counted when they are done
        self.bar = self._bar() if _live_bars else None

    def _bar(self) -> "rich_progress.Progress":
        from rich import progress
        from rich.console import Console

        bar = progress.Progress(
            progress.TextColumn("{task.description}", style="bold", markup=False),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn() if self.unit == "steps" else progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[text]}", markup=False),
            progress.TimeElapsedColumn(),
            progress.TextColumn("ETA {task.fields[eta]}"),
            console=Console(stderr=True, highlight=False),
        )
        self.task = bar.add_task(visible(self.title), total=self.total or None, completed=self.done, text="", eta="…")
        return bar

    def __enter__(self) -> "Progress":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.unit == "bytes":
            self.is_finished = True
            self.advance(max(self.done, self.total))
            if self.last_text is not None:
                self.report(self.last_text, 0.0)
        if self.bar:
            self.bar.stop()

    @property
    def place(self) -> str:
        return f"{self.title} {self.done}/{self.total}"

    def advance(self, done: int, total: int | None = None) -> None:
        self.done, self.total = done, self.total if total is None else total
        if self.bar:
            completed = done if self.is_finished else min(done, MOST_UNFINISHED * self.total)
            self.bar.update(self.task, completed=completed, total=self.total or None)

    @property
    def seconds(self) -> float:
        return max(1e-9, time.monotonic() - self.began)

    @property
    def rate(self) -> float:
        """Steps or bytes per second."""
        return (self.done - self.first) / self.seconds

    def report(self, text: str, seconds_left: float | None = None) -> None:
        """Show `text` and the time left; without `seconds_left`, what the rest takes at the rate so far."""
        self.last_text, is_known = text, self.is_finished or self.done < self.total
        if seconds_left is None or not is_known:
            seconds_left = (self.total - self.done) / self.rate if self.rate and self.total and is_known else math.inf
        if self.bar:
            self.bar.update(self.task, text=text, eta=duration(seconds_left))
            return
        now, state = time.monotonic(), (self.done, self.total, text, bool(self.is_finished and self.total))
        is_last = self.is_finished and self.done >= self.total and (self.total or self.unit == "bytes")
        is_soon = not is_last and now - self.last_line < self.seconds_between_lines
        if is_soon or state == self.last_state:
            return
        self.last_line, self.last_state = now, state
        if self.unit == "steps":
            log.info("%s %s ETA %s", self.place, text, duration(seconds_left))
        elif not self.total:
            log.info("%s: %s", self.title, text)
        else:
            share = self.done / self.total if self.is_finished else min(self.done / self.total, MOST_UNFINISHED)
            left = f" · {math.ceil(seconds_left):.0f} s left" if math.isfinite(seconds_left) else ""
            log.info("%s: %.0f%% · %s%s", self.title, 100 * share, text, left)


def metrics_text(metrics: Mapping[str, float], names: Iterable[str]) -> str:
    """The named metrics as text, in the order of `names`; missing ones are left out."""
    return " ".join(f"{LABELS.get(name, name)} {readable(name, metrics[name])}" for name in names if name in metrics)


def readable(name: str, value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if name == "tokens_per_second" else f"{value:.3f}"


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if math.isfinite(seconds) else "…"


def visible(text: str) -> str:
    """Text that is safe to show. Labels, columns and paths come from other people's files: what would move a cursor, set a title,
    change the writing direction or is no character at all is escaped. Line ends stay."""
    return _INVISIBLE.sub(lambda match: repr(match[0])[1:-1], text)


def literal(text: str) -> str:
    """The same for Markdown: no link, emphasis or tag comes from somebody's label. Inside a word, _ is not emphasis."""
    return re.sub(r"([\\`*\[\]<>]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", visible(text).replace("\n", " "))


@dataclass(frozen=True)
class Table:
    """Cells are text as people read it. An empty row is a line between two sections."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def markdown(self) -> str:
        lines = [
            "| " + " | ".join(visible(cell).replace("\n", " ").replace("|", "\\|") for cell in cells) + " |"
            for cells in (self.columns, *filter(None, self.rows))
        ]
        return "\n".join([lines[0], "|---" * len(self.columns) + "|", *lines[1:]]) + "\n"
