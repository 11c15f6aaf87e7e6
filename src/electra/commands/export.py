"""electra export: transformers folders of a run."""

from pathlib import Path
from typing import Annotated

import typer

from electra.commands.console import Trust, say


def export_command(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path, typer.Argument(help="new folder: gets discriminator/ and generator/")],
    language: Annotated[list[str] | None, typer.Option(help="code for the card's header, as en; several times")] = None,
    license: Annotated[str, typer.Option(help="for the card's header, as apache-2.0")] = "",
    dataset: Annotated[list[str] | None, typer.Option(help="a data set's name on the Hub; several times")] = None,
    trust: Trust = False,
) -> None:
    """transformers folders of discriminator and generator, checked: same ids, same logits."""
    import electra

    for exported in electra.export(run, out, language or (), license, dataset or ()):
        say(f"{exported.folder}: {exported.note}")
