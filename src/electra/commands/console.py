"""What the verbs share: options, tables on the terminal, text from wherever it comes, how to go on after an error."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from electra.base.errors import DataError, ElectraError, SettingsError
from electra.base.progress import Table

Recipe = Annotated[str, typer.Argument(help='a shipped recipe ("electra config list") or a TOML file')]
OverrideWords = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="settings, such as train.steps=2000")
]

TextKey = Annotated[str, typer.Option(help="key or column that holds the text")]
Documents = Annotated[Literal["blank-line", "file", "line"], typer.Option(help="what ends a document in .txt")]
OnBad = Annotated[Literal["stop", "skip", "replace"], typer.Option(help="broken bytes, NULs, JSON lines")]
TextInput = Annotated[str | None, typer.Argument(help="text, or a file; standard input without it")]
Jobs = Annotated[int, typer.Option(help="runs at the same time", min=1)]
Text2 = Annotated[str | None, typer.Option(help="column of a second text")]

NEEDS_ANOTHER_COMMAND = (2, 3, 6, 7)
"""Exit codes of wrong settings, wrong data, divergence and lack of memory: the same command would end the same way."""


def print_table(table: Table) -> None:
    """The first column and columns of words stand left; columns of numbers, with their units and gaps, right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Drawing
    from rich.text import Text

    drawing = Drawing(box=box.HEAVY_HEAD)
    for place, name in enumerate(table.columns):
        numbers = place > 0 and all(row[place][:1] in "0123456789+-–." for row in table.rows if row)
        drawing.add_column(Text(name), justify="right" if numbers else "left", no_wrap=numbers)
    for row in table.rows:
        drawing.add_row(*map(Text, row)) if row else drawing.add_section()
    console = Console(highlight=False)
    if table.title:
        console.print(table.title, style="italic", markup=False, soft_wrap=True)
    console.print(drawing)


def read_lines(text: str | None) -> list[str]:
    """A file's lines if `text` names one, `text` itself if not, standard input if it is absent."""
    if text is None:
        content = sys.stdin.read()
    elif os.path.isfile(text):  # noqa: PTH113  (False, not an error, where text is too long for a path)
        try:
            content = Path(text).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{text} is not UTF-8 (byte {error.start}). Convert it first.") from None
    else:
        content = text
    if lines := [line for line in content.splitlines() if line.strip()]:
        return lines
    raise DataError("there is no text to look at. Give some as an argument, a file or on standard input.")


def columns(text: str | None, text2: str | None) -> list[str] | None:
    """The columns of text of a table, where they were named."""
    if text2 and not text:
        raise SettingsError("--text2 is the second of two columns: give --text as well.")
    return [column for column in (text, text2) if column] or None


@contextmanager
def resume_hint(words: Sequence[str], has_begun: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Name the command that goes on after an error which another run of it may survive."""
    try:
        yield
    except BaseException as error:
        code = error.exit_code if isinstance(error, ElectraError) else 1
        if code not in NEEDS_ANOTHER_COMMAND and has_begun():
            print(f"to go on: {shlex.join(['electra', *words])}", file=sys.stderr)
        raise
