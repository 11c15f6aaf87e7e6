"""Documents from files and folders, as one stream in bounded memory.

A document is text whose lines end with LF. CRLF becomes LF, a byte order mark is dropped, and every other line separator
(lone CR, form feed, U+0085, U+2028 …) becomes a space inside its line, so that the same text gives the same documents on
any system. Unusable text is never skipped silently: `on_bad` says whether to stop, skip or replace.
"""

import codecs
import inspect
import re
import sysconfig
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from electra.base.config import Settings
from electra.base.errors import DataError, counted
from electra.base.remote import Place
from electra.data.files import (
    NOT_UTF8,
    OpenSource,
    Section,
    SourceLine,
    bad_bytes,
    conversion,
    find_sources,
    is_unicode,
    json_lines,
    open_parquet,
    opened,
    refuse_twice,
    section_bounds,
)
from electra.data.tables import is_table, rows_of

# A longer document is cut: a tokenizer needs about 150 times the memory of the text that it gets at once.
LONGEST_DOCUMENT = 1 << 20
_TEXT_BLOCK = 1 << 20
_BLANK_LINE = re.compile(r"\n(?:[^\S\n]*\n)+")
_LINE_END, _EMPTY_LINE = re.compile(rb"\n"), re.compile(rb"\n[ \t\v\f\r]*\n")
_SPACES = re.compile(r"\s*")
_BAD = re.compile("[\x00\ud800-\udfff]+")
_ODD_SEPARATOR = re.compile("[\r\x0b\x0c\x1c-\x1f\x85\u2028\u2029]")
_TRIPLE_QUOTED = re.compile(r"""("{3}|'{3})(.*?)\1""", re.DOTALL)
DOCUMENTED_PACKAGES = ("torch", "numpy", "sympy", "networkx")
SHORTEST_DOCSTRING = 80
SHINGLE_WORDS = 8
COPIED_SHARE = 0.1
_REMEDY = "Repair it, or set on_bad to skip or replace"


class CorpusSettings(Settings):
    """How documents are found in files. `documents` applies to plain text only: in tables and JSON lines each row is one.
    With `on_bad` "replace", bad characters become U+FFFD; a row that has no text at all cannot be repaired and is skipped."""

    text_key: str = "text"
    documents: Literal["blank-line", "file", "line"] = "blank-line"
    on_bad: Literal["stop", "skip", "replace"] = "stop"


class Document(NamedTuple):
    text: str
    continues: bool = False  # a further piece of the previous document, which was too long for one piece


class Corpus:
    """The documents of files and folders. Each call of `read` starts again from the first."""

    def __init__(self, inputs: Sequence[Place], settings: CorpusSettings | None = None) -> None:
        self.inputs = tuple(inputs)
        self.settings = settings or CorpusSettings()
        self.sources = find_sources(inputs)
        self.size = sum(source.size for source in self.sources)

    def read(self) -> "Reading":
        return Reading([Section(source, 0, source.size) for source in self.sources], self.settings, self.inputs)


class Reading:
    """One pass over the documents of some sections of files, with counts of what it has seen so far. If `inputs` are given,
    the sections are all of theirs, and it is an error if there is no document."""

    def __init__(self, sections: Sequence[Section], settings: CorpusSettings, inputs: Sequence[Place] = ()) -> None:
        self.sections, self.settings, self.inputs = sections, settings, inputs
        self.stop = self.settings.on_bad == "stop"
        self.decoding = "strict" if self.stop else "surrogateescape"  # `_clean` finds the lone surrogates
        self.documents = self.skipped = self.replaced = 0
        self.other_keys: list[str] = []  # the keys of the first row that lacks text_key
        self.empty: list[int] = []  # sections without text, by their number
        self.bytes_in_finished_files = self.bytes_in_this_file = 0

    @property
    def bytes_read(self) -> int:
        """Bytes of the files on disk, not of their text: compressed files hold more."""
        return self.bytes_in_finished_files + self.bytes_in_this_file

    def __iter__(self) -> Iterator[Document]:
        for number, section in enumerate(self.sections):
            source, before = section.source, self.documents + self.skipped
            with opened(source.path, *self._bytes_of(section)) as file:
                match file.format:
                    case "text" if is_table(source.path):  # csv or tsv by its name
                        yield from self._cells(file)
                    case "text":
                        yield from self._text(file)
                    case "jsonl":
                        yield from self._json_lines(file)
                    case _:
                        yield from self._table(file, source.size)
            self.bytes_in_finished_files += section.end - section.begin
            self.bytes_in_this_file = 0
            if self.documents + self.skipped == before:
                self.empty.append(number)
        if self.inputs and not self.documents:
            raise no_documents(self.inputs, self.skipped, self.settings.text_key, self.other_keys)

    def _bytes_of(self, section: Section) -> tuple[int, int | None]:
        if section.whole:
            return 0, None
        separator = divides(section.source.path, self.settings)
        assert separator
        return section_bounds(section, separator)

    def _text(self, file: OpenSource) -> Iterator[Document]:
        """Documents of plain text. The buffered text is never longer than a document and a block."""
        rest, continues, where = "", False, str(file.path)
        for block in self._blocks(file):
            rest += block
            match self.settings.documents:
                case "blank-line":
                    *complete, rest = _BLANK_LINE.split(rest)
                case "line":
                    *complete, rest = rest.split("\n")
                case "file":
                    complete = []
            for text in complete:
                yield from self._pieces(text, continues, where)
                continues = False
            if not continues:
                rest = rest.lstrip()
            # Trailing blanks may turn out to end the document, and then they do not count towards its length.
            *complete, _ = cut_at_whitespace(rest.rstrip(), LONGEST_DOCUMENT)
            size = sum(map(len, complete))
            continues = yield from self._pieces(rest[:size], continues, where)
            rest = rest[size:]
        yield from self._pieces(rest, continues, where)

    def _blocks(self, file: OpenSource) -> Iterator[str]:
        """Decoded blocks. Bad bytes raise an error with their offset, or stay as lone surrogates."""
        decoder = codecs.getincrementaldecoder("utf-8")(self.decoding)
        offset, carriage_return = file.start, ""
        while True:
            block = file.stream.read(_TEXT_BLOCK)
            self.bytes_in_this_file = file.raw.tell()
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                where = offset + len(block) - len(error.object) + error.start
                remedy = f"{conversion(file.path)}; or set on_bad to skip or replace"
                raise bad_bytes(file.path, "bytes that are not UTF-8", where, block, remedy) from None
            if self.stop and b"\0" in block:
                raise bad_bytes(file.path, "a NUL byte", offset + block.index(b"\0"), block, _REMEDY)
            offset += len(block)
            text = carriage_return + text
            carriage_return = "\r" if text.endswith("\r") and block else ""
            yield unify_lines(text.removesuffix(carriage_return))
            if not block:
                return

    def _json_lines(self, file: OpenSource) -> Iterator[Document]:
        key = self.settings.text_key
        for number, row, problem in json_lines(file, self.decoding, _REMEDY, lone_surrogates=True):
            self.bytes_in_this_file, where = file.raw.tell(), SourceLine(file, number)
            if not problem and key not in row:
                problem = f"has no key {key!r} (it has {', '.join(map(repr, row))})"
                self.other_keys = self.other_keys or list(row)
                if self.stop and not self.documents:  # the first row: skipping would skip them all
                    raise DataError(f"{where} {problem}. Set text_key to one of them.", ("text_key",))
            yield from self._row(where, row.get(key), problem)

    def _cells(self, file: OpenSource) -> Iterator[Document]:
        """Documents of csv and tsv: the cells of one column."""
        key, malformed = self.settings.text_key, dict[int, str]()
        if not file.stream.peek(1).strip():
            return
        for number, row in enumerate(rows_of(file, malformed=malformed, unclean=True), 1):
            self.bytes_in_this_file = file.raw.tell()
            if key not in row:
                raise no_column(file.path, key, list(row))
            problem = malformed.pop(number, "").rstrip(".")
            if self.stop and not problem and not is_unicode(row[key]):
                problem = f"{NOT_UTF8}. {conversion(file.path)}"
            yield from self._row(f"{file.path} row {number}", row[key], problem)

    def _table(self, file: OpenSource, size: int) -> Iterator[Document]:
        import pyarrow as pa

        key, path = self.settings.text_key, file.path
        batches: Iterator[Any]
        match file.format:
            case "parquet":
                parquet = open_parquet(file)
                schema, batches = parquet.schema_arrow, parquet.iter_batches(batch_size=256, columns=[key])
            case "arrow-stream":
                stream = pa.ipc.open_stream(file.stream)
                schema, batches = stream.schema, iter(stream)
            case _:
                table = pa.ipc.open_file(file.raw)
                schema, batches = table.schema, map(table.get_batch, range(table.num_record_batches))
        refuse_twice(path, schema.names)
        if key not in schema.names:
            raise no_column(path, key, schema.names)
        kind = schema.field(key).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if kind not in (pa.string(), pa.large_string(), pa.string_view()):
            problem = f"column {key!r} holds {kind}, not text. Set text_key to a column of strings."
            raise DataError(f"{path}: {problem}", ("text_key",))
        rows = 0
        for batch in batches:
            # as bytes, because Arrow does not check that its strings are UTF-8
            for value in batch.column(key).cast("large_binary"):
                rows += 1
                text, problem = value.as_py(), ""
                try:
                    text = text if text is None else text.decode("utf-8", self.decoding)
                except UnicodeDecodeError as error:
                    problem = f"has bytes that are not UTF-8 at byte {error.start} of its text"
                yield from self._row(f"{path} row {rows}", text, problem)
            is_parquet = file.format == "parquet"  # pyarrow seeks in it: the position is no progress
            self.bytes_in_this_file = rows * size // parquet.metadata.num_rows if is_parquet else file.raw.tell()

    def _row(self, where: object, text: Any, problem: str) -> Iterator[Document]:
        if not problem and not isinstance(text, str):
            problem = f"has {type(text).__name__} for {self.settings.text_key!r}, not text"
        if not problem:
            yield from self._pieces(unify_lines(text), False, where)
        elif self.stop:
            raise DataError(f"{where} {problem}. Repair it, or set on_bad to skip.", ("on_bad",))
        else:
            self.skipped += 1

    def _pieces(self, text: str, continues: bool, where: object) -> Generator[Document, None, bool]:
        """A document, in several pieces if it is too long; only whitespace is lost between them. Returns whether more text
        would continue it."""
        for part in cut_at_whitespace(text.rstrip() if continues else text.strip(), LONGEST_DOCUMENT):
            if piece := self._clean(part.strip(), where):
                self.documents += not continues
                yield Document(piece, continues)
                continues = True
        return continues

    def _clean(self, text: str, where: object) -> str:
        """The text without NULs and lone surrogates; empty if it is to be skipped."""
        with suppress(UnicodeEncodeError):  # the fastest check for lone surrogates
            text.encode()
            if "\0" not in text:
                return text
        if self.stop:
            bad = _BAD.findall(text)[0][0]
            name = "a NUL character" if bad == "\0" else f"a lone surrogate (\\u{ord(bad):04x})"
            raise DataError(f"{where} has {name} in its text. {_REMEDY}.", ("on_bad",))
        if self.settings.on_bad == "skip":
            self.skipped += 1
            return ""
        self.replaced += 1
        return _BAD.sub("\ufffd", text)


def no_documents(inputs: Sequence[object], skipped: int, key: str, other_keys: Sequence[str] = ()) -> DataError:
    names = ", ".join(map(str, inputs[:3])) + (", …" if len(inputs) > 3 else "")
    if other_keys:
        has = ", ".join(map(repr, other_keys))
        return DataError(f"{names}: no row has text for {key!r} (the first has {has}). Set text_key.", ("text_key",))
    if skipped:
        what = f"no text left, {counted(skipped, 'document')} skipped as unusable"
        return DataError(
            f"{names}: {what}. Repair the text, or set text_key if it is under another key.", ("text_key",)
        )
    return DataError(f"{names}: no text, every file is empty or only whitespace. Give files with text.")


def divides(path: Place, settings: CorpusSettings) -> re.Pattern[bytes] | None:
    """The pattern of bytes that certainly ends a document in a file; None if the file must be read from its beginning."""
    with opened(path) as file:
        if file.is_compressed or (file.format == "text" and is_table(path)):  # a csv cell may contain line ends
            return None
        match file.format, settings.documents:
            case ("jsonl", _) | ("text", "line"):
                return _LINE_END
            case "text", "blank-line":
                return _EMPTY_LINE
    return None


def no_column(path: Place, key: str, columns: Sequence[str]) -> DataError:
    return DataError(
        f"{path} has no column {key!r} (it has {', '.join(columns)}). Set text_key to one of them.", ("text_key",)
    )


def unify_lines(text: str) -> str:
    """The text with LF as its only line end: CRLF becomes LF, any other separator a space."""
    return _ODD_SEPARATOR.sub(" ", text.replace("\r\n", "\n")) if _ODD_SEPARATOR.search(text) else text


def cut_at_whitespace(text: str, limit: int) -> Iterator[str]:
    """Pieces of at most `limit` characters, each cut before its last whitespace, or anywhere if it has none. The whitespace begins
    the next piece, where it does not count towards `limit`, so that the cut does not change how words are tokenized."""
    start = 0
    while len(text) - (word := _SPACES.match(text, start).end()) > limit:  # type: ignore[union-attr]
        piece = text[word : word + limit]
        words = piece.rsplit(None, 1)
        end = word + len(words[0] if len(words) == 2 else piece)
        yield text[start:end]
        start = end
    yield text[start:]


def libraries() -> dict[str, Path]:
    """The folders of well-documented Python libraries that are installed, by name. The quickstart needs a corpus that requires
    no download and does not ship anybody's text: every machine with electra has this one."""
    paths = {name: Path(path) for name, path in sysconfig.get_paths().items()}
    folders = {"stdlib": paths["stdlib"], **{name: paths["purelib"] / name for name in DOCUMENTED_PACKAGES}}
    return {name: path for name, path in folders.items() if path.is_dir()}


def docstrings(folder: Path) -> Iterator[str]:
    """The docstrings of every module under `folder`, in the order of the paths; tests are skipped. They are found by their
    triple quotes, which takes seconds: parsing every file would take half a minute."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if "site-packages" in parts or {"test", "tests", "testing"} & set(parts):
            continue
        for match in _TRIPLE_QUOTED.finditer(path.read_text("utf-8", errors="ignore")):
            if len(text := prose(match.group(2))) >= SHORTEST_DOCSTRING:
                yield text


def prose(text: str) -> str:
    """A docstring's prose: examples at the prompt, tables and rulers are dropped and wrapped lines joined, so that each
    line is a paragraph."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = [line.strip() for line in block.splitlines()]
        if any(line.startswith((">>>", "...", "|", "+-", "In [", "$ ")) for line in lines):
            continue
        joined = " ".join(line for line in lines if line.strip("-=~^*#. "))
        letters = sum(character.isalpha() or character == " " for character in joined)
        if len(joined) >= 20 and letters >= 0.8 * len(joined):
            paragraphs.append(joined)
    return "\n".join(paragraphs)


def drop_copies(texts: Iterable[str]) -> Iterator[str]:
    """Each text without the paragraphs that repeat earlier ones: those in which more than a tenth of the runs of eight words
    occurred before, in this text or another. A text may become empty. However the texts are split afterwards, no paragraph of
    one split has a near-copy in another."""
    seen: set[int] = set()
    for text in texts:
        paragraphs = []
        for paragraph in text.split("\n"):
            shingles = word_shingles(paragraph)
            if len(shingles & seen) <= COPIED_SHARE * len(shingles):
                paragraphs.append(paragraph)
            seen |= shingles
        yield "\n".join(paragraphs)


def word_shingles(text: str) -> set[int]:
    """The hashes of all runs of eight words, ignoring case and punctuation; one hash of all words if there are fewer."""
    words = re.findall(r"\w+", text.lower())
    return {hash(tuple(words[n : n + SHINGLE_WORDS])) for n in range(max(1, len(words) - SHINGLE_WORDS + 1))}
