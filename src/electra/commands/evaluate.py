"""electra evaluate: metrics of a pre-training run, or of a fine-tuned model on a file with answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from electra.base.errors import command, counted
from electra.base.progress import Table
from electra.commands.console import Long, Text2, Trust, columns, print_table, say, say_json


def evaluate_command(
    run: Annotated[Path, typer.Argument(help="a run folder, or a fine-tuned model folder")],
    file: Annotated[Path | None, typer.Argument(help="table with labels, for a fine-tuned model")] = None,
    data: Annotated[Path | None, typer.Option(help="prepared shards to use instead of the run's")] = None,
    rows: Annotated[
        int | None, typer.Option(help="number of held-out rows", show_default="as in training", min=1)
    ] = None,
    generator: Annotated[
        Path | None, typer.Option(help="another run, whose generator corrupts the text: makes runs comparable")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the metrics as JSON")] = False,
    text: Annotated[str | None, typer.Option(help="text column, if not as in training")] = None,
    text2: Text2 = None,
    label: Annotated[str | None, typer.Option(help="label column, if not as in training")] = None,
    long: Long = None,
    trust: Trust = False,
) -> None:
    """Metrics of a run on held-out documents, with its curves.png; or of a fine-tuned model on a table."""
    import electra

    result = electra.evaluate(run, file, data, rows, columns(text, text2), label, generator, long)
    if "scores" in result:
        say_json(result) if as_json else print_scores(run, file, result)
    else:
        keep_metrics(run, result, data, rows, generator, as_json)


def keep_metrics(
    run: Path,
    result: Mapping[str, Mapping[str, float]],
    data: Path | None,
    rows: int | None,
    generator: Path | None,
    as_json: bool,
) -> None:
    """Writes evaluation.json of the run, or a file named after the run whose generator corrupted the text (with a hash of its path:
    the runs of a comparison all have the same name), plots the curves beside it, and prints the metrics."""
    from hashlib import sha256

    from electra.base.files import write_json
    from electra.pretraining.evaluate import MEANINGS
    from electra.train.log import finite_or_none, plot_run

    finite = {name: {key: finite_or_none(value) for key, value in metrics.items()} for name, metrics in result.items()}
    name, title = "evaluation.json", f"{run}, held-out documents{'' if data is None else f' of {data}'}"
    by_own = generator is None and "auc" in result["trained"]
    if by_own:
        title = f"{title}, corrupted by its own generator"
    if generator is not None:
        place = generator.resolve()
        name = f"evaluation-by-{place.name}-{sha256(bytes(place)).hexdigest()[:8]}.json"
        title = f"{title}, corrupted by {generator}"
    options = {"data": data and str(data), "rows": rows, "generator": generator and str(generator)}
    write_json(run / name, finite | {"options": options})
    plot_run(run, run / "curves.png")
    if as_json:
        say_json(finite)
        return
    networks = [result["trained"], result["untrained"]]
    lines = [
        (key, *(f"{metrics[key]:.4f}" if key in metrics else "" for metrics in networks), meaning)
        for key, meaning in MEANINGS.items()
        if key in result["trained"]
    ]
    print_table(Table(("metric", "trained", "untrained", "meaning"), lines, title))
    if by_own:
        compare = command("evaluate", "OTHER_RUN", "--generator", run)
        say(
            f"The less a generator has learned, the easier it is to catch. To compare runs, give all the same one: {compare}"
        )
    say(f"{run / name} · {run / 'curves.png'}")


def print_scores(model: Path, file: Path | None, result: Mapping[str, Any]) -> None:
    from electra.finetuning.report import shown

    levels = result["baselines"].items()
    scores = [
        (name, shown(value), *(shown(level.get(name)) for _, level in levels))
        for name, value in result["scores"].items()
    ]
    head = ("metric", "value", *(name for name, _ in levels))
    print_table(Table(head, scores, title=f"{model} on {file}, {counted(result['rows'], 'row')}"))
    for text in result["alarms"]:
        say(f"WARNING: {text}")
    if result["cut"]:
        say(f"{counted(result['cut'], 'row')} {result['cut_words']}")
    if "per_class" in result:
        classes = [
            (entry["label"], *(f"{entry[key]:.4f}" for key in ("precision", "recall", "f1")), f"{entry['rows']:,}")
            for entry in result["per_class"]
        ]
        print_table(Table(("class", "precision", "recall", "F1", "rows"), classes, title="each class"))
    if "confusion" in result:
        pairs = zip(result["labels"], result["confusion"], strict=True)
        counts = [(label, *(f"{count:,}" for count in row)) for label, row in pairs]
        print_table(Table(("", *result["labels"]), counts, title="true class (down), answer (across)"))
