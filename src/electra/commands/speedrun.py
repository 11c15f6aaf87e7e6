"""electra speedrun: what can be learned in a given number of minutes?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from electra.base.errors import SettingsError
from electra.commands.console import FINETUNE, Jobs, is_recipe, print_table, resume_hint

if TYPE_CHECKING:
    from electra.finetuning.speedrun import SpeedrunSettings

OPTIONS = ("minutes", "seeds", "jobs", "out", "train.minutes")


def speedrun_command(
    context: typer.Context,
    items: Annotated[
        list[str],
        typer.Argument(
            metavar="[RECIPE] data=TEXT_OR_SHARDS glue=FOLDER [KEY=VALUE]...",
            help="settings of pre-training (optimizer.lr=2e-3) and, as finetune.lr=1e-4, of fine-tuning; tokenizer=FILE for text; "
            "tasks=cola,rte instead of all at hand",
        ),
    ],
    minutes: Annotated[float, typer.Option(help="minutes of pre-training")] = 10.0,
    seeds: Annotated[int, typer.Option(help="fine-tuning runs per task", min=1, max=10_000)] = 5,
    jobs: Jobs = 1,
    out: Annotated[Path, typer.Option(help="output folder")] = Path("runs/speedrun"),
) -> None:
    """Pre-train for so many minutes, fine-tune on GLUE, report. Run the same command again to resume."""
    from electra.finetuning.speedrun import beside_table, overlap_table, speedrun, tasks_table

    with resume_hint(context.obj, lambda: (out / "timings.json").is_file()):
        settings = read_items(items, minutes=minutes, seeds=seeds, jobs=jobs, out=out)
        result = speedrun(settings, " ".join(["electra", *context.obj]))
    for table in (tasks_table(result), overlap_table(result["overlap"]), beside_table(result)):
        print_table(table)
    five = result["glue5_median"]
    headline = "tasks are missing, so there is no mean of five" if five is None else f"mean of five {five:.1f}"
    print(f"{minutes:g} minutes, {result['tokens']:,} tokens: {headline}")
    print(f"{out / 'report.md'} · {out / 'report.png'} · {out / 'speedrun.json'}")


def read_items(items: list[str], **options: Any) -> "SpeedrunSettings":
    """The settings of a speed-run from the words of the command line; `options` are fields of the settings too."""
    from electra.base import config
    from electra.finetuning.speedrun import RECIPE, SpeedrunSettings

    recipes = [item for item in items if is_recipe(item)]
    if len(recipes) > 1:
        raise SettingsError(f"one recipe at a time: {' or '.join(recipes)}? Join them with +.")
    values = config.parse_overrides([item for item in items if not is_recipe(item)])
    for name in values.keys() & set(OPTIONS):
        option = name.removeprefix("train.")
        raise SettingsError(f"{name} is an option of the command, not a setting: --{option} {values[name]}")
    if "train.steps" in config.flatten(values):
        raise SettingsError("train.steps does not apply: here the time ends the run. Set it, as in --minutes 10.")
    paths: dict[str, Any] = {
        name: Path(str(values.pop(name))) for name in ("data", "glue", "tokenizer") if name in values
    }
    for name in ("data", "glue"):
        if name not in paths:
            raise SettingsError(f"{name} is not set. Give it as {name}=….")
    tasks = [name for name in str(values.pop("tasks", "")).split(",") if name]
    method = {key.removeprefix(FINETUNE): values[key] for key in values if key.startswith(FINETUNE)}
    words = [item for item in items if item.partition("=")[0].strip() in values and not item.startswith(FINETUNE)]
    recipe = recipes[0] if recipes else RECIPE
    return SpeedrunSettings(**paths, recipe=recipe, words=words, tasks=tasks, method=method, **options)
