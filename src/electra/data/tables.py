"""Tables as streams of rows: csv, tsv, JSON lines, a JSON list, parquet and CoNLL column files, plain or compressed;
writing them; and guessing which column is the text and which the label.

A file's format is recognised by its content (files.py); only csv and tsv, which look alike, are told apart by the name and then by
the first line. In tsv a tab ends a cell and nothing is quoted, as in the GLUE files. csv is quoted as usual; its cells are separated
by commas, by semicolons, as spreadsheets write it in countries with decimal commas, or by tabs.
"""

import ast
import csv
import io
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from electra.base.errors import DataError, SettingsError, counted
from electra.base.files import json_text, parse_json
from electra.base.remote import Place
from electra.data.files import (
    NOT_UTF8,
    NUL,
    OpenSource,
    conversion,
    decoded_lines,
    is_unicode,
    json_lines,
    open_parquet,
    opened,
    refuse_twice,
    whole_file,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

Row = Mapping[str, Any]
"""One line of a table: column name -> value."""

Format = Literal["csv", "tsv", "jsonl", "json", "parquet"]
_NAME = re.compile(r"\.(csv|tsv|jsonl|ndjson|json|parquet)(?:\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_COLUMNS_NAME = re.compile(r"\.(conll[u\d]*|iob[12]?|bio|bioes|txt)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_QUOTED = re.compile(rb'"[^"]*"?')
_BLOCK = 1 << 20
LONGEST_CELL = 1 << 26


def stem(path: Path) -> str:
    """`train_part.jsonl.zst` -> `train_part`, `train.conll` -> `train`."""
    return _NAME.sub("", _COLUMNS_NAME.sub("", path.name))


def is_table(path: Place) -> bool:
    return path.is_file() and bool(_NAME.search(path.name))


def table_format(path: Place) -> Format:
    """The format that a file's name asks for."""
    match = _NAME.search(path.name)
    if not match:
        names = ".csv, .tsv, .jsonl, .json or .parquet (then .gz, .bz2, .xz or .zst)"
        raise SettingsError(f"{path.name}: its name does not show its format. Use {names}.")
    return match[1].lower().replace("ndjson", "jsonl")  # type: ignore[return-value]


def read_rows(
    path: Path, header: Sequence[str] = (), malformed: dict[int, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Rows in the order of the file. Row numbers in messages count from 1, without the header. `header` names the
    columns of csv and tsv files that have no header line. A row that cannot be read is an error; if `malformed` is
    given, it is described there instead and yielded without values, so that the other rows keep their numbers."""
    with open_table(path) as source:
        yield from rows_of(source, header, malformed)


def rows_of(
    source: OpenSource, header: Sequence[str] = (), malformed: dict[int, str] | None = None, unclean: bool = False
) -> Iterator[dict[str, Any]]:
    """The rows of an open file, as in `read_rows`. `unclean` allows NUL characters (a sign of UTF-16) and, in csv and tsv, bytes that
    are not UTF-8 (as lone surrogates): the caller then checks for both."""

    def refuse(number: int, problem: str) -> None:
        if malformed is None:
            raise DataError(f"{source.path} row {number} {problem}")
        malformed[number] = problem

    for number, row in enumerate(_rows_of(source, header, refuse), 1):
        texts = [] if unclean else [part for pair in row.items() for part in pair if isinstance(part, str)]
        problem = NUL if any("\0" in text for text in texts) else ""
        if not all(map(is_unicode, texts)):
            problem = f"{NOT_UTF8}. {conversion(source.path)}"
        if problem:
            refuse(number, f"{problem}.")
        yield dict.fromkeys(row) if problem else row


def _rows_of(source: OpenSource, header: Sequence[str], refuse: "Refuse") -> Iterator[dict[str, Any]]:
    path = source.path
    match content_format(source):
        case "csv":
            try:
                yield from _cells(
                    path, csv.reader(_text(source), delimiter=separator(source), strict=True), header, refuse
                )
            except csv.Error as error:
                raise DataError(f"{path} is not valid csv ({error}). Repair it.") from None
        case "tsv":
            lines = (line.rstrip("\r\n").split("\t") for line in _text(source, newline="\n"))
            yield from _cells(path, lines, header, refuse)
        case "jsonl":
            for number, (_, row, problem) in enumerate(json_lines(source, "strict", conversion(path)), 1):
                if problem:
                    refuse(number, f"{problem}. Repair it.")
                yield row
        case "json":
            yield from _json_list(source, refuse)
        case "parquet":
            with open_parquet(source) as table:
                for batch in table.iter_batches(batch_size=1024):
                    yield from batch.to_pylist()


def open_table(path: Path) -> AbstractContextManager[OpenSource]:
    if not path.is_file():
        raise DataError(f"{path} is not a file. Check the path.")
    return opened(path)


def parquet_schema(path: Path) -> "pa.Schema | None":
    """The columns' types, if the file has them (parquet); else None."""
    with open_table(path) as source:
        if content_format(source) != "parquet":
            return None
        with open_parquet(source) as table:
            return table.schema_arrow


def content_format(source: OpenSource) -> Format:
    path, head = source.path, source.stream.peek(1 << 16)[: 1 << 16].lstrip()
    match source.format:
        case "arrow-file" | "arrow-stream":
            raise DataError(f"{path} is an arrow file. Give csv, tsv, jsonl, json or parquet.")
        case "jsonl" | "text" if head.startswith(b"["):
            return "json"
        case "parquet" | "jsonl":
            return source.format
    if not head:
        raise DataError(f"{path} is empty. Give a table with at least one row.")
    if is_table(path) and table_format(path) in ("csv", "tsv"):
        return table_format(path)
    return "tsv" if b"\t" in head.splitlines()[0] else "csv"


def separator(source: OpenSource) -> str:
    """The separator of csv: the first of comma, semicolon and tab that its first line has outside of quotes; else a comma."""
    head = _QUOTED.sub(b"", source.stream.peek(1 << 16)[: 1 << 16].lstrip())
    line = next(iter(head.splitlines()), b"")
    return next((it for it in ",;\t" if it.encode() in line), ",")


def csv_separator(path: Path) -> str:
    """The separator of a csv file; a comma for other files."""
    with open_table(path) as source:
        return separator(source) if content_format(source) == "csv" else ","


def has_byte_order_mark(path: Path) -> bool:
    with open_table(path) as source:
        return bool(source.start)


def _text(source: OpenSource, newline: str = "") -> Iterator[str]:
    """Lines of text, of which a quoted cell may span several; one longer than LONGEST_CELL is refused before it fills the memory."""
    csv.field_size_limit(LONGEST_CELL)
    text = io.TextIOWrapper(source.stream, encoding="utf-8", errors="surrogateescape", newline=newline)
    while line := text.readline(LONGEST_CELL + 1):
        if len(line) > LONGEST_CELL:
            raise DataError(f"{source.path} has a line of more than {LONGEST_CELL >> 20} MiB. Split it into several.")
        yield line


Refuse = Callable[[int, str], None]


def _cells(path: Place, lines: Iterable[list[str]], header: Sequence[str], refuse: Refuse) -> Iterator[dict[str, Any]]:
    """Rows from lists of cells. The first is the header unless it has as many cells as `header` and none of its names."""
    rows = iter(lines)
    names = next(rows, [])
    if not all(map(is_unicode, names)):
        head = "".join(names).encode("utf-8", "surrogateescape")
        raise DataError(f"{path}: its first line {NOT_UTF8}. {conversion(path, head)}.")
    if len(names) == len(header) and not set(names) & set(header):
        names, rows = list(header), chain([names], rows)
    refuse_twice(path, names)
    blank = ([], [""]) if len(names) > 1 else ([],)  # with one column, an empty cell is an ordinary row
    for number, cells in enumerate((row for row in rows if row not in blank), 1):
        if len(cells) == len(names):
            yield dict(zip(names, cells, strict=True))
        else:
            refuse(number, f"has {counted(len(cells), 'cell')}, the header {len(names)}. Repair it or its quotes.")
            yield dict.fromkeys(names)


def _json_list(source: OpenSource, refuse: Refuse) -> Iterator[dict[str, Any]]:
    """The items of a JSON list, one at a time: the list is never in memory as a whole."""
    text = io.TextIOWrapper(source.stream, encoding="utf-8")
    decoder, buffer, number = json.JSONDecoder(), text.read(_BLOCK).lstrip()[1:], 0

    def from_next(rest: str) -> str:
        """The text from the next character that is not white space; "" at the end of the file."""
        while not (rest := rest.lstrip(" \t\r\n")) and (block := text.read(_BLOCK)):
            rest = block
        return rest

    while not (buffer := from_next(buffer)).startswith("]"):
        try:
            end = decoder.raw_decode(buffer)[1]
            row = parse_json(buffer[:end])
        except (ValueError, RecursionError) as error:
            whole = isinstance(error, json.JSONDecodeError) and len(buffer) <= LONGEST_CELL
            block = text.read(max(_BLOCK, len(buffer))) if whole else ""  # doubling keeps the time linear
            if not block:
                what = "nested too deep" if isinstance(error, RecursionError) else error
                raise DataError(f"{source.path} row {number + 1} is not valid JSON ({what}). Repair it.") from None
            buffer += block
            continue
        number, buffer = number + 1, from_next(buffer[end:])
        if not isinstance(row, dict):
            refuse(number, f"is {type(row).__name__}, not a JSON object. Repair it.")
        yield row if isinstance(row, dict) else {}
        if not buffer.startswith((",", "]")):
            raise DataError(f"{source.path}: neither a comma nor the end of the list follows row {number}. Repair it.")
        buffer = buffer.removeprefix(",")
    if from_next(buffer[1:]):
        raise DataError(f"{source.path} continues after the end of its list, after row {number}. Make it one list.")


# Writing


class TableWriter:
    """Writes rows as they come. `sample` has example values for columns whose first values may all be empty lists, from which
    parquet could not infer the type; `schema` has the types of columns that come from a parquet file. The columns are
    those of the first rows written; a column that appears later is refused if the format cannot add it. `escape_formulas`
    puts a ' before cells of csv and tsv that a spreadsheet would evaluate; `separator` is that of csv; `marked` begins csv and tsv
    with a byte order mark, without which Excel does not read them as UTF-8."""

    def __init__(
        self,
        path: Path,
        sample: Mapping[str, Any] | None = None,
        schema: "pa.Schema | None" = None,
        escape_formulas: bool = False,
        separator: str = ",",
        marked: bool = False,
    ) -> None:
        self.path, self.sample, self.schema, self.escape_formulas = path, sample or {}, schema, escape_formulas
        self.format, self.separator, self.marked, self.rows = table_format(path), separator, marked, 0
        if self.format == "parquet" and path.suffix.lower() != ".parquet":  # nobody reads that, we neither
            raise SettingsError(f"{path.name}: parquet is compressed inside. Write {stem(path)}.parquet.", ("out",))
        self.columns: list[str] = []
        self.parquet: pq.ParquetWriter | None = None
        self.stack = ExitStack()

    def write(self, rows: Sequence[dict[str, Any]], answers: Collection[str] = ()) -> None:
        """Appends rows. Numbers in `answers`, the columns we computed, have six digits in csv and tsv; others are written exactly."""
        if not rows:
            return
        if self.format in ("csv", "tsv", "parquet"):
            names = dict.fromkeys(name for row in rows for name in row)
            self.columns = self.columns or list(names)
            if late := [name for name in names if name not in self.columns]:
                where = f"first appears after row {self.rows}, too late for a {self.format} file"
                raise self._refusal(f"column {late[0]!r} {where}")
        match self.format:
            case "csv" | "tsv":
                self._write_cells(rows, answers)
            case "jsonl":
                self.file.write("".join(f"{_json(row)}\n" for row in rows).encode())
            case "json":
                self.file.write(((",\n" if self.rows else "[\n") + ",\n".join(map(_json, rows))).encode())
            case "parquet":
                self._write_parquet(rows)
        self.rows += len(rows)

    def _refusal(self, problem: str) -> DataError:
        return DataError(f"{self.path.name}: {problem}. Write JSON lines: {stem(self.path)}.jsonl.")

    def _write_cells(self, rows: Sequence[dict[str, Any]], answers: Collection[str]) -> None:
        buffer = io.StringIO()
        if self.marked and not self.rows:
            buffer.write("\ufeff")
        table = [] if self.rows else [self.columns]
        table += [[_cell(row.get(name), name in answers) for name in self.columns] for row in rows]
        if self.escape_formulas:
            table = [[f"'{cell}" if is_formula(cell) else cell for cell in cells] for cells in table]
        if self.format == "csv":
            usual, quoted = (
                csv.writer(buffer, delimiter=self.separator, lineterminator="\n", quoting=it)
                for it in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
            )
            for cells in table:  # QUOTE_MINIMAL does not quote a lone \r
                (quoted if any("\r" in cell for cell in cells) else usual).writerow(cells)
        else:
            buffer.writelines("\t".join(re.sub(r"[\t\r\n]", " ", cell) for cell in cells) + "\n" for cells in table)
        self.file.write(buffer.getvalue().encode())

    def _write_parquet(self, rows: Sequence[dict[str, Any]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            if self.parquet is None:
                fields = [self._field(name, [row.get(name) for row in rows]) for name in self.columns]
                self.parquet = self.stack.enter_context(pq.ParquetWriter(self.file, pa.schema(fields)))
            self.parquet.write_table(pa.Table.from_pylist(list(rows), schema=self.parquet.schema))
        except pa.ArrowException as error:
            where, problem = f"rows {self.rows + 1} to {self.rows + len(rows)}", " ".join(str(error).split())
            raise self._refusal(f"{where} do not fit a parquet file ({problem})") from None

    def _field(self, name: str, values: list[Any]) -> "pa.Field":
        import pyarrow as pa

        if self.schema is not None and name in self.schema.names:
            return self.schema.field(name)
        kind = pa.array([*values, self.sample.get(name)]).type
        return pa.field(name, pa.string() if pa.types.is_null(kind) else kind)

    def __enter__(self) -> "TableWriter":
        self.file = self.stack.enter_context(whole_file(self.path))
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None and self.format == "json":
            self.file.write(b"\n]\n" if self.rows else b"[]\n")
        self.stack.__exit__(kind, *rest)


def is_formula(cell: str) -> bool:
    return cell.startswith(("=", "+", "-", "@", "\t", "\r")) and number(cell) is None


def _cell(value: Any, is_answer: bool) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.6g}" if is_answer else repr(float(value))
        case list() | dict():
            return _json(value)
    return str(value)


def _json(value: Any) -> str:
    return json_text(value, default=str)


# Column files of the CoNLL shared tasks

_DOCUMENT = "-DOCSTART-"
CONLL_U = 10
_NO_WORD = re.compile(r"\d+[-.]\d+")


class Line(NamedTuple):
    """One line of a column file, which has a word per line and a blank line after each sentence; `cells` is None if it
    is not a word.

    Columns are separated by tabs if the first line of words has one (words may then contain spaces), else by spaces.
    Not words are -DOCSTART- lines, comments (a # at the start of a line with another number of columns; with the same
    number, # is a word) and, in CoNLL-U, which has ten columns, multi-word ranges (1-2) and empty nodes (1.1)."""

    text: str
    cells: Sequence[str] | None


def read_conll(path: Path, columns: Mapping[str, int]) -> list[dict[str, Any]]:
    """One row per sentence: for each name in `columns`, the list of values in that column, counted from 0, or from the
    end if negative. `{"tokens": 0, "tags": -1}` reads most files of named entities. Plain or compressed."""
    rows = [row for lines in sentences(path, columns.values()) if (row := row_of(lines, columns))]
    if not rows:
        raise DataError(f"{path} has no words. Give a file with one word per line.")
    return rows


def row_of(lines: Sequence[Line], columns: Mapping[str, int]) -> dict[str, Any] | None:
    words = [line.cells for line in lines if line.cells is not None]
    return {name: [cells[place] for cells in words] for name, place in columns.items()} if words else None


def sentences(path: Path, places: Iterable[int]) -> Iterator[list[Line]]:
    """All lines, in groups that end with a blank one. Joined with line ends, they are the original file."""
    group, width, has_tabs = list[Line](), 0, False
    for number, line in _lines(path):
        begins = not width and bool(line.strip(" \t")) and not line.startswith(("#", _DOCUMENT))
        has_tabs = "\t" in line if begins else has_tabs
        # not `line.split()`: a no-break space is part of its word
        cells = line.split("\t") if has_tabs else re.split("[ \t]+", line.strip(" \t"))
        if begins:
            width = len(cells)
            refuse_columns(path, line, width, list(places))
        if not line.strip(" \t"):
            yield [*group, Line(line, None)]
            group = []
        elif is_no_word(cells, width):
            group.append(Line(line, None))
        elif len(cells) == width:
            group.append(Line(line, cells))
        else:
            problem = f"has {counted(len(cells), 'column')}, the first word {width} ({line[:60]!r})"
            raise DataError(f"{path}:{number} {problem}. Repair it.")
    if group:
        yield group


def refuse_columns(path: Path, line: str, width: int, places: Sequence[int]) -> None:
    """Refuses columns that the file lacks, and two names for one column: in a file with words only, -1 is the words themselves."""
    needed = max(len(places), *(place + 1 if place >= 0 else -place for place in places))
    if width < needed or len({place % width for place in places}) < len(places):
        problem = f"has {counted(width, 'column')} ({line[:60]!r}), not {needed}"
        raise DataError(f"{path} {problem}. Set token_column and tag_column to those it has.")


def is_no_word(cells: Sequence[str], width: int) -> bool:
    if len(cells) == width == CONLL_U:
        return bool(_NO_WORD.fullmatch(cells[0]))
    return cells[0] == _DOCUMENT or (len(cells) != width and cells[0].startswith("#"))


def with_tags(lines: Sequence[Line], tags: Sequence[str]) -> Iterator[str]:
    """The lines with one more column. -DOCSTART- lines get one too, so that programs which count columns, such as
    conlleval, can read the result."""
    answers = iter(tags)
    for text, cells in lines:
        tag = next(answers) if cells is not None else "O" if text.startswith(_DOCUMENT) else None
        yield text if tag is None else f"{text}\t{tag}" if "\t" in text else f"{text} {tag}"


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with open_table(path) as source:
        if source.format not in ("text", "jsonl"):  # a first word may well be "{"
            raise DataError(f"{path} is a table ({source.format}), not a column file.")
        yield from decoded_lines(source)


# Guesses of columns and kinds of labels that the user did not name. A guess is always shown.

PAIRS = [("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence")]
PAIRS += [("text_a", "text_b"), ("text1", "text2")]
TEXTS = ["text", "sentence", "review", "document", "content", "comment", "body", "message", "tweet", "title"]
LABELS = ["label", "labels", "class", "category", "target", "gold_label", "sentiment", "stars", "rating", "score"]
MOST_CLASSES = 200
SEPARATED_SHARE, FEW_LABELS = 0.01, 20
COMMA_NUMBER, NEARLY_ALL = re.compile(r"[+-]?\d+(\.\d{3})*(,\d+)+"), 0.95


def pick(columns: Sequence[str], name: str) -> str | None:
    """The first of `a|b|c` that exists: copies of the same dataset differ in their column names."""
    return next((option for option in [name, *name.split("|")] if option in columns), None)


def column_of(name: str, row: Row) -> str:
    return pick(list(row), name) or name


def guess_columns(rows: Sequence[Row], texts: Sequence[str] = (), label: str = "") -> tuple[tuple[str, ...], str]:
    """(text columns, label column) of a table, guessing what is not given. Well-known names come first; otherwise the label is
    the column with the fewest different values and the text the one with the longest. A tie between labels is an error."""
    columns = list(dict.fromkeys(name for row in rows[:100] for name in row))
    low = {name.lower(): name for name in columns}
    sample = rows[:2000]

    def mean_length(name: str) -> float:
        return sum(len(str(row.get(name) or "")) for row in sample) / max(1, len(sample))

    pairs = [[low[first], low[second]] for first, second in PAIRS if {first, second} <= low.keys()]
    label = label or next((low[name] for name in LABELS if name in low and low[name] not in texts), "")
    named = texts or (pairs[0] if pairs else [low[name] for name in TEXTS if name in low and low[name] != label][:1])
    if not label:
        counts = {name: len({str(row.get(name)) for row in sample}) for name in columns if name not in named}
        few = {name: count for name, count in counts.items() if 2 <= count <= min(MOST_CLASSES, len(sample) // 2)}
        likely = [name for name, count in few.items() if count == min(few.values())]
        if len(likely) > 1:
            listed = f"{', '.join(likely[:-1])} and {likely[-1]} have {few[likely[0]]} different values each"
            raise DataError(f"which column is the label? {listed}. Name one with label.", ("label",))
        label = "".join(likely)
    strings = [name for name in columns if name != label and any(isinstance(row.get(name), str) for row in sample)]
    chosen = named or sorted(strings, key=mean_length)[-1:]
    if not label or not chosen:
        remedy = f"Name them with text and label (there are {', '.join(columns) or 'none'})"
        raise DataError(f"which column is the text and which the label? {remedy}.")
    return tuple(chosen), label


def guess_kind(values: Sequence[Any], separator: str = "|") -> str:
    """The kind of task that label values suggest. Lists are multi-label, and so are names joined by a separator, unless hardly any
    label has one: then it is a typo or part of a name. Many different or fractional numbers are regression; the rest are classes."""
    labels = [value for value in values if not is_missing(value)]
    joined = len(separated(labels, separator))
    is_common = joined >= SEPARATED_SHARE * len(labels) and (joined > 1 or len(labels) < FEW_LABELS)
    if any(isinstance(value, list) or written_list(value) is not None for value in values) or (joined and is_common):
        return "multilabel"
    numbers = [number(value) for value in values if value is not None and value != ""]
    real = {value for value in numbers if value is not None}
    is_quantity = None not in numbers and (len(real) > 20 or any(value % 1 for value in real))
    return "regression" if is_quantity else "classification"


def separated(labels: Sequence[Any], separator: str) -> list[str]:
    """The labels that are several names joined by the separator."""
    return [it for it in labels if isinstance(it, str) and separator in it and all(map(str.strip, it.split(separator)))]


def comma_number(values: Sequence[Any]) -> str:
    """The first number with a comma (3,40 or 1,234) if nearly all values are numbers and most have a comma; else ""."""
    texts = [str(value).strip() for value in values if not is_missing(value)]
    commas = [text for text in texts if COMMA_NUMBER.fullmatch(text)]
    others = sum(number(text) is not None for text in texts)
    is_rule = 2 * len(commas) > len(texts) and len(commas) + others >= NEARLY_ALL * len(texts)
    return commas[0] if is_rule else ""


def number(value: Any) -> float | None:
    """The value as a finite number, also if it is written as text; None for anything else."""
    try:
        real = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return real if math.isfinite(real) and not isinstance(value, bool) else None


def label_name(value: Any) -> str:
    """The name of a label. 1, 1.0 and "1" are the same one, because file formats read numbers differently."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def label_list(value: Any, separator: str) -> list[str]:
    """The labels of one row, from a list, a list written as text, or names joined by the separator."""
    if (read := written_list(value)) is not None:
        value = read
    elif isinstance(value, str) and not value.lstrip().startswith("["):
        value = [part.strip() for part in value.split(separator) if part.strip()]
    return [label_name(part) for part in (value if isinstance(value, list) else [value])]


def written_list(value: Any) -> list[Any] | None:
    """The list of names or numbers in a text cell, written as JSON (as predictions are) or as a Python literal (as pandas
    writes it); None if there is none."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None
    for parse in (parse_json, ast.literal_eval):
        try:
            read = parse(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(read, list) and all(isinstance(it, str | int | float | None) for it in read):
            return read
    return None


def is_missing(value: Any) -> bool:
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or (isinstance(value, str) and not value.strip())


def read_label(row: Mapping[str, Any], column: str) -> Any:
    value = row.get(column)
    return None if is_missing(value) else value
