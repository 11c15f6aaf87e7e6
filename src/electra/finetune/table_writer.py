"""Tables written as they come, in the format that their name asks for; and files that are whole or absent."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from electra.errors import MachineError
from electra.files import sync_folder
from electra.finetune.table import table_format


@contextmanager
def whole_file(path: Path) -> Iterator[Any]:
    """A stream of bytes, compressed as the name says; the file gets its name when the last byte is on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _compressed(temporary, path.suffix)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror}. Choose another place.") from None
    try:
        with file:
            yield file
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


class TableWriter:
    """Writes rows as they come. `sample` has an example of columns whose first values may all be empty lists, of which
    parquet could not tell the type."""

    def __init__(self, path: Path, sample: Mapping[str, Any] | None = None) -> None:
        self.path, self.sample = path, dict(sample or {})
        self.format = table_format(path)
        self.rows = 0
        self.columns: list[str] = []
        self.parquet: pq.ParquetWriter | None = None
        self.stack = ExitStack()

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
            seen = pa.Table.from_pylist([*rows, {**rows[0], **self.sample}]).schema
            fields = [f.with_type(pa.string()) if pa.types.is_null(f.type) else f for f in seen]
            self.parquet = self.stack.enter_context(pq.ParquetWriter(self.file, pa.schema(fields)))
        self.parquet.write_table(pa.Table.from_pylist(list(rows), schema=self.parquet.schema))

    def __enter__(self) -> "TableWriter":
        self.file = self.stack.enter_context(whole_file(self.path))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.format == "json":
            self.file.write(b"\n]\n" if self.rows else b"[]\n")
        self.stack.__exit__(kind, error, trace)


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.6g}"
        case list() | dict():
            return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _compressed(path: Path, ending: str) -> Any:
    match ending.lower():
        case ".gz":
            return gzip.open(path, "wb")
        case ".bz2":
            return bz2.open(path, "wb")
        case ".xz":
            return lzma.open(path, "wb")
        case ".zst":
            return pa.CompressedOutputStream(str(path), "zstd")
    return path.open("wb")
