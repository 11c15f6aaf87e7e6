"""electra export: transformers folders of a run."""

from pathlib import Path
from typing import Annotated

import typer


def export_command(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path, typer.Argument(help="new folder: gets discriminator/ and generator/")],
) -> None:
    """transformers folders of discriminator and generator, checked: same ids, same logits."""
    import electra

    for exported in electra.export(run, out):
        print(f"{exported.folder}: {exported.note}")
