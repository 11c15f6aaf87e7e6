"""Documents from files and folders, as one stream in bounded memory.

A document is text whose lines end with LF. CRLF is LF, a byte order mark is dropped, and every other line separator
(lone CR, form feed, U+0085, U+2028 …) is a space inside its line, so that the same text gives the same shards whatever
system wrote it. What cannot be used is never passed over in silence: `on_bad` says whether to stop, skip or replace.
"""

import codecs
import json
import lzma
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from electra.base.config import Settings
from electra.base.errors import DataError
from electra.data.files import OpenSource, Source, find_sources, open_source
from electra.data.text import cut_at_whitespace, unify_lines

# A longer document is cut: an encoder needs about 150 times the memory of the text that it is given at once.
LONGEST_DOCUMENT = 1 << 20
LONGEST_JSON_LINE = 1 << 28
_BLOCK = 1 << 20
_BLANK_LINE = re.compile(r"\n(?:[^\S\n]*\n)+")
_SPACES = re.compile(r"\s*")
_BAD = re.compile("[\x00\ud800-\udfff]+")
_REMEDY = "Repair it, or use --on-bad skip or --on-bad replace"


class CorpusSettings(Settings):
    """How documents are found in files. `documents` is about plain text only: tables and JSON lines have rows.
    With `on_bad` "replace", characters become U+FFFD; a row that is no text at all cannot be replaced and is skipped."""

    text_key: str = "text"
    documents: Literal["blank-line", "file", "line"] = "blank-line"
    on_bad: Literal["stop", "skip", "replace"] = "stop"


class Document(NamedTuple):
    text: str
    continues: bool = False  # a further piece of the document before it, which was too long for one


@dataclass
class Reading:
    """What one pass over a corpus has seen so far."""

    documents: int = 0
    skipped: int = 0
    replaced: int = 0
    empty_files: int = 0
    finished_bytes: int = 0
    position: Callable[[], int] = field(default=lambda: 0, repr=False)

    @property
    def bytes_read(self) -> int:
        return self.finished_bytes + self.position()


class Corpus:
    """The documents of files and folders. `read` gives them from the start, as often as it is called."""

    def __init__(self, inputs: Sequence[Path], settings: CorpusSettings | None = None) -> None:
        self.inputs = tuple(inputs)
        self.settings = settings or CorpusSettings()
        self.sources = find_sources(inputs)
        self.size = sum(source.size for source in self.sources)

    def read(self, reading: Reading | None = None) -> Iterator[Document]:
        reading = reading or Reading()
        for source in self.sources:
            before = reading.documents + reading.skipped
            yield from _Reader(source, self.settings, reading).documents()
            reading.empty_files += reading.documents + reading.skipped == before
        if not reading.documents:
            names = ", ".join(str(path) for path in self.inputs[:3]) + (", …" if len(self.inputs) > 3 else "")
            if reading.skipped:
                raise DataError(
                    f"{names}: nothing left, all {reading.skipped} documents were skipped as unusable."
                )
            raise DataError(
                f"{names}: no text, every file is empty or only whitespace. Give files with text."
            )


class _Reader:
    def __init__(self, source: Source, settings: CorpusSettings, reading: Reading) -> None:
        self.source, self.settings, self.reading = source, settings, reading
        self.stop = settings.on_bad == "stop"

    def documents(self) -> Iterator[Document]:
        path = self.source.path
        try:
            opened = open_source(self.source)
            with opened.raw, opened.stream:
                self.reading.position = opened.raw.tell
                match opened.format:
                    case "text":
                        yield from self._text(opened)
                    case "jsonl":
                        yield from self._json_lines(opened)
                    case "parquet":
                        yield from self._parquet(opened)
                    case "arrow-file":
                        table = pa.ipc.open_file(opened.raw)
                        batches = (table.get_batch(index) for index in range(table.num_record_batches))
                        yield from self._table(table.schema, batches)
                    case "arrow-stream":
                        table = pa.ipc.open_stream(opened.stream)
                        yield from self._table(table.schema, table)
        except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
            raise DataError(
                f"{path} is cut off or damaged ({' '.join(str(error).split())}). Fetch it again."
            ) from None
        finally:
            self.reading.position = lambda: 0
            self.reading.finished_bytes += self.source.size

    def _text(self, opened: OpenSource) -> Iterator[Document]:
        """Documents of plain text. What was read but not yet given out is never longer than a document and a block."""
        rest, continues = "", False
        for block in self._blocks(opened):
            rest += block
            match self.settings.documents:
                case "blank-line":
                    *complete, rest = _BLANK_LINE.split(rest)
                case "line":
                    *complete, rest = rest.split("\n")
                case "file":
                    complete = []
            for text in complete:
                yield from self._pieces(text, continues)
                continues = False
            if not continues:
                rest = rest.lstrip()
            # Trailing blanks may turn out to end the document, and then they do not count towards its length.
            while len(rest.rstrip()) > LONGEST_DOCUMENT:
                cut = cut_at_whitespace(rest, 0, LONGEST_DOCUMENT)
                continues = yield from self._pieces(rest[:cut], continues)
                rest = rest[cut:].lstrip()
        yield from self._pieces(rest, continues)

    def _blocks(self, opened: OpenSource) -> Iterator[str]:
        """Decoded blocks. Bad bytes stop at once with their offset, or stay as lone surrogates for `_clean` to find."""
        decoder = codecs.getincrementaldecoder("utf-8")("strict" if self.stop else "surrogateescape")
        offset, carriage_return = opened.start, ""
        while True:
            block = opened.stream.read(_BLOCK)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                self._refuse_bytes(
                    "bytes that are not UTF-8", offset + len(block) - len(error.object) + error.start, block
                )
            if self.stop and b"\0" in block:
                self._refuse_bytes("a NUL byte", offset + block.index(b"\0"), block)
            offset += len(block)
            text = carriage_return + text
            carriage_return = "\r" if text.endswith("\r") and block else ""
            yield unify_lines(text.removesuffix(carriage_return))
            if not block:
                return

    def _refuse_bytes(self, what: str, offset: int, around: bytes) -> NoReturn:
        path, remedy = self.source.path, _REMEDY
        if around.startswith((b"\xff\xfe", b"\xfe\xff")) or around.count(0) > len(around) // 4:
            remedy = f'It looks like UTF-16: convert it with "iconv -f UTF-16 -t UTF-8 {path.name}"'
        raise DataError(f"{path} has {what} at byte {offset}. {remedy}.")

    def _json_lines(self, opened: OpenSource) -> Iterator[Document]:
        number, offset = 0, opened.start
        while line := opened.stream.readline(LONGEST_JSON_LINE + 1):
            number += 1
            where = f"{self.source.path}:{number}"
            if len(line) > LONGEST_JSON_LINE:
                raise DataError(
                    f"{where} is longer than {LONGEST_JSON_LINE >> 20} MiB. Split it into several lines."
                )
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8", "surrogateescape" if not self.stop else "strict"))
                    problem = None if isinstance(row, dict) else f"is {type(row).__name__}, not a JSON object"
                except UnicodeDecodeError as error:
                    self._refuse_bytes("bytes that are not UTF-8", offset + error.start, line)
                except (ValueError, RecursionError) as error:
                    problem = f"is not valid JSON ({error})"
                if problem is None and self.settings.text_key not in row:
                    problem = f"has no key {self.settings.text_key!r} (it has {', '.join(map(repr, row))})"
                yield from self._row(where, None if problem else row[self.settings.text_key], problem)
            offset += len(line)

    def _parquet(self, opened: OpenSource) -> Iterator[Document]:
        with pq.ParquetFile(opened.raw, pre_buffer=False) as table:
            total = max(1, table.metadata.num_rows)
            first = self.reading.documents + self.reading.skipped
            self.reading.position = lambda: (
                min(total, self.reading.documents + self.reading.skipped - first) * self.source.size // total
            )
            self._check_column(table.schema_arrow)
            columns = [self.settings.text_key]
            yield from self._table(table.schema_arrow, table.iter_batches(batch_size=256, columns=columns))

    def _table(self, schema: Any, batches: Any) -> Iterator[Document]:
        self._check_column(schema)
        number = 0
        for batch in batches:
            # As bytes: Arrow does not check that its strings are UTF-8.
            for value in batch.column(self.settings.text_key).cast(pa.large_binary()):
                number += 1
                where = f"{self.source.path} row {number}"
                text, problem = value.as_py(), None
                if text is not None:
                    try:
                        text = text.decode("utf-8", "surrogateescape" if not self.stop else "strict")
                    except UnicodeDecodeError as error:
                        problem = f"has bytes that are not UTF-8 at byte {error.start} of its text"
                yield from self._row(where, text, problem)

    def _check_column(self, schema: Any) -> None:
        key, path = self.settings.text_key, self.source.path
        if key not in schema.names:
            raise DataError(f"{path} has no column {key!r} (it has {', '.join(schema.names)}). Set text_key.")
        kind = schema.field(key).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError(
                f"{path}: column {key!r} holds {kind}, not text. Set text_key to a column of strings."
            )

    def _row(self, where: str, text: Any, problem: str | None) -> Iterator[Document]:
        if problem is None and not isinstance(text, str):
            problem = f"has {type(text).__name__} for {self.settings.text_key!r}, not text"
        if problem is None:
            yield from self._pieces(unify_lines(text), False, where)
        elif self.stop:
            raise DataError(f"{where} {problem}. Repair it, or use --on-bad skip.")
        else:
            self.reading.skipped += 1

    def _pieces(self, text: str, continues: bool, where: str = "") -> Generator[Document, None, bool]:
        """A document, in several pieces where it is too long; nothing but whitespace is lost between them. Returns
        whether more text would continue it."""
        text = text.strip()
        start = 0
        while start < len(text):
            too_long = len(text) - start > LONGEST_DOCUMENT
            end = cut_at_whitespace(text, start, LONGEST_DOCUMENT) if too_long else len(text)
            piece = self._clean(text[start:end].strip(), where)
            if piece:
                self.reading.documents += not continues
                yield Document(piece, continues)
                continues = True
            start = _SPACES.match(text, end).end()  # type: ignore[union-attr]
        return continues

    def _clean(self, text: str, where: str) -> str:
        """No NUL and no lone surrogate goes further; an empty text if that means to skip it."""
        if _is_clean(text):
            return text
        if self.stop:
            found = _BAD.search(text)
            assert found
            what = (
                "a NUL character" if found[0][0] == "\0" else f"a lone surrogate (\\u{ord(found[0][0]):04x})"
            )
            raise DataError(f"{where or self.source.path} has {what} in its text. {_REMEDY}.")
        if self.settings.on_bad == "skip":
            self.reading.skipped += 1
            return ""
        self.reading.replaced += 1
        return _BAD.sub("\ufffd", text)


def _is_clean(text: str) -> bool:
    """Encoding is the fastest way to ask for lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
