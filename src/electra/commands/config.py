"""electra config: recipes, tasks and settings."""

import shutil
import textwrap

import typer

from electra.commands.console import OverrideWords, Recipe, resolve_for_looking, say

config_app = typer.Typer(no_args_is_help=True, help="Look at recipes and settings.", rich_markup_mode=None)


@config_app.command("show")
def show_settings(recipe: Recipe, overrides: OverrideWords = None) -> None:
    """The resolved settings, and where each value came from."""
    from electra.base import config

    settings, sources = resolve_for_looking(recipe, overrides or [])
    flat = config.flatten(config.dump(settings))
    derived = config.flatten({"optimizer": config.dump(settings.optimizer_of_run())})
    width = max(map(len, flat))
    for key, value in flat.items():
        note = f", {derived[key]:.3g} in this run" if value == "auto" != derived.get(key, value) else ""
        say(f"{key:<{width}} = {config.toml_value(value):<14} # {sources[key]}{note}")


@config_app.command("list")
def list_recipes() -> None:
    """The shipped recipes."""
    from electra.base import config

    names = config.recipe_names()
    sizes = [name for name in names if "layers" in config.read_recipe(name).get("encoder", {})]
    column, width = max(map(len, names)) + 4, shutil.get_terminal_size().columns
    others = [name for name in names if name not in sizes]
    for title, part in (
        ("Sizes, complete by themselves:", sizes),
        ("Additions to any of them (tiny+masked-lm):", others),
    ):
        say(title)
        for name in part:
            lines = textwrap.wrap(config.recipe_comment(name), max(30, width - column), break_on_hyphens=False)
            say(f"  {name:<{column - 2}}" + f"\n{'':{column}}".join(lines))


@config_app.command("tasks")
def list_tasks() -> None:
    """The shipped fine-tuning tasks."""
    from electra.base import config

    for name in config.recipe_names("recipes/tasks"):
        say(name)
