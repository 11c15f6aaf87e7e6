"""electra quickstart: from nothing to a result."""

from pathlib import Path
from typing import Annotated

import typer

from electra.commands.console import resume_hint


def quickstart_command(
    folder: Annotated[Path, typer.Argument(help="where everything goes")] = Path("runs/quickstart"),
    steps: Annotated[
        int | None, typer.Option(help="fewer steps than the recipe: faster, learns less")
    ] = None,
) -> None:
    """Tokenizer, shards, pre-training and a result from the documentation on this machine; no download."""
    from electra.commands.quickstart_parts import run_quickstart

    with resume_hint(["quickstart", str(folder), *(["--steps", str(steps)] if steps else [])]):
        run_quickstart(folder, steps)
