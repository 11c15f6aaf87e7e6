"""electra export: transformers folders of a run."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path, typer.Argument(help="new folder: gets discriminator/ and generator/")],
) -> None:
    """transformers folders of discriminator and generator, checked: same ids, same logits."""
    from electra.pretraining.load import export_run

    for line in export_run(run, out):
        print(line)
