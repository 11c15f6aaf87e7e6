"""Files and folders as open streams. What a file holds is recognised by its first bytes, never by its name alone:
names lie, and a text reader let loose on a gzip file trains a model on noise.
"""

import bz2
import gzip
import io
import json
import lzma
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import pyarrow as pa

from electra.base.errors import DataError, MachineError

Format = Literal["text", "jsonl", "parquet", "arrow-file", "arrow-stream"]

# What `datasets` writes beside its tables.
_DATASETS_NOTES = {"state.json", "dataset_info.json", "dataset_dict.json"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Source(NamedTuple):
    path: Path
    name: str  # relative to the input it was found under: stays the same when the corpus moves
    size: int


class OpenSource(NamedTuple):
    raw: BinaryIO  # the bytes on disk; its position is the progress
    stream: io.BufferedReader  # the same, decompressed
    format: Format
    start: int  # bytes of the stream already taken (a byte order mark)


def find_sources(inputs: Sequence[Path]) -> list[Source]:
    """Every readable file of the inputs, in the order given and then by name."""
    sources: list[Source] = []
    for path in inputs:
        if path.is_dir():
            found = [
                Source(file, str(file.relative_to(path)), file.stat().st_size) for file in _walk(path, set())
            ]
            if not found:
                raise DataError(
                    f"{path} has no file to read. Give a folder of .txt, .jsonl, .parquet or .arrow files."
                )
            sources += found
        elif not path.exists():
            raise DataError(f"{path} does not exist. Check the path.")
        elif not path.is_file():
            raise DataError(f"{path} is a pipe, socket or device. Write its text to a file first.")
        else:
            sources.append(Source(path, path.name, path.stat().st_size))
    return sources


def _walk(folder: Path, visited: set[tuple[int, int]]) -> Iterator[Path]:
    """Regular files below a folder, hidden ones left out; a folder reached twice (a loop of links) is read once."""
    try:
        status = folder.stat()
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise MachineError(f"{folder} cannot be read: {error.strerror}.") from None
    if (status.st_dev, status.st_ino) in visited:
        return
    visited.add((status.st_dev, status.st_ino))
    if tables := _datasets_tables(folder):
        yield from tables
        return
    for entry in entries:
        try:
            mode = entry.stat().st_mode
        except OSError:  # a link that leads nowhere or round in a circle
            continue
        if entry.name.startswith(".") or entry.name in _DATASETS_NOTES:
            continue
        if stat.S_ISDIR(mode):
            yield from _walk(entry, visited)
        elif stat.S_ISREG(mode):
            yield entry


def _datasets_tables(folder: Path) -> list[Path]:
    """The Arrow files of a folder written by `datasets`' save_to_disk, in their order."""
    state = folder / "state.json"
    try:
        listed = json.loads(state.read_text("utf-8"))["_data_files"]
        tables = [folder / Path(entry["filename"]).name for entry in listed]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    for table in tables:
        if not table.is_file():
            raise DataError(f"{state} lists {table.name}, which is missing. Save the dataset again.")
    return tables


def open_source(source: Source) -> OpenSource:
    try:
        raw: BinaryIO = source.path.open("rb")
    except OSError as error:
        raise MachineError(f"{source.path} cannot be read: {error.strerror}.") from None
    stream = _decompressed(raw)
    head = stream.peek(4096)
    start = len(_BYTE_ORDER_MARK) if head.startswith(_BYTE_ORDER_MARK) else 0
    stream.read(start)
    return OpenSource(raw, stream, _format(head[start:], source, stream.raw is raw), start)


def _decompressed(raw: BinaryIO) -> io.BufferedReader:
    magic = raw.read(6)
    raw.seek(0)
    match magic:
        case _ if magic.startswith(b"\x1f\x8b"):
            unpacked: Any = gzip.GzipFile(fileobj=raw)
        case _ if magic.startswith(b"BZh"):
            unpacked = bz2.open(raw)  # noqa: SIM115
        case _ if magic.startswith(b"\xfd7zXZ\x00"):
            unpacked = lzma.open(raw)  # noqa: SIM115
        case _ if magic.startswith(b"\x28\xb5\x2f\xfd") or re.match(rb"[\x50-\x5f]\x2a\x4d\x18", magic):
            unpacked = pa.CompressedInputStream(raw, "zstd")
        case _:
            unpacked = raw
    return io.BufferedReader(unpacked, 1 << 20)


def _format(head: bytes, source: Source, seekable: bool) -> Format:
    if head.startswith((b"PAR1", b"ARROW1\x00\x00")):
        if not seekable:
            raise DataError(f"{source.path} is a table inside an archive. Unpack it first.")
        return "parquet" if head.startswith(b"PAR1") else "arrow-file"
    if head.startswith(b"\xff\xff\xff\xff"):
        return "arrow-stream"
    # A broken first line must not turn JSON lines into prose, so here the name has a say as well.
    named_json = re.search(r"\.(jsonl|ndjson|json)(\.\w+)?$", source.name)
    return "jsonl" if head.lstrip().startswith(b"{") or (named_json and head.strip()) else "text"
