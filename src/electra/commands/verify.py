"""electra verify: what in a folder was damaged or edited."""

from pathlib import Path
from typing import Annotated

import typer

from electra.commands.console import say


def verify_command(
    path: Annotated[
        Path, typer.Argument(help="run, prepared shards, export or fine-tuned folder, or a folder of them")
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
