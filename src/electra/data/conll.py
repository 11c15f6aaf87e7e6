"""Column files of the CoNLL shared tasks: a word a line, a blank line after each sentence.

Columns are separated by tabs if the first line of words has one (words may then contain spaces), by spaces otherwise.
Left out are -DOCSTART- lines, comments (a # at the start of a line that has not as many columns as the others: where it
has, # is a word), and of CoNLL-U, which has ten columns, multi-word ranges (1-2) and empty nodes (1.1).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from electra.base.errors import DataError
from electra.data.tables import opened

_DOCUMENT = "-DOCSTART-"
CONLL_U = 10
_NO_WORD = re.compile(r"\d+[-.]\d+")


class Line(NamedTuple):
    """One line of a file; `cells` is None where it is no word."""

    text: str
    cells: Sequence[str] | None


def read_conll(path: Path, columns: Mapping[str, int]) -> list[dict[str, Any]]:
    """One row a sentence: for each name in `columns` the list of what stands in that column, counted from 0, or from the
    end where negative. `{"tokens": 0, "tags": -1}` reads most files of named entities. Plain or compressed."""
    rows = [row for lines in sentences(path, columns.values()) if (row := row_of(lines, columns))]
    if not rows:
        raise DataError(f"{path} has no words. Give a file with a word a line.")
    return rows


def row_of(lines: Sequence[Line], columns: Mapping[str, int]) -> dict[str, Any] | None:
    words = [line.cells for line in lines if line.cells is not None]
    return {name: [cells[place] for cells in words] for name, place in columns.items()} if words else None


def sentences(path: Path, places: Iterable[int]) -> Iterator[list[Line]]:
    """All lines, in groups that end with a blank one. Joined by line ends they are the file again."""
    group: list[Line] = []
    width, split = 0, spaces
    for number, line in enumerate(_lines(path), 1):
        if not width and line.strip(" \t") and not line.startswith(("#", _DOCUMENT)):
            split = tabs if "\t" in line else spaces
            width = len(split(line))
            refuse_columns(path, line, width, list(places))
        cells = split(line)
        if not line.strip(" \t"):
            yield [*group, Line(line, None)]
            group = []
        elif is_no_word(cells, width):
            group.append(Line(line, None))
        elif len(cells) == width:
            group.append(Line(line, cells))
        else:
            raise DataError(
                f"{path}:{number} has {len(cells)} columns, the first word {width} ({line[:60]!r}). Repair it."
            )
    if group:
        yield group


def refuse_columns(path: Path, line: str, width: int, places: Sequence[int]) -> None:
    """Two names for one column are words that are their own tags: what -1 means in a file of words alone."""
    needed = max(place + 1 if place >= 0 else -place for place in places)
    needed = max(needed, len(places))
    if width < needed or len({place % width for place in places}) < len(places):
        raise DataError(
            f"{path} has {width} columns ({line[:60]!r}), not {needed}. Set token_column and tag_column to those it has."
        )


def is_no_word(cells: Sequence[str], width: int) -> bool:
    if len(cells) == width == CONLL_U:
        return bool(_NO_WORD.fullmatch(cells[0]))
    return cells[0] == _DOCUMENT or (len(cells) != width and cells[0].startswith("#"))


def with_tags(lines: Sequence[Line], tags: Sequence[str]) -> Iterator[str]:
    """The lines with one more column. So that programs which count columns, conlleval among them, can read the result,
    the line of a document has one too."""
    answers = iter(tags)
    for text, cells in lines:
        separator = "\t" if "\t" in text else " "
        if cells is not None:
            yield f"{text}{separator}{next(answers)}"
        else:
            yield f"{text}{separator}O" if text.startswith(_DOCUMENT) else text


def tabs(line: str) -> list[str]:
    return line.split("\t")


def spaces(line: str) -> list[str]:
    """Not `line.split()`: a no-break space is part of its word."""
    return re.split("[ \t]+", line.strip(" \t"))


def _lines(path: Path) -> Iterator[str]:
    number = 1
    with opened(path) as source:
        if source.format not in ("text", "jsonl"):  # a first word may well be "{"
            raise DataError(f"{path} is a table ({source.format}), not a column file.")
        try:
            for line in source.stream:
                yield line.decode("utf-8").rstrip("\r\n")
                number += 1
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}:{number} has bytes that are not UTF-8 ({error.reason}). Convert it."
            ) from None
