"""electra finetune: tasks and tables, over seeds."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from electra.base.errors import SettingsError, command
from electra.base.progress import Table
from electra.commands.console import Jobs, Text2, Trust, columns, print_table, resume_hint, say

TRIALS = 12


def finetune_command(
    context: typer.Context,
    model: Annotated[
        Path, typer.Argument(help="a run folder, an export, or any transformers ELECTRA or ModernBERT folder")
    ],
    items: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK_OR_TABLE... [KEY=VALUE]...",
            help='tasks ("electra config tasks"), TOML files, tables; settings such as epochs=5 data=glue',
        ),
    ],
    text: Annotated[
        str | None, typer.Option(help="column of the text, or of the words", show_default="guessed")
    ] = None,
    text2: Text2 = None,
    label: Annotated[
        str | None, typer.Option(help="column of the label, or of the tags", show_default="guessed")
    ] = None,
    dev: Annotated[str | None, typer.Option(help="table to evaluate on", show_default="a tenth of the table")] = None,
    seeds: Annotated[int, typer.Option(help="runs per task", min=1, max=10_000)] = 1,
    jobs: Jobs = 1,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="also fine-tune the same network from random weights, as a baseline")
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="first search learning rate, epochs, layer decay and pooling on dev")
    ] = False,
    trials: Annotated[
        int | None, typer.Option(help="settings that --search tries", min=2, max=120, show_default=str(TRIALS))
    ] = None,
    out: Annotated[Path, typer.Option(help="output folder")] = Path("runs/finetune"),
    trust: Trust = False,
) -> None:
    """Fine-tune on tasks and tables, over seeds. Run the same command again to resume."""
    import electra
    from electra.base import config

    words = [item for item in items if "=" in item and not os.path.exists(item)]  # noqa: PTH110  (an error where it is too long)
    tasks = [item for item in items if item not in words]
    if not tasks:
        raise SettingsError("no task given. Pass a task name, a TOML file or a table.")
    options = {"text": columns(text, text2), "label": label, "dev": dev}
    options = {name: value for name, value in options.items() if value}
    overrides = config.parse_overrides(words)
    for name in sorted(overrides.keys() & options.keys()):
        raise SettingsError(f"{name} has two values, {name}={overrides[name]} and --{name}. Give it once.")
    overrides |= options
    for name in sorted(overrides.keys() & {"seeds", "jobs", "out", "trials"}):
        raise SettingsError(f"{name} is an option of the command, not a setting: --{name} {overrides[name]}")
    if trials and not search:
        raise SettingsError(f"--trials {trials} is for a search. Add --search, or leave it out.")
    count = (trials or TRIALS) if search else 0
    with resume_hint(context.obj):
        result = electra.finetune(model, tasks, out, seeds, jobs, untrained, count, **overrides)
    print_results(result.results, result.models)
    first = out / next(iter(result.results["tasks"])) / "seed-0"
    say(f"{out / 'results.md'} · {out / 'results.json'}")
    say(f"next: {command('predict', first, 'FILE')}   or   {command('evaluate', first, 'FILE')}")


def print_results(results: dict[str, Any], done: Collection[str]) -> None:
    """Prints the scores of all tasks in the folder, and the alarms of those that were `done` now."""
    from electra.finetuning.plan import file_line
    from electra.finetuning.report import baseline_cell, baseline_lines, baseline_names, search_table, shown

    tasks, baselines = results["tasks"].items(), baseline_names(results["tasks"])
    several = any(result["runs"] > 1 for _, result in tasks)
    rows = []
    for name, result in tasks:
        spread = "" if result["sd"] is None else f" ± {result['sd']:.4f}"
        cells = [name, result["metric"], shown(result["median"]) + spread]
        cells += [shown(result["ensemble"][result["metric"]])] * several
        rows.append([*cells, *(baseline_cell(result, it) for it in baselines)])
    head = ("task", "metric", *(("median ± sd", "ensemble") if several else ("score",)), *baselines)
    runs = f", {max(result['runs'] for _, result in tasks)} seeds" if several else ""
    print_table(Table(head, rows, title=f"{results['model']}: dev scores{runs}"))
    for line in baseline_lines(results["tasks"]):
        say(line)
    for name, result in tasks:
        if "search" in result:
            table = search_table(result["search"])
            print_table(Table(table.columns, table.rows, f"{name}: {table.title}"))
        for text in result.get("alarms", ()) if name in done else ():
            say(f"WARNING: {name}: {text}")
        lines = [file_line(entry) for entry in result["files"]]
        lines += [f"started from {result['model']}"] if result["model"] != results["model"] else []
        say(f"{name}: {' · '.join(lines)}")
    if results["glue"]:
        wrong, mixed = results["glue"]["not_official"], results["glue"]["mixed"]
        note = f" (not of one model: {', '.join(mixed)})" if mixed else ""
        note += f" (not comparable: {'; '.join(wrong)})" if wrong else ""
        say(f"GLUE mean of eight medians: {100 * results['glue']['mean']:.2f}{note}")
