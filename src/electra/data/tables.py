"""Tables as streams of rows: csv, tsv, JSON lines, a JSON list and parquet, plain or compressed.

What a file holds is told by its content (data/sources.py); only csv and tsv, which look alike, go by the name and then
by the first line. In tsv a tab ends a cell and nothing is quoted, as in the GLUE files; csv is quoted as usual.
"""

import csv
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from electra.base.errors import DataError, SettingsError
from electra.data.files import OpenSource, Source, open_source

Row = Mapping[str, Any]
"""One line of a table: column name -> value."""

Format = Literal["csv", "tsv", "jsonl", "json", "parquet"]
_NAME = re.compile(r"\.(csv|tsv|jsonl|ndjson|json|parquet)(?:\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_BLOCK = 1 << 20


def stem(path: Path) -> str:
    """`train_part.jsonl.zst` -> `train_part`."""
    return _NAME.sub("", path.name)


def is_table(path: Path) -> bool:
    return path.is_file() and bool(_NAME.search(path.name))


def table_format(path: Path) -> Format:
    """What a name asks for."""
    match = _NAME.search(path.name)
    if not match:
        raise SettingsError(
            f"{path.name}: its name does not say what it is. Use .csv, .tsv, .jsonl, .json or .parquet "
            "(then .gz, .bz2, .xz or .zst)."
        )
    kind = match[1].lower()
    return "jsonl" if kind == "ndjson" else kind  # type: ignore[return-value]


@contextmanager
def opened(path: Path) -> Iterator[OpenSource]:
    """A file of examples, unpacked; what goes wrong while it is read is said as a fault of the file."""
    if not path.is_file():
        raise DataError(f"{path} is not a file. Check the path.")
    try:
        source = open_source(Source(path, path.name, path.stat().st_size))
        with source.raw, source.stream:
            yield source
    except UnicodeDecodeError as error:
        raise DataError(f"{path} has bytes that are not UTF-8 ({error.reason}). Convert it.") from None
    except csv.Error as error:
        raise DataError(f"{path} is not valid csv ({error}). Repair it.") from None
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        problem = " ".join(str(error).split())
        raise DataError(f"{path} is cut off or damaged ({problem}). Fetch it again.") from None


def read_rows(
    path: Path, header: Sequence[str] = (), malformed: dict[int, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Rows in the order of the file. Row numbers in messages count from 1, without the header. `header` names the
    columns of csv and tsv files that have no line for it. A row that cannot be read is an error, or, where `malformed`
    is given, described there, and without values here, so that the others keep their numbers."""

    def refuse(number: int, problem: str) -> None:
        if malformed is None:
            raise DataError(f"{path} row {number} {problem}")
        malformed[number] = problem

    with opened(path) as source:
        match content_format(path, source):
            case "csv":
                yield from _cells(path, csv.reader(_text(source), strict=True), header, refuse)
            case "tsv":
                lines = (line.rstrip("\r\n").split("\t") for line in _text(source, newline="\n"))
                yield from _cells(path, lines, header, refuse)
            case "jsonl":
                yield from _json_lines(source, refuse)
            case "json":
                yield from _json_list(path, source, refuse)
            case "parquet":
                with pq.ParquetFile(source.raw, pre_buffer=False) as table:
                    for batch in table.iter_batches(batch_size=1024):
                        yield from batch.to_pylist()


def parquet_schema(path: Path) -> pa.Schema | None:
    """The columns' types, where the file has them."""
    with opened(path) as source:
        if content_format(path, source) != "parquet":
            return None
        with pq.ParquetFile(source.raw, pre_buffer=False) as table:
            return table.schema_arrow


def content_format(path: Path, opened: OpenSource) -> Format:
    head = opened.stream.peek(1 << 16)[: 1 << 16].lstrip()
    match opened.format:
        case "parquet":
            return "parquet"
        case "jsonl" | "text" if head.startswith(b"["):
            return "json"
        case "jsonl":
            return "jsonl"
        case "text":
            if not head:
                raise DataError(f"{path} is empty. Give a table with at least one row.")
            named = _NAME.search(path.name)
            if named and named[1].lower() in ("csv", "tsv"):
                return named[1].lower()  # type: ignore[return-value]
            return "tsv" if b"\t" in head.splitlines()[0] else "csv"
    raise DataError(f"{path} is an arrow file. Give csv, tsv, jsonl, json or parquet.")


def _text(opened: OpenSource, newline: str = "") -> io.TextIOWrapper:
    csv.field_size_limit(sys.maxsize)
    return io.TextIOWrapper(opened.stream, encoding="utf-8", newline=newline)


Refuse = Callable[[int, str], None]


def _cells(
    path: Path, lines: Iterable[list[str]], header: Sequence[str], refuse: Refuse
) -> Iterator[dict[str, Any]]:
    """The first line is a header unless it has as many cells as the known one and none of its names."""
    rows = iter(lines)
    names = next(rows, [])
    if len(names) == len(header) and not set(names) & set(header):
        names, rows = list(header), chain([names], rows)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path} has two columns {twice!r}. Name them differently.")
    blank = ([], [""]) if len(names) > 1 else ([],)  # of one column an empty cell is a row like any other
    for number, cells in enumerate((row for row in rows if row not in blank), 1):
        if len(cells) == len(names):
            yield dict(zip(names, cells, strict=True))
        else:
            refuse(number, f"has {len(cells)} cells, the header {len(names)}. Repair it or its quotes.")
            yield dict.fromkeys(names)


def _json_lines(opened: OpenSource, refuse: Refuse) -> Iterator[dict[str, Any]]:
    for number, line in enumerate((line for line in opened.stream if line.strip()), 1):
        try:
            yield _mapping(number, json.loads(line), refuse)
        except (json.JSONDecodeError, RecursionError) as error:
            refuse(number, f"is not valid JSON ({error}). Repair it.")
            yield {}


def _json_list(path: Path, opened: OpenSource, refuse: Refuse) -> Iterator[dict[str, Any]]:
    """One item after the other: a list of any length is never in memory as a whole."""
    text = io.TextIOWrapper(opened.stream, encoding="utf-8")
    decoder, buffer, number = json.JSONDecoder(), text.read(_BLOCK).lstrip()[1:], 0
    while True:
        buffer = buffer.lstrip(" \t\r\n,")
        if buffer.startswith("]"):
            return
        try:
            row, end = decoder.raw_decode(buffer)
        except ValueError as error:
            block = text.read(_BLOCK)
            if not block:
                raise DataError(f"{path} row {number + 1} is not valid JSON ({error}). Repair it.") from None
            buffer += block
            continue
        number += 1
        yield _mapping(number, row, refuse)
        buffer = buffer[end:]


def _mapping(number: int, row: Any, refuse: Refuse) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    refuse(number, f"is {type(row).__name__}, not an object with columns.")
    return {}
