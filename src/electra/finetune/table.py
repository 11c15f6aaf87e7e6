"""Tables as streams of rows: csv, tsv, JSON lines, a JSON list and parquet, plain or compressed, read and written.

What a file holds is told by its content (data/sources.py); only csv and tsv, which look alike, go by the name and then
by the first line. In tsv a tab ends a cell and nothing is quoted, as in the GLUE files; csv is quoted as usual.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from electra.data.sources import OpenSource, Source, open_source
from electra.errors import DataError, MachineError, SettingsError
from electra.files import sync_folder

Format = Literal["csv", "tsv", "jsonl", "json", "parquet"]
_NAME = re.compile(r"\.(csv|tsv|jsonl|ndjson|json|parquet)(?:\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_BLOCK = 1 << 20


def stem(path: Path) -> str:
    """`train_part.jsonl.zst` -> `train_part`."""
    return _NAME.sub("", path.name)


def is_table(path: Path) -> bool:
    return path.is_file() and bool(_NAME.search(path.name))


def table_format(path: Path) -> tuple[Format, str]:
    """The format and the compression that a name asks for."""
    match = _NAME.search(path.name)
    if not match:
        raise SettingsError(
            f"{path.name}: its name does not say what it is. Use .csv, .tsv, .jsonl, .json or .parquet "
            "(then .gz, .bz2, .xz or .zst)."
        )
    kind = match[1].lower()
    return "jsonl" if kind == "ndjson" else kind, (match[2] or "").lower()  # type: ignore[return-value]


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows in the order of the file. Row numbers in messages count from 1, without the header."""
    if not path.is_file():
        raise DataError(f"{path} is not a file. Check the path.")
    try:
        opened = open_source(Source(path, path.name, path.stat().st_size))
        with opened.raw, opened.stream:
            match content_format(path, opened):
                case "csv":
                    yield from _cells(path, csv.reader(_text(opened), strict=True))
                case "tsv":
                    yield from _cells(
                        path, (line.rstrip("\r\n").split("\t") for line in _text(opened, newline="\n"))
                    )
                case "jsonl":
                    yield from _json_lines(path, opened)
                case "json":
                    yield from _json_list(path, opened)
                case "parquet":
                    with pq.ParquetFile(opened.raw, pre_buffer=False) as table:
                        for batch in table.iter_batches(batch_size=1024):
                            yield from batch.to_pylist()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} has bytes that are not UTF-8 ({error.reason}). Convert it.") from None
    except csv.Error as error:
        raise DataError(f"{path} is not valid csv ({error}). Repair it.") from None
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        problem = " ".join(str(error).split())
        raise DataError(f"{path} is cut off or damaged ({problem}). Fetch it again.") from None


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


def _cells(path: Path, lines: Iterable[list[str]]) -> Iterator[dict[str, Any]]:
    rows = iter(lines)
    header = next(rows, [])
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise DataError(f"{path} has two columns {twice!r}. Name them differently.")
    for number, cells in enumerate((row for row in rows if row not in ([], [""])), 1):
        if len(cells) != len(header):
            raise DataError(
                f"{path} row {number} has {len(cells)} cells, the header {len(header)}. Repair it or its quotes."
            )
        yield dict(zip(header, cells, strict=True))


def _json_lines(path: Path, opened: OpenSource) -> Iterator[dict[str, Any]]:
    number = 0
    for line in opened.stream:
        if line.strip():
            number += 1
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path} row {number} is not valid JSON ({error}). Repair it.") from None
            yield _mapping(path, number, row)


def _json_list(path: Path, opened: OpenSource) -> Iterator[dict[str, Any]]:
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
        yield _mapping(path, number, row)
        buffer = buffer[end:]


def _mapping(path: Path, number: int, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{path} row {number} is {type(row).__name__}, not an object with columns.")
    return row


class TableWriter:
    """Writes rows as they come; the file gets its name when the last row is on the disk."""

    def __init__(self, path: Path, format: Format | None = None) -> None:
        named, compression = table_format(path)
        self.path, self.format = path, format or named
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self.rows = 0
        self.columns: list[str] = []
        self.parquet: pq.ParquetWriter | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file: Any = _compressed(self.temporary, compression)
        except OSError as error:
            raise MachineError(f"{path} cannot be written: {error.strerror}.") from None

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        if not rows:
            return
        match self.format:
            case "csv" | "tsv":
                self._write_cells(rows)
            case "jsonl":
                lines = (json.dumps(row, ensure_ascii=False, default=str) for row in rows)
                self.file.write("".join(f"{line}\n" for line in lines).encode())
            case "json":
                lines = (json.dumps(row, ensure_ascii=False, default=str) for row in rows)
                self.file.write((",\n" if self.rows else "[\n").encode() + ",\n".join(lines).encode())
            case "parquet":
                self._write_parquet(rows)
        self.rows += len(rows)

    def _write_cells(self, rows: Sequence[dict[str, Any]]) -> None:
        buffer = io.StringIO()
        if not self.columns:
            self.columns = list(rows[0])
            rows = [{name: name for name in self.columns}, *rows]
        if self.format == "csv":
            writer = csv.writer(buffer, lineterminator="\n")
            writer.writerows([_cell(row.get(name)) for name in self.columns] for row in rows)
        else:
            for row in rows:
                cells = (re.sub(r"[\t\r\n]", " ", _cell(row.get(name))) for name in self.columns)
                buffer.write("\t".join(cells) + "\n")
        self.file.write(buffer.getvalue().encode())

    def _write_parquet(self, rows: Sequence[dict[str, Any]]) -> None:
        if self.parquet is None:
            schema = pa.Table.from_pylist(list(rows)).schema
            fields = [f.with_type(pa.string()) if pa.types.is_null(f.type) else f for f in schema]
            self.parquet = pq.ParquetWriter(self.file, pa.schema(fields))
        self.parquet.write_table(pa.Table.from_pylist(list(rows), schema=self.parquet.schema))

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.format == "json":
            self.file.write(b"\n]\n" if self.rows else b"[]\n")
        if self.parquet is not None:
            self.parquet.close()
        self.file.close()
        if kind is None:
            self.temporary.replace(self.path)
            sync_folder(self.path.parent)
        else:
            self.temporary.unlink(missing_ok=True)


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.6g}"
        case list() | dict():
            return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _compressed(path: Path, compression: str) -> Any:
    match compression:
        case "gz":
            return gzip.open(path, "wb")
        case "bz2":
            return bz2.open(path, "wb")
        case "xz":
            return lzma.open(path, "wb")
        case "zst":
            return pa.CompressedOutputStream(str(path), "zstd")
    return path.open("wb")
