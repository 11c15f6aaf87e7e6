"""The verbs around fine-tuned models."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from electra.base.errors import SettingsError

Text = Annotated[str | None, typer.Option(help="column of the text, or of the words", show_default="guessed")]
Text2 = Annotated[str | None, typer.Option(help="column of a second text")]
Label = Annotated[
    str | None, typer.Option(help="column of the label, or of the tags", show_default="guessed")
]


def finetune(
    model: Annotated[
        Path,
        typer.Argument(help="a run folder, an export, or any transformers ELECTRA or ModernBERT folder"),
    ],
    items: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK_OR_TABLE... [KEY=VALUE]...",
            help='tasks ("electra config tasks"), TOML files, tables; settings such as epochs=5 data=glue',
        ),
    ],
    text: Text = None,
    text2: Text2 = None,
    label: Label = None,
    dev: Annotated[
        str | None, typer.Option(help="table to score on", show_default="a tenth of the table")
    ] = None,
    seeds: Annotated[int, typer.Option(help="runs of each task", min=1)] = 1,
    jobs: Annotated[int, typer.Option(help="runs at the same time", min=1)] = 1,
    out: Annotated[Path, typer.Option(help="where everything goes")] = Path("runs/finetune"),
) -> None:
    """Fine-tune on tasks and tables, over seeds. The same command again keeps what is finished."""
    from electra.base import config
    from electra.finetuning.run import finetune as run

    words = [item for item in items if "=" in item and not Path(item).exists()]
    tasks = [item for item in items if item not in words]
    if not tasks:
        raise SettingsError("on what? Name a task, a TOML file or a table.")
    overrides = config.parse_overrides(words) | columns(text, text2, label)
    if dev:
        overrides["files.dev"] = dev
    try:
        results = run(model, tasks, overrides, out, seeds, jobs, say)
    except Exception as error:
        if getattr(error, "exit_code", 1) not in (2, 3, 6, 7):
            print(f"to go on: electra finetune {shlex.join(sys.argv[2:])}", file=sys.stderr)
        raise
    show_results(results)
    first = next(iter(results["tasks"]))
    print(f"{out / 'results.md'} · {out / 'results.json'}")
    print(
        f"next: electra predict {out / first / 'seed-0'} FILE   or   electra evaluate {out / first / 'seed-0'} FILE"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def columns(text: str | None, text2: str | None, label: str | None) -> dict[str, Any]:
    if text2 and not text:
        raise SettingsError("--text2 is the second of two columns: give --text as well.")
    found: dict[str, Any] = {}
    if text:
        found["text"] = [text, text2] if text2 else [text]
    if label:
        found["label"] = label
    return found


def show_results(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from electra.finetuning.plan import file_line
    from electra.finetuning.report import shown

    table = Table(title=f"{results['model']}: dev scores")
    for name in ("task", "metric", "median", "mean ± sd", "best", "ensemble", "runs"):
        table.add_column(name, justify="left" if name in ("task", "metric") else "right", no_wrap=True)
    for name, result in results["tasks"].items():
        spread = "" if result["sd"] is None else f" ± {result['sd']:.4f}"
        figures = (shown(result["median"]), shown(result["mean"]) + spread, shown(result["best"]))
        ensemble = shown(result["ensemble"][result["metric"]])
        table.add_row(name, result["metric"], *figures, ensemble, str(result["runs"]))
    console = Console()
    console.print(table)
    for name, result in results["tasks"].items():
        lines = [file_line(entry) for entry in result["files"]]
        lines += [f"started from {result['model']}"] if result["model"] != results["model"] else []
        console.print(f"{name}: {' · '.join(lines)}", soft_wrap=True, highlight=False)
    if any(result["runs"] > 1 for result in results["tasks"].values()):
        console.print("best is the best seed on this dev set: it flatters", soft_wrap=True)
    if results["glue"]:
        wrong = results["glue"]["not_official"]
        note = f" (not comparable: {'; '.join(wrong)})" if wrong else ""
        console.print(
            f"GLUE mean of eight medians: {100 * results['glue']['mean']:.2f}{note}", soft_wrap=True
        )


def predict(
    model: Annotated[Path, typer.Argument(help="a fine-tuned model folder")],
    file: Annotated[
        Path,
        typer.Argument(help="a table, a file with a word a line, or SQuAD's JSON; answers are not needed"),
    ],
    out: Annotated[
        Path | None, typer.Option(help="its name says the format", show_default="FILE.predictions.…")
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="of each class, of each tag, or the n-best answers")
    ] = False,
    text: Annotated[
        str | None, typer.Option(help="column of the text or the words, if not as in training")
    ] = None,
    text2: Text2 = None,
) -> None:
    """A prediction for each row of a file of any size, in the file's format."""
    from electra.finetuning.predict import predict_file

    done = predict_file(model, file, out, probabilities, columns(text, text2, None))
    names = ", ".join(map(str, done.out))
    print(f"{names}: {done.rows:,} rows" + (f", {done.cut:,} {done.cut_words}" if done.cut else ""))


def evaluate_task(
    model: Path, file: Path, text: str | None, text2: str | None, label: str | None, as_json: bool
) -> None:
    from rich.console import Console
    from rich.table import Table

    from electra.finetuning.predict import evaluate_file

    result = evaluate_file(model, file, columns(text, text2, label))
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
        return
    console = Console()
    table = Table(title=f"{model} on {file.name}, {result['rows']:,} rows")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in result["scores"].items():
        table.add_row(name, f"{value:.4f}")
    console.print(table)
    if result["cut"]:
        print(f"{result['cut']:,} rows {result['cut_words']}")
    if "per_class" in result:
        table = Table(title="each class")
        for name in ("class", "precision", "recall", "F1", "rows"):
            table.add_column(name, justify="left" if name == "class" else "right")
        for entry in result["per_class"]:
            figures = (f"{entry[key]:.4f}" for key in ("precision", "recall", "f1"))
            table.add_row(entry["label"], *figures, f"{entry['rows']:,}")
        console.print(table)
    if "confusion" in result:
        table = Table(title="true class (down), answer (across)")
        for name in ("", *result["labels"]):
            table.add_column(name, justify="right" if name else "left")
        for name, row in zip(result["labels"], result["confusion"], strict=True):
            table.add_row(name, *(f"{count:,}" for count in row))
        console.print(table)
