"""Column files of the CoNLL shared tasks: a word a line, a blank line after each sentence.

Columns are separated by tabs if the first line of words has one (words may then contain spaces), by spaces otherwise.
Left out are -DOCSTART- lines, comments (a # at the start of a line that has not as many columns as the others: where it
has, # is a word), and of CoNLL-U, which has ten columns, multi-word ranges (1-2) and empty nodes (1.1).
"""

import lzma
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from electra.data.sources import Source, open_source
from electra.errors import DataError

_DOCUMENT = "-DOCSTART-"
CONLL_U = 10
_NO_WORD = re.compile(r"\d+[-.]\d+")


def read_conll(path: Path, columns: Mapping[str, int]) -> list[dict[str, Any]]:
    """One row a sentence: for each name in `columns` the list of what stands in that column, counted from 0, or from the
    end where negative. `{"tokens": 0, "tags": -1}` reads most files of named entities. Plain or compressed."""
    lines = list(_lines(path))
    first = next((line for line in lines if line.strip() and not line.startswith(("#", _DOCUMENT))), "")
    split = tabs if "\t" in first else spaces
    width = len(split(first))
    needed = max(place + 1 if place >= 0 else -place for place in columns.values())
    if width < needed and first:
        raise DataError(
            f"{path} has {width} columns ({first[:60]!r}), not {needed}. Set columns to those it has."
        )
    rows: list[dict[str, Any]] = []
    starts = True
    for number, line in enumerate(lines, 1):
        cells = split(line)
        if not line.strip(" \t"):
            starts = True
        elif not is_no_word(cells, width):
            if len(cells) != width:
                raise DataError(
                    f"{path}:{number} has {len(cells)} columns, the first word {width} ({line[:60]!r}). Repair it."
                )
            if starts:
                rows.append({name: [] for name in columns})
            for name, place in columns.items():
                rows[-1][name].append(cells[place])
            starts = False
    if not rows:
        raise DataError(f"{path} has no words. Give a file with a word a line.")
    return rows


def is_no_word(cells: list[str], width: int) -> bool:
    if len(cells) == width == CONLL_U:
        return bool(_NO_WORD.fullmatch(cells[0]))
    return cells[0] == _DOCUMENT or (len(cells) != width and cells[0].startswith("#"))


def tabs(line: str) -> list[str]:
    return line.split("\t")


def spaces(line: str) -> list[str]:
    """Not `line.split()`: a no-break space is part of its word."""
    return re.split("[ \t]+", line.strip(" \t"))


def _lines(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise DataError(f"{path} is not a file. Check the path.")
    number = 1
    try:
        opened = open_source(Source(path, path.name, path.stat().st_size))
        with opened.raw, opened.stream:
            if opened.format not in ("text", "jsonl"):  # a first word may well be "{"
                raise DataError(f"{path} is a table ({opened.format}), not a column file.")
            for line in opened.stream:
                yield line.decode("utf-8").rstrip("\r\n")
                number += 1
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number} has bytes that are not UTF-8 ({error.reason}). Convert it."
        ) from None
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        problem = " ".join(str(error).split())
        raise DataError(f"{path} is cut off or damaged ({problem}). Fetch it again.") from None
