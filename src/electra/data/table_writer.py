"""Tables written as they come, in the format that their name asks for; and files that are whole or absent."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from electra.base.errors import DataError, MachineError
from electra.base.files import sync_folder
from electra.data.tables import stem, table_format


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
    parquet could not tell the type; `schema` has the types of columns that come from a parquet file. The columns are
    those of the first rows written, and one that comes later is refused where the format has no place for it."""

    def __init__(
        self, path: Path, sample: Mapping[str, Any] | None = None, schema: pa.Schema | None = None
    ) -> None:
        self.path, self.sample = path, dict(sample or {})
        self.schema = pa.schema([]) if schema is None else schema
        self.format = table_format(path)
        self.rows = 0
        self.columns: list[str] = []
        self.parquet: pq.ParquetWriter | None = None
        self.stack = ExitStack()

    def write(self, rows: Sequence[dict[str, Any]], answers: Collection[str] = ()) -> None:
        """`answers` are columns of ours, whose numbers have six digits in csv and tsv; others are written exactly."""
        if not rows:
            return
        if self.format in ("csv", "tsv", "parquet"):
            self._check_columns(rows)
        match self.format:
            case "csv" | "tsv":
                self._write_cells(rows, answers)
            case "jsonl":
                lines = (json.dumps(row, ensure_ascii=False, default=str) for row in rows)
                self.file.write("".join(f"{line}\n" for line in lines).encode())
            case "json":
                lines = (json.dumps(row, ensure_ascii=False, default=str) for row in rows)
                self.file.write((",\n" if self.rows else "[\n").encode() + ",\n".join(lines).encode())
            case "parquet":
                self._write_parquet(rows)
        self.rows += len(rows)

    def _check_columns(self, rows: Sequence[dict[str, Any]]) -> None:
        found = dict.fromkeys(name for row in rows for name in row)
        self.columns = self.columns or list(found)
        if late := [name for name in found if name not in self.columns]:
            raise DataError(
                f"{self.path.name}: column {late[0]!r} appears first after row {self.rows}, too late for a "
                f"{self.format} file. Write JSON lines: --out {stem(self.path)}.jsonl."
            )

    def _write_cells(self, rows: Sequence[dict[str, Any]], answers: Collection[str]) -> None:
        buffer = io.StringIO()
        table = [[_cell(row.get(name), name in answers) for name in self.columns] for row in rows]
        if not self.rows:
            table.insert(0, self.columns)
        if self.format == "csv":
            csv.writer(buffer, lineterminator="\n").writerows(table)
        else:
            for cells in table:
                buffer.write("\t".join(re.sub(r"[\t\r\n]", " ", cell) for cell in cells) + "\n")
        self.file.write(buffer.getvalue().encode())

    def _write_parquet(self, rows: Sequence[dict[str, Any]]) -> None:
        try:
            if self.parquet is None:
                fields = [self._field(name, [row.get(name) for row in rows]) for name in self.columns]
                self.parquet = self.stack.enter_context(pq.ParquetWriter(self.file, pa.schema(fields)))
            self.parquet.write_table(pa.Table.from_pylist(list(rows), schema=self.parquet.schema))
        except pa.ArrowException as error:
            problem = " ".join(str(error).split())
            raise DataError(
                f"{self.path.name}: rows {self.rows + 1} to {self.rows + len(rows)} do not fit a parquet file "
                f"({problem}). Write JSON lines: --out {stem(self.path)}.jsonl."
            ) from None

    def _field(self, name: str, values: list[Any]) -> pa.Field:
        if name in self.schema.names:
            return self.schema.field(name)
        found = pa.array([*values, self.sample.get(name)]).type
        return pa.field(name, pa.string() if pa.types.is_null(found) else found)

    def __enter__(self) -> "TableWriter":
        self.file = self.stack.enter_context(whole_file(self.path))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.format == "json":
            self.file.write(b"\n]\n" if self.rows else b"[]\n")
        self.stack.__exit__(kind, error, trace)


def _cell(value: Any, is_answer: bool) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.6g}" if is_answer else repr(float(value))
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
