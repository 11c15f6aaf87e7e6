"""electra export: transformers folders of a run."""

from pathlib import Path
from typing import Annotated

import typer

from electra.commands.console import Trust, say


def export_command(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path, typer.Argument(help="new folder: gets discriminator/ and generator/")],
    trust: Trust = False,
) -> None:
    """transformers folders of discriminator and generator, checked: same ids, same logits."""
    import electra

    for exported in electra.export(run, out):
        say(f"{exported.folder}: {exported.note}")
