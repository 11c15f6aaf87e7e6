"""A vector for each text of a list, of any iterable, or of files of any size; memory use does not depend on how many there are.

A vector is the mean of the last layer's states, [CLS] and [SEP] included, as sentence-transformers has it, or the state of [CLS].
"""

import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from electra.base.config import Settings, short
from electra.base.errors import DataError, SettingsError, counted
from electra.base.progress import Progress
from electra.data import tables
from electra.data.files import STANDARD_INPUT, OpenSource, decoded_lines, open_parquet, opened, whole_file
from electra.data.tables import Row
from electra.data.tokenizer import encode_ids
from electra.finetuning import in_chunks
from electra.finetuning.predict import refuse_overwriting
from electra.inspector.detect import read_windows
from electra.interop.read import Pretrained
from electra.model.heads import Pooling
from electra.train.device import autocast, choose_device

log = logging.getLogger(__name__)
MOST_TEXTS, MOST_CHARACTERS = 2048, 1 << 20
"""How many texts, and characters, are in memory and sorted by length at a time: the tokenizer needs 150 bytes per character."""
VECTOR = "embedding"
"""The name of the vectors' column in a parquet file."""


class EmbedSettings(Settings):
    """`length`: texts are cut after that many tokens, [CLS] and [SEP] included, as in sentence-transformers; without it a text that
    is longer than the network reads is read whole, in windows."""

    pooling: Pooling = "mean"
    length: int | None = Field(None, ge=3, le=1_000_000)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"


class Embedded(NamedTuple):
    """Where the vectors are, how many there are, their width, and how long it took."""

    out: Path
    texts: int
    width: int
    seconds: float

    @property
    def rate(self) -> str:
        value = self.texts / self.seconds
        return f"{value:,.0f} texts/s" if value >= 10 else f"{value:.2g} texts/s"


@torch.no_grad()
def text_vectors(network: Pretrained, texts: Sequence[str], length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The last layer's vectors averaged over each text, [CLS] and [SEP] included, and the vector of [CLS]. If a text is read in
    windows, each token counts once, and [CLS] is the first window's. With a `length` texts are cut after that many tokens."""
    ids = encode_ids(network.tokenizer, texts, None if length is None else length - 2)
    mean, first = np.zeros((2, len(ids), network.encoder.settings.hidden), dtype=np.float32)
    for windows, hidden in read_windows(network, ids):
        # [CLS] counts in the first window only, [SEP] in the last, and each token in the window that owns it
        begins = [window.begin - window.first + 1 if window.begin else 0 for window in windows]
        ends = [it.end - it.first + (2 if it.end == len(ids[it.text]) else 1) for it in windows]
        places = torch.arange(hidden.shape[1])
        counts = (places >= torch.tensor(begins)[:, None]) & (places < torch.tensor(ends)[:, None])
        sums = (hidden.float() * counts.to(hidden.device)[:, :, None]).sum(1).cpu().numpy()
        starts = hidden[:, 0].float().cpu().numpy()
        for row, window in enumerate(windows):
            mean[window.text] += sums[row]
            if not window.first:
                first[window.text] = starts[row]
    lengths = np.array([len(it) + 2 for it in ids], dtype=np.float32)
    return mean / lengths[:, None], first


@torch.no_grad()
def first_vectors(network: Pretrained, texts: Sequence[str], length: int | None = None) -> np.ndarray:
    """Only the vectors of [CLS] from `text_vectors`: reads the first window of a long text, and computes the last layer for [CLS] alone."""
    settings = network.encoder.settings
    ids = encode_ids(network.tokenizer, texts, min(length or settings.positions, settings.positions) - 2)
    first = np.zeros((len(ids), settings.hidden), dtype=np.float32)
    for windows, hidden in read_windows(network, ids, first_only=True):
        first[[window.text for window in windows]] = hidden[:, 0].float().cpu().numpy()
    return first


def embed_texts(network: Pretrained, texts: Iterable[str], settings: EmbedSettings) -> Iterator[np.ndarray]:
    """Yields arrays with one row per text, in order; a few thousand texts at a time are in memory."""
    for chunk in in_chunks(texts, MOST_TEXTS, len, MOST_CHARACTERS):
        yield vectors_of(network, chunk, settings)


def vectors_of(network: Pretrained, texts: Sequence[str], settings: EmbedSettings) -> np.ndarray:
    with autocast(settings.precision, network.encoder.embeddings.table.device):
        if settings.pooling == "cls":
            return first_vectors(network, texts, settings.length)
        return text_vectors(network, texts, settings.length)[0]


# Files


class TextRow(NamedTuple):
    """A text, and the columns of its row to keep beside its vector."""

    text: str
    kept: dict[str, Any]


def embed_files(
    network: Pretrained,
    files: Sequence[Path],
    out: Path | None,
    column: str | None,
    keep: Sequence[str],
    settings: EmbedSettings,
    force: bool = False,
) -> Embedded:
    """Writes the vectors of all texts, in order, to one .npy array or one parquet table. `column` is the text column of tables,
    `keep` are columns for the parquet table (by default the text). An existing file is overwritten only with `force`."""
    for path in files:
        if path != STANDARD_INPUT and not path.exists():
            raise DataError(f"{path} does not exist. Check the path.")
        if path.is_dir():
            raise DataError(f"{path} is a folder. Give its files.")
    target = out or default_out(files)
    if target.suffix not in (".npy", ".parquet"):
        raise SettingsError(f"{target.name}: vectors are written as .npy or .parquet. Choose another out.")
    refuse_overwriting([target], files, force)
    network.encoder.to(choose_device(settings))
    width, texts = network.encoder.settings.hidden, 0
    if keep and target.suffix != ".parquet":
        raise SettingsError(f"{target.name} has vectors alone: to keep {keep[0]!r} beside them choose a .parquet out.")
    source = TextSource(files, column, keep)
    writer = parquet_file(target, width) if target.suffix == ".parquet" else npy_file(target, width)
    with writer as write, Progress("embed", source.size, unit="bytes", seconds_between_lines=5.0) as progress:
        for rows in in_chunks(source.rows(), MOST_TEXTS, lambda row: len(row.text), MOST_CHARACTERS):
            write([row.kept for row in rows], vectors_of(network, [row.text for row in rows], settings))
            texts += len(rows)
            progress.advance(source.position)
            progress.report(f"{counted(texts, 'text')} · {Embedded(target, texts, width, progress.seconds).rate}")
        if not texts:
            raise DataError(f"{' and '.join(map(str, files))}: no texts. Give a file with at least one.")
    return Embedded(target, texts, width, progress.seconds)


def default_out(files: Sequence[Path]) -> Path:
    """reviews.csv.gz -> reviews.embeddings.parquet, beside it."""
    if len(files) != 1 or files[0] == STANDARD_INPUT:
        raise SettingsError("where should the vectors go? Name a .parquet or .npy file.", ("out",))
    return files[0].with_name(f"{files[0].name.partition('.')[0]}.embeddings.parquet")


class TextSource:
    """The texts of several files in turn, and how many bytes of them have been read; `size` is the total, or 0 if a pipe is among
    them."""

    def __init__(self, files: Sequence[Path], column: str | None, keep: Sequence[str]):
        self.files, self.column, self.keep = files, column, keep
        self.size = sum(path.stat().st_size for path in files) if all(path.is_file() for path in files) else 0
        self.position = 0
        self.text_name = ""

    def rows(self) -> Iterator[TextRow]:
        for path in self.files:
            before = self.position
            with opened(path) as source:
                size, count = path.stat().st_size if self.size else 0, parquet_rows(source)
                # a blank line is a text too, so that the n-th vector belongs to the n-th line
                lines = ({"text": line} for _, line in decoded_lines(source))
                rows = tables.rows_of(source) if has_rows(source) else lines
                for number, row in enumerate(self._texts(path, rows), 1):
                    if size:
                        bytes_read = (source.raw if source.is_compressed else source.stream).tell()
                        self.position = before + (size * number // count if count else bytes_read)
                    yield row
            self.position = before + size

    def _texts(self, path: Path, rows: Iterator[Row]) -> Iterator[TextRow]:
        column = ""
        for number, row in enumerate(rows, 1):
            if not column:
                column = text_column(path, row, self.column)
                self.text_name = self.text_name or column  # the first file's, for all
                if missing := [name for name in self.keep if name not in row]:
                    raise DataError(f"{path} has no column {missing[0]!r} to keep: it has {', '.join(row)}.")
            text = row.get(column)
            if not isinstance(text, str):
                raise DataError(f"{path} row {number}: {column!r} is {short(text)}, not text. Repair it.")
            yield TextRow(text, {name: row.get(name) for name in self.keep} or {self.text_name: text})


def parquet_rows(source: OpenSource) -> int:
    """The rows of a parquet file, whose position in bytes says little about progress; 0 for other files."""
    if source.format != "parquet":
        return 0
    with open_parquet(source) as table:
        return int(table.metadata.num_rows)


def has_rows(source: OpenSource) -> bool:
    """Whether a file has rows; a text file whose name does not say csv, tsv or json is lines, whatever they contain."""
    return source.format != "text" or bool(tables.is_table(source.path))


def text_column(path: Path, row: Row, wanted: str | None) -> str:
    """The text column: the one that was asked for, one with a usual name, or the only one that has text."""
    low = {name.lower(): name for name in row}
    known = [low[name] for name in tables.TEXTS if name in low]
    strings = [name for name, value in row.items() if isinstance(value, str)]
    if wanted is not None:
        if wanted not in row:
            raise DataError(f"{path} has no column {wanted!r}: it has {', '.join(row)}.")
        return wanted
    if not known and len(strings) != 1:
        raise DataError(f"{path}: which column is the text? Name one of {', '.join(row) or 'none'}.", ("text",))
    column = known[0] if known else strings[0]
    if len(row) > 1:
        log.info("%s: texts are those of column %r", path, column)
    return column


Write = Callable[[Sequence[Mapping[str, Any]], np.ndarray], None]


@contextmanager
def npy_file(path: Path, width: int) -> Iterator[Write]:
    """Writes rows to a .npy file. numpy pads the header for any number of rows, so that it can be rewritten at the end."""
    rows = 0

    def header() -> bytes:
        content = io.BytesIO()
        shape = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
        np.lib.format.write_array_header_1_0(content, shape)
        return content.getvalue()

    with whole_file(path) as file:
        size = file.write(header())

        def write(_: Sequence[Mapping[str, Any]], vectors: np.ndarray) -> None:
            nonlocal rows
            rows += len(vectors)
            file.write(vectors.astype("<f4").tobytes())

        yield write
        assert len(header()) == size
        file.seek(0)
        file.write(header())


@contextmanager
def parquet_file(path: Path, width: int) -> Iterator[Write]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    vector = pa.field(VECTOR, pa.list_(pa.float32(), width))
    writer: pq.ParquetWriter | None = None

    def write(kept: Sequence[Mapping[str, Any]], vectors: np.ndarray) -> None:
        nonlocal writer
        if VECTOR in kept[0]:
            raise DataError(f"a column to keep is called {VECTOR!r}, as the vectors are. Rename it.")
        try:
            if writer is None:
                kinds = {name: pa.array([row[name] for row in kept]).type for name in kept[0]}
                fields = [pa.field(name, pa.string() if pa.types.is_null(it) else it) for name, it in kinds.items()]
                writer = pq.ParquetWriter(file, pa.schema([*fields, vector]))
            columns = [pa.array([row[name] for row in kept], writer.schema.field(name).type) for name in kept[0]]
        except (pa.ArrowException, OverflowError) as error:
            problem = " ".join(str(error).split())
            raise DataError(f"what is kept does not fit a parquet column ({problem}). Keep other columns.") from None
        flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
        columns.append(pa.FixedSizeListArray.from_arrays(flat, width))
        writer.write_table(pa.Table.from_arrays(columns, schema=writer.schema))

    with whole_file(path) as file:
        yield write
        if writer is not None:
            writer.close()
