"""Column files of the CoNLL shared tasks: a word a line, a blank line after each sentence.

Columns are separated by tabs if the first line of words has one (words may then contain spaces), by spaces otherwise.
Not words, and left out: -DOCSTART- lines, and in CoNLL-U (ten columns between tabs) comments, ranges of multi-word
tokens (1-2) and empty nodes (1.1). A # in any other file is a word.
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
_NO_WORD = re.compile(r"#|\d+[-.]\d+\t")


def read_conll(path: Path, columns: Mapping[str, int]) -> list[dict[str, Any]]:
    """One row a sentence: for each name in `columns` the list of what stands in that column, counted from 0, or from the
    end where negative. `{"tokens": 0, "tags": -1}` reads most files of named entities. Plain or compressed."""
    lines = list(_lines(path))
    first = next((line for line in lines if line.strip() and not line.startswith(("#", _DOCUMENT))), "")
    separator = re.compile(r"\t" if "\t" in first else "[ \t]+")
    is_conll_u = first.count("\t") == 9
    needed = max(place + 1 if place >= 0 else -place for place in columns.values())
    rows: list[dict[str, Any]] = []
    starts = True
    for number, line in enumerate(lines, 1):
        if not line.strip(" \t"):
            starts = True
            continue
        cells = separator.split(line.strip(" ") if separator.pattern != r"\t" else line)
        if cells[0] == _DOCUMENT or (is_conll_u and _NO_WORD.match(line)):
            continue
        if len(cells) < needed:
            raise DataError(
                f"{path}:{number} has {len(cells)} columns, not {needed} ({line[:60]!r}). Repair it."
            )
        if starts:
            rows.append({name: [] for name in columns})
            starts = False
        for name, place in columns.items():
            rows[-1][name].append(cells[place])
    if not rows:
        raise DataError(f"{path} has no words. Give a file with a word a line.")
    return rows


def _lines(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise DataError(f"{path} is not a file. Check the path.")
    number = 0
    try:
        opened = open_source(Source(path, path.name, path.stat().st_size))
        with opened.raw, opened.stream:
            if opened.format not in ("text", "jsonl"):  # a first word may well be "{"
                raise DataError(f"{path} is a table ({opened.format}), not a column file.")
            for number, line in enumerate(opened.stream, 1):
                yield line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number} has bytes that are not UTF-8 ({error.reason}). Convert it."
        ) from None
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        problem = " ".join(str(error).split())
        raise DataError(f"{path} is cut off or damaged ({problem}). Fetch it again.") from None
