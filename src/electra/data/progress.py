"""How far preparation is: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from types import TracebackType

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """`size` is in bytes of input files, for the remaining time; the rate is in bytes of text, which compressed files
    hold more of."""

    def __init__(self, size: int, visible: bool) -> None:
        self.size, self.read, self.encoded, self.tokens = size, 0, 0, 0
        self.started = self.last_line = time.monotonic()
        self.bar = None
        self.visible = visible
        if visible and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self.bar = progress.Progress(
                progress.TextColumn("prepare"),
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.TextColumn("{task.fields[figures]}"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.task = self.bar.add_task("prepare", total=size, figures="")

    def advance(self, input_bytes: int, encoded_bytes: int, tokens: int) -> None:
        self.read += input_bytes
        self.encoded += encoded_bytes
        self.tokens += tokens
        if self.bar:
            self.bar.update(self.task, completed=self.read, figures=self._figures())
        elif self.visible and time.monotonic() - self.last_line >= _SECONDS_BETWEEN_LINES:
            self._print()

    def _figures(self) -> str:
        rate = self.encoded / max(1e-9, time.monotonic() - self.started)
        return f"{rate / 1e6:.1f} MB/s · {self.tokens:,} tokens"

    def _print(self) -> None:
        self.last_line = time.monotonic()
        left = (self.last_line - self.started) * (self.size - self.read) / max(1, self.read)
        share = self.read / max(1, self.size)
        print(f"prepare: {share:.0%} · {self._figures()} · {left:.0f} s left", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()
        elif self.visible and kind is None:
            self._print()
