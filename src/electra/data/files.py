"""Files of text and tables as open streams, plain or compressed. A file's format is recognised by its first bytes,
never by its name alone: names lie, and reading a gzip file as text would train a model on noise.

pyarrow is imported only where it is needed: importing it costs every worker of `prepare` a quarter of a second.
"""

import bz2
import gzip
import io
import logging
import lzma
import re
import shlex
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from electra.base.errors import DataError, counted
from electra.base.files import parse_json, read_bytes, remove_leftovers, replacing, unreadable, writing
from electra.base.remote import Place, RemotePath

if TYPE_CHECKING:
    import pyarrow.parquet as pq

log = logging.getLogger(__name__)
Format = Literal["text", "jsonl", "parquet", "arrow-file", "arrow-stream"]

# Files that `datasets` writes beside its tables.
_DATASETS_NOTES = {"state.json", "dataset_info.json", "dataset_dict.json"}
_TWICE = "%s is read more than once%s, by its own name, a folder or a link, and its text counts each time. Give it once, unless this is intended."
LONGEST_LINE = 1 << 28
STANDARD_INPUT = Path("-")
LONGEST_SEARCH = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NOT_UTF8 = "has bytes that are not UTF-8"
NUL = "has a NUL character. If it is UTF-16, convert it; else repair it"


class Source(NamedTuple):
    path: Place
    name: str  # relative to the input it was found under: stays the same when the corpus moves
    size: int
    stamp: str  # changes with the content: the modification time, or a remote store's equivalent

    def has_changed(self) -> bool:
        try:
            return status(self.path) != (self.size, self.stamp)
        except OSError:
            return True


class Section(NamedTuple):
    """A byte range of a file: the whole or, if the file is divided every `step` bytes, one whose documents `section_bounds` finds."""

    source: Source
    begin: int
    end: int
    step: int = 0

    @property
    def whole(self) -> bool:
        return self.end - self.begin == self.source.size


class OpenSource(NamedTuple):
    path: Place
    raw: io.BufferedReader  # the bytes on disk; its position is the progress
    stream: io.BufferedReader  # the same, decompressed
    format: Format
    start: int  # bytes before the stream: a byte order mark, other sections
    is_compressed: bool


def status(path: Place) -> tuple[int, str]:
    """A file's size and stamp."""
    if isinstance(path, RemotePath):
        return path.status()
    info = path.stat()
    return info.st_size, str(info.st_mtime_ns)


def find_sources(inputs: Sequence[Place]) -> list[Source]:
    """Every readable file of the inputs, in the order given and then by name."""
    sources: list[Source] = []
    for path in inputs:
        if isinstance(path, RemotePath):
            sources += _remote_sources(path)
        elif path.is_dir():
            files = list(_walk(path, set()))
            if not files:
                raise DataError(f"{path} has no file to read. Give a folder of .txt, .jsonl, .parquet or .arrow files.")
            if (path / "dataset_dict.json").is_file():
                splits = ", ".join(dict.fromkeys(file.relative_to(path).parts[0] for file in files))
                log.info("%s: reading all of its splits (%s). To read only one, give its folder.", path, splits)
            sources += [Source(file, str(file.relative_to(path)), *status(file)) for file in files]
        elif not path.exists():
            raise DataError(f"{path} does not exist. Check the path.")
        elif not path.is_file():
            raise DataError(f"{path} is a pipe, socket or device. Write its text to a file first.")
        else:
            sources.append(Source(path, path.name, *status(path)))
    if twice := [path for path, count in Counter(source.path.resolve() for source in sources).items() if count > 1]:
        log.warning(_TWICE, twice[0], f" (and {counted(len(twice) - 1, 'more file')})" if twice[1:] else "")
    return sources


def _remote_sources(folder: RemotePath) -> list[Source]:
    if folder.is_file():
        return [Source(folder, folder.name, *folder.status())]
    start = len(str(folder).rstrip("/")) + 1
    named = [(str(file)[start:], file, size, stamp) for file, size, stamp in folder.files()]
    sources = [Source(file, name, size, stamp) for name, file, size, stamp in named if not _is_hidden(name)]
    if not sources:
        raise DataError(f"{folder} does not exist or has no file to read. Check the address.")
    return sources


def _is_hidden(name: str) -> bool:
    parts = name.split("/")
    return any(part.startswith(".") for part in parts) or parts[-1] in _DATASETS_NOTES


def _walk(folder: Path, visited: set[Path]) -> Iterator[Path]:
    """Regular files below a folder, hidden ones left out; a folder reached twice (a loop of links) is read once."""
    try:
        place = folder.resolve()
        entries = [(entry, entry.is_dir()) for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)]
    except OSError as error:
        raise unreadable(folder, error) from None
    if place in visited:
        return
    visited.add(place)
    tables = _datasets_tables(folder)
    yield from tables
    for entry, is_folder in [] if tables else entries:
        if _is_hidden(entry.name):
            continue
        if is_folder:
            yield from _walk(entry, visited)
        elif entry.is_file():
            yield entry


def _datasets_tables(folder: Path) -> list[Path]:
    """The Arrow files of a folder written by `datasets`' save_to_disk, in their order."""
    state = folder / "state.json"
    try:
        listed = parse_json(read_bytes(state))["_data_files"]
        tables = [folder / Path(entry["filename"]).name for entry in listed]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    for table in tables:
        if not table.is_file():
            raise DataError(f"{state} lists {table.name}, which is missing. Save the dataset again.")
    return tables


@contextmanager
def opened(path: Place, begin: int = 0, end: int | None = None) -> Iterator[OpenSource]:
    """Opens a file for reading; errors while it is read are reported as faults of the file. "-" is standard input. `begin` and
    `end` are for uncompressed files only; the format is always that of the file's first bytes."""
    try:
        raw = io.BufferedReader(sys.stdin.buffer) if path == STANDARD_INPUT else path.open("rb")  # type: ignore[arg-type,type-var]
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        with raw, _decompressed(raw) as stream:
            head = stream.peek(4096)
            start = len(_BYTE_ORDER_MARK) if head.startswith(_BYTE_ORDER_MARK) else 0
            stream.read(start)
            is_compressed = stream.raw is not raw
            form = _format(head[start:], path, not is_compressed and raw.seekable())
            if begin or end is not None:
                start = max(begin, start)
                stream = io.BufferedReader(_Bytes(raw, start, end), 1 << 20)
            yield OpenSource(path, raw, stream, form, start, is_compressed)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} {NOT_UTF8} ({error.reason}). {conversion(path)}.") from None
    except _damage() as error:
        problem = " ".join(str(error).split())
        raise DataError(f"{path} is cut off or damaged ({problem}). Fetch it again.") from None


class _Bytes(io.RawIOBase):
    """A byte range of a file as a stream of its own."""

    def __init__(self, raw: io.BufferedReader, begin: int, end: int | None) -> None:
        raw.seek(begin)
        self.raw, self.left = raw, 1 << 62 if end is None else max(0, end - begin)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.raw.read(min(len(buffer), self.left))
        buffer[: len(data)] = data
        self.left -= len(data)
        return len(data)


def document_start(raw: io.BufferedReader, position: int, separator: re.Pattern[bytes]) -> int | None:
    """The first start of a document after `position`. It depends only on the bytes after `position`, so the readers of the
    sections before and after it agree. None if there is none within LONGEST_SEARCH bytes: the file is not cut here."""
    for size in (1 << 16, LONGEST_SEARCH):
        raw.seek(position)
        if match := separator.search(raw.read(size)):
            return position + match.end()
    return None


def section_bounds(section: Section, separator: re.Pattern[bytes]) -> tuple[int, int]:
    """The byte offsets where the documents of a section begin and end. A section without a cut at its beginning is empty, and
    its documents belong to the section before."""
    source, begin, end, step = section
    with source.path.open("rb") as raw:
        first = document_start(raw, begin, separator) if begin else 0
        if first is None:
            return end, end
        cuts = (document_start(raw, position, separator) for position in range(end, source.size, step))
        return first, next((cut for cut in cuts if cut is not None), source.size)


def _damage() -> tuple[type[Exception], ...]:
    """The exceptions of damaged files. Called only when something was raised, so that pyarrow is rarely imported."""
    import pyarrow as pa

    return EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException


def _decompressed(raw: io.BufferedReader) -> io.BufferedReader:
    magic = raw.peek(6)[:6]
    unpacked: Any = raw
    if magic.startswith(b"\x1f\x8b"):
        unpacked = gzip.open(raw)  # noqa: SIM115
    elif magic.startswith(b"BZh"):
        unpacked = bz2.open(raw)  # noqa: SIM115
    elif magic.startswith(b"\xfd7zXZ\x00"):
        unpacked = lzma.open(raw)  # noqa: SIM115
    elif magic.startswith(b"\x28\xb5\x2f\xfd") or re.match(rb"[\x50-\x5f]\x2a\x4d\x18", magic):
        import pyarrow as pa

        unpacked = pa.CompressedInputStream(raw, "zstd")
    return io.BufferedReader(unpacked, 1 << 20)


def _format(head: bytes, path: Place, seekable: bool) -> Format:
    if head.startswith((b"PAR1", b"ARROW1\x00\x00")):
        if not seekable:
            raise DataError(f"{path} is a table inside an archive or a pipe. Unpack it first.")
        return "parquet" if head.startswith(b"PAR1") else "arrow-file"
    if head.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise DataError(
            f"{path} is a zip archive, a spreadsheet or a document. Unpack it, or save it as csv (UTF-8) or as text."
        )
    if head.startswith(b"\xff\xff\xff\xff"):
        return "arrow-stream"
    # a broken first line must not turn JSON lines into plain text, so the name counts as well
    named_json = re.search(r"\.(jsonl|ndjson|json)(\.\w+)?$", path.name)
    return "jsonl" if head.lstrip().startswith(b"{") or (named_json and head.strip()) else "text"


def bad_bytes(path: Place, problem: str, offset: int, around: bytes, remedy: str) -> DataError:
    return DataError(
        f"{path} has {problem} at byte {offset}. {conversion(path, around) if is_utf16(around) else remedy}."
    )


def is_utf16(around: bytes) -> bool:
    return around.startswith((b"\xff\xfe", b"\xfe\xff")) or around.count(0) > len(around) // 4


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, which is how Python keeps bytes that are not UTF-8."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def conversion(path: Place, around: bytes = b"") -> str:
    """The remedy for bytes that are not UTF-8: mostly they were written by Windows and its spreadsheets in western Europe."""
    name, new = shlex.quote(str(path)), shlex.quote(f"utf8-{path.name}")
    if is_utf16(around):
        return f'It looks like UTF-16: convert it with "iconv -f UTF-16 -t UTF-8 {name}"'
    return f'Convert it; if it is from Windows (cp1252, latin-1) with "iconv -f CP1252 -t UTF-8 {name} > {new}"'


class SourceLine(NamedTuple):
    """The place of a line, for messages: its number in the whole file is counted only when the message is formatted."""

    source: OpenSource
    number: int

    def __str__(self) -> str:
        before, left = 0, self.source.start
        if left <= len(_BYTE_ORDER_MARK):  # no sections before it; standard input could not be opened again
            return f"{self.source.path}:{self.number}"
        with self.source.path.open("rb") as raw:
            while left and (block := raw.read(min(left, 1 << 20))):
                before, left = before + block.count(b"\n"), left - len(block)
        return f"{self.source.path}:{before + self.number}"


def bounded_lines(source: OpenSource) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers. Lines longer than LONGEST_LINE are refused, before an endless one fills the memory."""
    number = 0
    while line := source.stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            limit = f"{LONGEST_LINE >> 20} MiB"
            raise DataError(f"{SourceLine(source, number)} is longer than {limit}. Split it into several lines.")
        yield number, line


def decoded_lines(source: OpenSource) -> Iterator[tuple[int, str]]:
    """Lines as text, without line ends, with their numbers."""
    for number, line in bounded_lines(source):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            where = f"{SourceLine(source, number)} {NOT_UTF8} ({error.reason})"
            raise DataError(f"{where}. {conversion(source.path)}.") from None
        if "\0" in text:
            raise DataError(f"{SourceLine(source, number)} {NUL}.")
        yield number, text


def json_lines(
    source: OpenSource, errors: str, remedy: str, lone_surrogates: bool = False
) -> Iterator[tuple[int, dict[str, Any], str]]:
    """(line number, row, problem) of every line that is not blank; the row is empty if there is a problem. `errors` says
    what to do with bytes that are not UTF-8, as in `bytes.decode`; `lone_surrogates` says whether texts may contain them."""
    offset = source.start
    for number, line in bounded_lines(source):
        if line.strip():
            try:
                row, problem = parse_json(line.decode("utf-8", errors), lone_surrogates), ""
                if not isinstance(row, dict):
                    row, problem = {}, f"is {type(row).__name__}, not a JSON object"
            except UnicodeDecodeError as error:
                where = offset + error.start
                raise bad_bytes(source.path, "bytes that are not UTF-8", where, line, remedy) from None
            except ValueError as error:
                row, problem = {}, f"is not valid JSON ({error})"
            yield number, row, problem
        offset += len(line)


def open_parquet(source: OpenSource) -> "pq.ParquetFile":
    import pyarrow.parquet as pq

    table = pq.ParquetFile(source.raw, pre_buffer=False)
    refuse_twice(source.path, table.schema_arrow.names)
    return table


def refuse_twice(path: Place, names: Sequence[str]) -> None:
    """Raises an error if two columns have the same name: readers differ in which one they take."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{path} has two columns {twice[0]!r}. Name them differently.")


@contextmanager
def whole_file(path: Path) -> Iterator[Any]:
    """A stream for writing bytes, compressed as the name says. The file gets its name only when the last byte is on disk."""
    path = path.resolve() if path.is_symlink() else path
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, path.name)
    with replacing(path) as temporary, _compressed(temporary, path.suffix) as file:
        yield file


def _compressed(path: Path, ending: str) -> Any:
    if ending.lower() == ".zst":
        import pyarrow as pa

        return pa.CompressedOutputStream(str(path), "zstd")
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return openers.get(ending.lower(), Path.open)(path, "wb")
