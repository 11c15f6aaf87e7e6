"""The verbs around a pre-training run."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from electra.base.errors import SettingsError
from electra.commands.finetuning import evaluate_task
from electra.commands.settings import Recipe, Words


def quickstart(
    folder: Annotated[Path, typer.Argument(help="where everything goes")] = Path("runs/quickstart"),
    steps: Annotated[
        int | None, typer.Option(help="fewer steps than the recipe: faster, learns less")
    ] = None,
) -> None:
    """Tokenizer, shards, pre-training and a result from the documentation on this machine; no download."""
    from electra.commands.quickstart import run_quickstart

    try:
        run_quickstart(folder, steps)
    except BaseException:
        print(
            f"to go on: electra quickstart {shlex.quote(str(folder))}"
            + (f" --steps {steps}" if steps else ""),
            file=sys.stderr,
        )
        raise


def pretrain(recipe: Recipe, words: Words = None) -> None:
    """Pre-train a generator and a discriminator. The same command again goes on where it stopped."""
    from electra.pretraining.run import pretrain as run
    from electra.pretraining.run import resume_command
    from electra.pretraining.settings import resolve
    from electra.train.checkpoint import checkpoint_folders
    from electra.train.log import plot_run

    settings, _ = resolve(recipe, words or [])
    command = resume_command(recipe, words or [])
    folder = Path(settings.run)
    try:
        figures = run(settings, command)
    except Exception as error:
        begun = checkpoint_folders(folder / "checkpoints")
        if begun and getattr(error, "exit_code", 1) not in (2, 3, 6, 7):  # those need another command
            print(f"to go on: {command}", file=sys.stderr)
        raise
    plot_run(folder, folder / "curves.png")
    shown = ", ".join(
        f"{name} {figures[name]:.3f}" for name in ("auc", "mlm_loss") if figures.get(name) is not None
    )
    print(
        f"{folder}: finished"
        + (f", held-out {shown}" if shown else " (no held-out documents, so no figures)")
    )
    detects = "auc" in figures and settings.objective.kind != "electric"
    look = f'electra detect {folder} "some text"   or   ' if detects else ""
    print(f"next: {look}electra export {folder} my-model")


def evaluate(
    run: Annotated[Path, typer.Argument(help="a run folder, or a fine-tuned model folder")],
    file: Annotated[Path | None, typer.Argument(help="for a fine-tuned model: a table with labels")] = None,
    data: Annotated[Path | None, typer.Option(help="other prepared shards than the run's")] = None,
    rows: Annotated[
        int | None, typer.Option(help="how many held-out rows", show_default="as in training", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="figures for machines")] = False,
    text: Annotated[str | None, typer.Option(help="column of the text, if not as in training")] = None,
    text2: Annotated[str | None, typer.Option(help="column of the second text")] = None,
    label: Annotated[str | None, typer.Option(help="column of the label, if not as in training")] = None,
) -> None:
    """Figures of a run on held-out documents, with its curves.png; or of a fine-tuned model on a table."""
    if (run / "task.json").is_file() or file is not None:
        if file is None:
            raise SettingsError(f"{run} is a fine-tuned model: give a table to score it on.")
        evaluate_task(run, file, text, text2, label, as_json)
        return
    from rich.console import Console

    from electra.base.files import write_json
    from electra.pretraining.evaluate import evaluate_run, figures_table
    from electra.train.log import finite_or_none, plot_run

    figures, untrained = evaluate_run(run, data, rows)
    result = {"trained": figures, "untrained": untrained}
    clean = {
        name: {key: finite_or_none(value) for key, value in part.items()} for name, part in result.items()
    }
    if as_json:
        print(json.dumps(clean))
    else:
        Console().print(figures_table(f"{run}, held-out documents", figures, untrained))
        print(f"{run / 'evaluation.json'} · {run / 'curves.png'}")
    write_json(run / "evaluation.json", clean)
    plot_run(run, run / "curves.png")


def detect(
    model: Annotated[Path, typer.Argument(help="a run folder or an exported model folder")],
    text: Annotated[str | None, typer.Argument(help="text, or a file; standard input without it")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line of text")] = False,
) -> None:
    """Each token with its probability of having been replaced."""
    from dataclasses import asdict

    from rich.console import Console

    from electra.data.tokenizer import special_ids
    from electra.inspector.detect import detect as score
    from electra.inspector.show import coloured, read_lines
    from electra.pretraining.load import load_detector

    loaded = load_detector(model)
    console = Console(highlight=False)
    for line in read_lines(text):
        tokens = score(line, loaded.encoder, loaded.head, loaded.tokenizer, special_ids(loaded.tokenizer))
        if as_json:
            print(
                json.dumps({"text": line, "tokens": [asdict(token) for token in tokens]}, ensure_ascii=False)
            )
        else:
            console.print(coloured(tokens), soft_wrap=True)


def export(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path, typer.Argument(help="new folder: gets discriminator/ and generator/")],
) -> None:
    """transformers folders of discriminator and generator, checked: same ids, same logits."""
    from electra.pretraining.load import export_run

    for line in export_run(run, out):
        print(line)
