"""electra compare: recipes side by side."""

from pathlib import Path
from typing import Annotated

import typer

from electra.base.errors import SettingsError, counted
from electra.commands.console import FINETUNE, Jobs, is_recipe, print_table, say


def compare_command(
    recipes_and_overrides: Annotated[
        list[str], typer.Argument(metavar="RECIPE… KEY=VALUE…", help="recipes, and settings that apply to all of them")
    ],
    seeds: Annotated[int, typer.Option(help="runs per recipe", min=1, max=10_000)] = 3,
    budget: Annotated[
        str,
        typer.Option(
            help='each run gets "2m", "1h", "3e14 flops", "3e14 paper flops" or "500 steps"; several with commas'
        ),
    ] = "2m",
    vary: Annotated[str, typer.Option(help="key=value,value,…: run every recipe with each of these values")] = "",
    table: Annotated[Path | None, typer.Option(help="labelled table to probe the frozen encoder with")] = None,
    text: Annotated[str, typer.Option(help="text column of --table")] = "text",
    label: Annotated[str, typer.Option(help="label column of --table")] = "label",
    probe_rows: Annotated[int, typer.Option(help="most rows of --table to use", min=10, max=10_000_000)] = 4000,
    tasks: Annotated[
        str, typer.Option(help="fine-tuning tasks to compare on, such as cola,rte; settings as finetune.data=GLUE")
    ] = "",
    task_seeds: Annotated[int, typer.Option(help="fine-tuning runs per task", min=1, max=10_000)] = 1,
    task_jobs: Annotated[
        int, typer.Option(help="fine-tuning runs in parallel, for each pre-training run", min=1, max=1024)
    ] = 1,
    out: Annotated[Path, typer.Option(help="folder for the runs, the table and the plot")] = Path("runs/compare"),
    jobs: Jobs = 1,
) -> None:
    """Train recipes under the same budget, over several seeds; a table and a plot of what came out."""
    import electra
    from electra.base.config import parse_overrides, recipe_names
    from electra.finetuning.plan import TASKS
    from electra.inspector.compare import Tasks, Yardsticks, comparison_table, is_time
    from electra.inspector.probe import read_labelled

    words = [word for word in recipes_and_overrides if not is_recipe(word)]
    recipes = [word for word in recipes_and_overrides if is_recipe(word)]
    if not recipes:
        raise SettingsError("name at least one recipe, such as tiny or tiny+masked-lm.")
    method = parse_overrides([word.removeprefix(FINETUNE) for word in words if word.startswith(FINETUNE)])
    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    if method and not names:
        raise SettingsError(
            f"{FINETUNE}{next(iter(method))} is for fine-tuning, and there is no task. Name some with --tasks."
        )
    for option, count in (("--task-seeds", task_seeds), ("--task-jobs", task_jobs)):
        if count > 1 and not names:
            raise SettingsError(f"{option} {count} is for fine-tuning, and there is no task. Name some with --tasks.")
    for option, value, usual in (
        ("--text", text, "text"),
        ("--label", label, "label"),
        ("--probe-rows", probe_rows, 4000),
    ):
        if value != usual and table is None:
            raise SettingsError(f"{option} {value} is for a table, and there is none. Name one with --table.")
    if "data" not in method and (lost := next((name for name in names if name in recipe_names(TASKS)), "")):
        raise SettingsError(f"where are the files of {lost}? Add {FINETUNE}data=FOLDER, with a folder for each task.")
    probed = None if table is None else read_labelled(table, text, label, probe_rows)
    yardsticks = Yardsticks(probed, Tasks(names, method, task_seeds, task_jobs) if names else None)
    overrides = [word for word in words if not word.startswith(FINETUNE)]
    results = electra.compare(
        recipes, overrides, vary=vary, seeds=seeds, budget=budget, yardsticks=yardsticks, jobs=jobs, out=out
    )
    title = f"{budget} per run, median (least–greatest) of {counted(seeds, 'seed')}"
    print_table(comparison_table(results, title, is_wide=False, is_timed=is_time(budget)))
    files = (out / name for name in ("comparison.md", "comparison.png", "results.json"))
    say(" · ".join(str(file) for file in files if file.exists()))  # no picture if every run diverged
