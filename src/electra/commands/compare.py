"""The verb that trains recipes side by side."""

from pathlib import Path
from typing import Annotated

import typer

from electra.base.table import Table
from electra.commands.console import print_table


def compare(
    recipes_and_words: Annotated[
        list[str], typer.Argument(metavar="RECIPE… KEY=VALUE…", help="recipes, and settings for all of them")
    ],
    seeds: Annotated[int, typer.Option(help="runs of each recipe", min=1)] = 3,
    budget: Annotated[str, typer.Option(help='each run gets "2m", "1h", "3e14 flops" or "500 steps"')] = "2m",
    vary: Annotated[str, typer.Option(help="key=value,value,…: every recipe with each of the values")] = "",
    table: Annotated[
        Path | None, typer.Option(help="labelled table for a probe: how much of it the frozen encoder knows")
    ] = None,
    text: Annotated[str, typer.Option(help="its column of text")] = "text",
    label: Annotated[str, typer.Option(help="its column of labels")] = "label",
    probe_rows: Annotated[int, typer.Option(help="rows of it that are used, at most", min=10)] = 4000,
    out: Annotated[Path, typer.Option(help="folder for the runs, the table and the plot")] = Path(
        "runs/compare"
    ),
    jobs: Annotated[int, typer.Option(help="runs at the same time", min=1)] = 1,
) -> None:
    """Train recipes under the same budget, over several seeds; a table and a plot of what came out."""
    from electra.base.errors import SettingsError
    from electra.inspector.compare import compare as run
    from electra.inspector.compare import parse_budget, variants
    from electra.inspector.compare_report import MEASURES, cell, seeds_cell, write_report
    from electra.inspector.probe import read_labelled

    words = [word for word in recipes_and_words if "=" in word]
    recipes = [word for word in recipes_and_words if "=" not in word]
    if not recipes:
        raise SettingsError("name at least one recipe, such as tiny or tiny+masked-lm.")
    labelled = None if table is None else read_labelled(table, text, label, probe_rows)
    results = []
    chosen = variants(recipes, words, vary)
    for result in run(chosen, seeds, parse_budget(budget), out, labelled, jobs):
        results.append(result)
        end = "diverged" if result.diverged else f"{result.steps:,} steps in {result.seconds:.0f} s"
        print(f"{result.variant}, seed {result.seed}: {end}")
    order = [variant.name for variant in chosen]
    results.sort(key=lambda result: (order.index(result.variant), result.seed))
    rows = write_report(out, results)
    measures = [(key, name) for key, name in MEASURES if any(key in row for row in rows)]
    cells = [
        (row["variant"], seeds_cell(row), f"{row['steps']:,}", *(cell(row.get(key)) for key, _ in measures))
        for row in rows
    ]
    head = ("recipe", "seeds", "steps", *(name for _, name in measures))
    print_table(Table(head, cells, title=f"{budget} per run, median (least–greatest) of {seeds} seeds"))
    print(f"{out / 'comparison.md'} · {out / 'comparison.png'} · {out / 'results.json'}")
