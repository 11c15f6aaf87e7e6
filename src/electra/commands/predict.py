"""electra predict: answers of a fine-tuned model to the rows of a file, or to texts."""

from pathlib import Path
from typing import Annotated, Any

import typer

from electra.base.errors import SettingsError, counted
from electra.commands.console import Long, Text2, Trust, columns, is_text, read_lines, say, say_json


def predict_command(
    model: Annotated[Path, typer.Argument(help="fine-tuned model folder, or a folder of seeds (their mean)")],
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE_OR_TEXT]",
            help="table, file with one word per line, or SQuAD's JSON (answers not needed); or a text",
            show_default="texts from standard input, one a line",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="output; its extension sets the format", show_default="FILE.predictions.…, beside it"),
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="add the probability of each class or tag, or the n-best answers")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="overwrite existing output")] = False,
    text: Annotated[str | None, typer.Option(help="column of the text or the words, if not as in training")] = None,
    text2: Text2 = None,
    escape_formulas: Annotated[
        bool, typer.Option("--escape-formulas", help="put a ' before csv cells that a spreadsheet would compute")
    ] = False,
    long: Long = None,
    trust: Trust = False,
) -> None:
    """A prediction for each row of a file of any size, in the file's format; or for texts, on standard output."""
    import electra
    from electra.base.config import short

    if file is None or is_text(file):
        for_files = {"--out": out, "--force": force, "--escape-formulas": escape_formulas}
        if option := next((name for name, value in for_files.items() if value), None):
            what = "standard input" if file is None else short(file)
            raise SettingsError(f"{option} is for files, not for {what}: answers go to standard output. Redirect it.")
        options = {"text": columns(text, text2), "long": long}
        print_answers(
            model, read_lines(file, keep_blank=True), probabilities, {key: it for key, it in options.items() if it}
        )
        return
    result = electra.predict(model, file, out, probabilities, columns(text, text2), force, escape_formulas, long)
    cut = f", {result.cut:,} {result.cut_words}" if result.cut else ""
    say(f"{', '.join(map(str, result.out))}: {counted(result.rows, 'row')}{cut}")


def print_answers(model: Path, lines: list[str], probabilities: bool, options: dict[str, Any]) -> None:
    """Prints answer and text separated by a tab; with `probabilities`, everything the model answers, as JSON."""
    from electra.finetuning.predict import predict_lines

    for line, answer in zip(lines, predict_lines(model, lines, options), strict=True):
        say_json(answer) if probabilities else say(f"{answer_text(answer['prediction'])}\t{line}")


def answer_text(prediction: Any) -> str:
    if isinstance(prediction, float):
        return f"{prediction:.4f}"
    return " ".join(prediction) if isinstance(prediction, list) else str(prediction)
