"""What the verbs share: options, tables on the terminal, text from arguments, files or standard input, the hint how to resume."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from electra.base.errors import DataError, ElectraError, PeerError, SettingsError, command, is_first_process, is_said
from electra.base.files import json_text
from electra.base.progress import Table, visible

if TYPE_CHECKING:
    from rich.console import Console

    from electra.pretraining.settings import PretrainSettings


def complete_recipe(incomplete: str) -> list[str]:
    """Shell completion: recipes that begin with the word, or with what follows its last +."""
    from electra.base import config

    before, plus, last = incomplete.rpartition("+")
    return [f"{before}{plus}{name}" for name in config.recipe_names() if name.startswith(last)]


def is_recipe(word: str) -> bool:
    """Whether a word is a recipe and not a setting: the name of a file may have a = in it."""
    parts = [word] if os.path.isfile(word) else word.split("+")  # noqa: PTH113  (an error where it is too long)
    return all("=" not in part or os.path.isfile(part) for part in parts)  # noqa: PTH113


Recipe = Annotated[
    str, typer.Argument(help='a shipped recipe ("electra config list") or a TOML file', autocompletion=complete_recipe)
]
OverrideWords = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="settings, such as train.steps=2000")
]


def resolve_for_looking(recipe: str, words: list[str]) -> "tuple[PretrainSettings, dict[str, str]]":
    """The settings and where each came from. Unlike `resolve` it does not require `data`, which has no default and is not needed here."""
    from electra.base import config
    from electra.pretraining.settings import resolve

    if "data" in config.parse_overrides(words).keys() | config.read_recipe(recipe).keys():
        return resolve(recipe, words)
    settings, sources = resolve(recipe, [*words, 'data=""'])
    return settings, sources | {"data": "not set"}


TextKey = Annotated[str, typer.Option(help="key or column that holds the text")]
Documents = Annotated[Literal["blank-line", "file", "line"], typer.Option(help="what ends a document in .txt")]
OnBad = Annotated[Literal["stop", "skip", "replace"], typer.Option(help="broken bytes, NULs, JSON lines")]
TextInput = Annotated[str | None, typer.Argument(help="text, or a file; standard input if omitted")]
FINETUNE = "finetune."  # the prefix of fine-tuning settings in commands that also pre-train
Jobs = Annotated[int, typer.Option(help="runs in parallel; with several GPUs, on each of them", min=1, max=1024)]
Text2 = Annotated[str | None, typer.Option(help="column of the second text of a pair")]
Long = Annotated[
    Literal["cut", "windows"] | None, typer.Option(help="how a classifier reads long texts, if not as in training")
]
Trust = Annotated[bool, typer.Option("--trust", help="read model folders that were edited since they were written")]

MOST_TEXT = 1 << 28
NEEDS_ANOTHER_COMMAND = (1, 2, 3, 4, 6, 7)
"""Exit codes of bugs, wrong settings, wrong data, damage, divergence and lack of memory: the same command would fail again in the
same way."""
_CONTROLS = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def terminal() -> "Console":
    """A rich console that raises BrokenPipeError at a closed pipe, which `run` handles; rich itself would exit with code 1."""
    from rich.console import Console

    def leave() -> None:
        raise BrokenPipeError

    console = Console(highlight=False)
    console.on_broken_pipe = leave  # type: ignore[method-assign]
    return console


def print_table(table: Table) -> None:
    """Prints a table. The first column and columns of words are aligned left, columns of numbers (with units and gaps) right. Columns
    that do not fit into the width follow in another table, beside the first column again."""
    from rich import box
    from rich.table import Table as Drawing
    from rich.text import Text

    console, rows = terminal(), [*filter(None, table.rows)]
    if table.title:
        console.print(visible(table.title), style="italic", markup=False, soft_wrap=True)
    widths = [max(len(visible(cell)) for cell in cells) + 3 for cells in zip(table.columns, *rows, strict=True)]
    is_number = [place > 0 and all(row[place][:1] in "0123456789+-–." for row in rows) for place in range(len(widths))]
    least = [24, *[10] * len(widths)]  # least widths: words may be broken into lines this short
    needed = [width if is_number[place] else min(width, least[place]) for place, width in enumerate(widths)]
    parts: list[list[int]] = [[]]
    for place, width in list(enumerate(needed))[1:]:
        if parts[-1] and needed[0] + sum(needed[it] for it in parts[-1]) + width >= console.width:
            parts.append([])
        parts[-1].append(place)
    for part in parts:
        drawing = Drawing(box=box.HEAVY_HEAD)
        for place in (0, *part):
            is_right = is_number[place]
            drawing.add_column(
                Text(visible(table.columns[place])), justify="right" if is_right else "left", no_wrap=is_right
            )
        drawing.columns[0].overflow = "fold"  # the name of a row is never cut
        for row in table.rows:
            drawing.add_row(*(Text(visible(row[place])) for place in (0, *part))) if row else drawing.add_section()
        console.print(drawing)


def say(text: object) -> None:
    """Prints text for people on standard output; control characters, which may come from files, are made visible."""
    print(visible(str(text)))


def say_json(content: object) -> None:
    """Prints one line of JSON. Control characters that JSON allows in strings are escaped, in case a terminal shows the line."""
    line = json_text(content)
    print(_CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", line))


def is_text(word: str) -> bool:
    """Whether a word is text rather than a file. A single word with an extension is a file, and an error if there is none."""
    if os.path.exists(word):  # noqa: PTH110  (False, not an error, where it is too long for a path)
        return False
    if Path(word).suffix.strip(".") and not word.split()[1:]:
        raise DataError(f"{word} does not exist. Give a file that does, or a text of several words.")
    return True


def read_lines(text: str | None, keep_blank: bool = False) -> list[str]:
    """The lines of a file if `text` names one, otherwise of `text` itself, or of standard input if it is None. `keep_blank` keeps
    blank lines, so that the n-th answer belongs to the n-th line."""
    from electra.data.files import NUL

    if text is None:
        where, data = "standard input", sys.stdin.buffer.read(MOST_TEXT + 1)
    elif not is_text(text):
        if Path(text).is_dir():
            raise DataError(f"{text} is a folder. Give a file, or a text of several words.")
        with Path(text).open("rb") as file:
            where, data = text, file.read(MOST_TEXT + 1)
    else:
        where, data = "the text", text.encode("utf-8", "surrogateescape")
    if len(data) > MOST_TEXT:
        raise DataError(f"{where} has more than {MOST_TEXT >> 20} MiB. Split it into several.")
    try:
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} has bytes that are not UTF-8 (byte {error.start}). Convert it first.") from None
    if "\0" in content:
        raise DataError(f"{where} {NUL}.")
    # not splitlines, which also ends a line at a form feed, U+0085 and U+2028
    lines = [line.rstrip("\r") for line in content.removesuffix("\n").split("\n")]
    if any(map(str.strip, lines)):
        return [line for line in lines if keep_blank or line.strip()]
    raise DataError("no text given. Give some as an argument, a file or on standard input.")


def refuse_swapped(out: str | Path, verb: str) -> None:
    """Refuses an output that is a file: verbs that read many files take the output first, which people expect last."""
    if os.path.isfile(out):  # noqa: PTH113  (may be a URL)
        order = command(verb, "NEW_FOLDER", out)
        raise SettingsError(f"{out} is a file: the folder for the output comes first, then the text. Try: {order} …")


def columns(text: str | None, text2: str | None) -> list[str] | None:
    """The text columns of a table, or None if none was named."""
    if text2 and not text:
        raise SettingsError("--text2 is the second of two columns: give --text as well.")
    return [column for column in (text, text2) if column] or None


@contextmanager
def resume_hint(
    words: Sequence[str], has_begun: Callable[[], bool] = lambda: True, launcher: Sequence[str] = ("electra",)
) -> Iterator[None]:
    """After an error that need not happen again, prints the command that resumes."""
    try:
        yield
    except BaseException as error:
        code = error.exit_code if isinstance(error, ElectraError) else 5 if isinstance(error, OSError) else 1
        code = 130 if isinstance(error, KeyboardInterrupt) else code
        speaks = (is_first_process() or isinstance(error, PeerError)) and not is_said(error)
        if speaks and code not in NEEDS_ANOTHER_COMMAND and has_begun():
            with suppress(BrokenPipeError):
                print(visible(f"to resume: {shlex.join([*launcher, *words])}"), file=sys.stderr, flush=True)
        raise
