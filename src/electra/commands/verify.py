"""electra verify: what of a folder is not as it was written."""

from pathlib import Path
from typing import Annotated

import typer

from electra.commands.console import say


def verify_command(
    path: Annotated[
        Path, typer.Argument(help="a run, prepared shards, an export, a fine-tuned folder, or what holds them")
    ],
) -> None:
    """Check every hash and every number of a folder of ours; says what was damaged or edited."""
    import electra

    problems = electra.verify(path)
    for problem in problems:
        say(problem)
    if problems:
        raise typer.Exit(4)
    say(f"{path}: whole")
