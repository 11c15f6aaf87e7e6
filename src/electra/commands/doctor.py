"""electra doctor: find out in a minute what would otherwise be found out after hours."""

from typing import Annotated

import typer

from electra.commands.console import Overrides


def doctor_command(
    recipe: Annotated[str | None, typer.Argument(help="a recipe to try")] = None, overrides: Overrides = None
) -> None:
    """Check the machine, the shards and the settings before hours are spent."""
    from electra.pretraining.trial import examine

    raise typer.Exit(examine(recipe, overrides or []))
