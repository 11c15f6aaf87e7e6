"""electra predict: answers of a fine-tuned model to the rows of a file."""

from pathlib import Path
from typing import Annotated

import typer

from electra.commands.console import Text2, columns


def predict_command(
    model: Annotated[Path, typer.Argument(help="a fine-tuned model folder")],
    file: Annotated[
        Path, typer.Argument(help="a table, a file with a word per line, or SQuAD's JSON; answers are not needed")
    ],
    out: Annotated[
        Path | None, typer.Option(help="its name says the format", show_default="FILE.predictions.…")
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="of each class, of each tag, or the n-best answers")
    ] = False,
    text: Annotated[str | None, typer.Option(help="column of the text or the words, if not as in training")] = None,
    text2: Text2 = None,
) -> None:
    """A prediction for each row of a file of any size, in the file's format."""
    import electra

    result = electra.predict(model, file, out, probabilities, columns(text, text2))
    cut = f", {result.cut:,} {result.cut_words}" if result.cut else ""
    print(f"{', '.join(map(str, result.out))}: {result.rows:,} rows{cut}")
