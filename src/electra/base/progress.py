"""Progress for people: a live line in a terminal, plain lines everywhere else."""

import math
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LABELS = {"mlm_loss": "mlm", "rtd_loss": "rtd", "auc": "AUC", "tokens_per_second": "tok/s", "mfu": "MFU"}


class Display:
    """Everything goes to standard error: standard output is for results."""

    def __init__(
        self, steps: int, headline: Sequence[str], console: Console | None = None, title: str = "step"
    ):
        self.console = console or Console(file=sys.stderr, highlight=False)
        self.steps, self.headline, self.title = steps, headline, title
        self.live = self.console.is_terminal
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("ETA {task.fields[eta]}"),
            console=self.console,
            disable=not self.live,
        )

    def start(self, step: int) -> None:
        self.task = self.progress.add_task(self.title, total=self.steps, completed=step, figures="", eta="…")
        self.progress.start()

    def stop(self) -> None:
        self.progress.stop()

    def advance(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def figures(self, kind: str, step: int, figures: Mapping[str, float], eta_seconds: float) -> None:
        shown = {
            name: figures[name] for name in (*self.headline, "tokens_per_second", "mfu") if name in figures
        }
        text = " ".join(f"{LABELS.get(name, name)} {readable(name, value)}" for name, value in shown.items())
        eta = duration(eta_seconds)
        if kind == "train":
            self.progress.update(self.task, figures=text, eta=eta)
        if kind == "heldout":
            self.note(f"{self.title} {step}/{self.steps} held-out: {text}")
        elif not self.live:
            self.note(f"{self.title} {step}/{self.steps} {text} ETA {eta}")

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.console.print(f"WARNING: {text}", style="bold yellow", markup=False, soft_wrap=True)


def readable(name: str, value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if name == "tokens_per_second" else f"{value:.3f}"


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if math.isfinite(seconds) else "…"
