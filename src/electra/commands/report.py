"""electra report: runs and results as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from electra.commands.console import say


def report_command(
    run: Annotated[Path, typer.Argument(help="a run, results of finetune, compare or speedrun, or a folder of them")],
    out: Annotated[Path | None, typer.Option(help="file to write", show_default="RUN/report.html")] = None,
) -> None:
    """Curves, alarms, held-out sentences and results as one HTML file that opens from disk."""
    import electra

    written = electra.report(run, out)
    say(f"{written}: {written.stat().st_size / 1e6:.1f} MB, self-contained")
