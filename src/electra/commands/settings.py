"""The verbs that look at settings and at the machine."""

from typing import Annotated

import typer

Recipe = Annotated[str, typer.Argument(help='a shipped recipe ("electra config list") or a TOML file')]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="settings, such as train.steps=2000")
]


def doctor(
    recipe: Annotated[str | None, typer.Argument(help="a recipe to try")] = None, words: Words = None
) -> None:
    """Check the machine, the shards and the settings before hours are spent."""
    from electra.pretraining.trial import examine

    raise typer.Exit(examine(recipe, words or []))


def config_show(recipe: Recipe, words: Words = None) -> None:
    """The resolved settings, and where each value came from."""
    from electra.base import config
    from electra.pretraining.settings import resolve

    given = words or []
    if "data" in config.parse_overrides(given).keys() | config.read_recipe(recipe).keys():
        settings, sources = resolve(recipe, given)
    else:  # the one setting without a default: to look at the others it is not needed
        settings, sources = resolve(recipe, [*given, 'data=""'])
        sources |= {"data": "not set"}
    flat = config.flatten(config.dump(settings))
    width = max(map(len, flat))
    for key, value in flat.items():
        print(f"{key:<{width}} = {config.toml_value(value):<14} # {sources[key]}")


def config_list() -> None:
    """The shipped recipes."""
    from electra.base import config

    names = config.recipe_names()
    for name in names:
        print(f"{name:<{max(map(len, names))}}  {config.recipe_comment(name)}")


def config_tasks() -> None:
    """The shipped fine-tuning tasks."""
    from electra.base import config

    for name in config.recipe_names("recipes/tasks"):
        print(name)
