"""One unit of preparation: some documents in, at most one shard for each split out. Runs in worker processes.

A unit is done when its entry exists and carries the right key: a hash of its text, the split of each document, the
tokenizer. It imports neither torch nor pyarrow, so that a worker starts in a tenth of a second.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save

from electra.base.config import Settings
from electra.base.files import write_atomically
from electra.data.encoder import Encoder
from electra.data.shards import ShardEntry, Split
from electra.data.text import cut_at_whitespace
from electra.data.tokenizer import load_tokenizer

# The tokenizers library needs about 150 bytes for each byte of text that it encodes at once.
_BATCH = 1 << 19
_LONGEST_LINE = 1 << 16


# Set once in every worker process, by start_worker.
_folder: Path
_encoder: Encoder


class UnitEntry(Settings):
    key: str
    shards: dict[Split, ShardEntry]


@dataclass(frozen=True)
class Unit:
    """UTF-8 text, and for each document the split that it belongs to."""

    number: int
    documents: list[bytes]
    splits: list[Split]

    def key(self, tokenizer_sha256: str) -> str:
        digest = hashlib.sha256(f"1 {tokenizer_sha256}".encode())
        for split, document in zip(self.splits, self.documents, strict=True):
            digest.update(f"\n{split} {len(document)}\n".encode())
            digest.update(document)
        return digest.hexdigest()


class UnitResult(NamedTuple):
    number: int
    entry: UnitEntry
    input_bytes: int
    encoded_bytes: int


def entry_path(folder: Path, number: int) -> Path:
    return folder / "units" / f"{number:05d}.json"


def start_worker(folder: Path) -> None:
    """Once in every worker process, before its first unit."""
    global _folder, _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _folder = folder
    _encoder = Encoder(load_tokenizer(folder))


def run_unit(unit: Unit, key: str, input_bytes: int) -> UnitResult:
    shards: dict[Split, ShardEntry] = {}
    for split in dict.fromkeys(unit.splits):
        texts = [text for text, its in zip(unit.documents, unit.splits, strict=True) if its == split]
        if entry := _write_shard(f"{split}-{unit.number:05d}.safetensors", texts):
            shards[split] = entry
    done = UnitEntry(key=key, shards=shards)
    write_atomically(entry_path(_folder, unit.number), done.model_dump_json(indent=1).encode())
    return UnitResult(unit.number, done, input_bytes, sum(map(len, unit.documents)))


def _write_shard(name: str, texts: list[bytes]) -> ShardEntry | None:
    tokens, lines, documents = _encode([text.decode() for text in texts])
    if not len(tokens):
        return None
    data = save({"tokens": tokens, "documents": documents, "lines": lines})
    write_atomically(_folder / name, data)
    return ShardEntry(
        file=name,
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        tokens=len(tokens),
        documents=len(documents),
        lines=len(lines),
    )


def _encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, ends of lines, ends of documents. Lines and documents without a token leave no trace."""
    encoded: list[bytes] = []
    parts = [part for number, text in enumerate(texts) for part in _parts(number, text)]
    for batch in _batches([text for _, _, text in parts]):
        encoded += _encoder.encode(batch)
    ends = np.cumsum([len(ids) // _encoder.dtype.itemsize for ids in encoded], dtype=np.int64)
    documents, lines = (np.array([part[place] for part in parts]) for place in (0, 1))
    ends_document = np.append(np.diff(documents) != 0, True)
    ends_line = ends_document | np.append(np.diff(lines) != 0, True)
    tokens = np.frombuffer(b"".join(encoded), _encoder.dtype)
    return tokens, _distinct(ends[ends_line]), _distinct(ends[ends_document])


def _distinct(ends: np.ndarray) -> np.ndarray:
    return np.unique(ends[ends > 0])


def _parts(document: int, text: str) -> Iterator[tuple[int, int, str]]:
    """(document, line, text): a very long line comes in parts, cut before a whitespace, where no token is divided."""
    for number, line in enumerate(text.split("\n")):
        start = 0
        while len(line) - start > _LONGEST_LINE:
            end = cut_at_whitespace(line, start, _LONGEST_LINE)
            yield document, number, line[start:end]
            start = end
        yield document, number, line[start:]


def _batches(texts: list[str]) -> Iterator[list[str]]:
    start, size = 0, 0
    for stop, text in enumerate(texts):
        if size + len(text) > _BATCH and stop > start:
            yield texts[start:stop]
            start, size = stop, 0
        size += len(text)
    if texts:
        yield texts[start:]
