"""One unit of a preparation: documents in, shards out. What is here runs in worker processes, on whatever machine.

A unit's text goes into parts of bounded size, each with a shard for each split and an entry that says it is done; the unit's own
entry comes last. A worker that finds an entry with the unit's key, and shards as the entry says, leaves them alone.

Workers import this module: it must load neither torch nor pyarrow, so that they start in a tenth of a second.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
from pydantic import Field
from safetensors.numpy import save
from tokenizers import Tokenizer

from electra.base.config import Settings
from electra.base.errors import CorruptError, DataError
from electra.base.files import file_problem, read_object, write_atomically
from electra.base.remote import Place
from electra.data.corpus import Reading, cut_at_whitespace
from electra.data.plan import UNITS, Unit, text_hash
from electra.data.shards import SPLITS, TOKENIZER, ShardEntry, Split, token_dtype
from electra.data.tokenizer import load_tokenizer, tokenizer_hash, vocabulary_size

# The tokenizers library needs about 150 bytes for each byte of text that it encodes at once.
_LONGEST_LINE = 1 << 16
_REMEMBERED_CHARACTERS = 1 << 21


class PartEntry(Settings):
    key: str
    shards: dict[Split, ShardEntry]
    text_bytes: int = Field(ge=0)


class UnitEntry(Settings):
    """`empty` are the sections without text, by their number in the unit."""

    key: str
    parts: tuple[PartEntry, ...]
    documents: int = Field(ge=0)
    skipped: int = Field(ge=0)
    replaced: int = Field(ge=0)
    empty: tuple[int, ...]

    @property
    def shards(self) -> list[tuple[Split, ShardEntry]]:
        return [(split, shard) for part in self.parts for split, shard in part.shards.items()]


@dataclass(frozen=True)
class TextPart:
    """UTF-8 text, and for each document the split that it belongs to."""

    number: int
    documents: list[bytes]
    splits: list[Split]


def parts_of(unit: Unit, reading: Reading) -> Iterator[TextPart]:
    """A range of a file ends where its last document does, a little late: it is one part all the same."""
    most = unit.settings.unit_bytes * (1 if unit.is_one_file else 2)
    part = TextPart(0, [], [])
    size, split = 0, SPLITS[0]
    for text, continues in reading:
        document = text.encode()
        if not continues:
            split = "heldout" if text_hash(document) < unit.threshold else "train"
        if part.documents and size + len(document) > most:
            yield part
            part, size = TextPart(part.number + 1, [], []), 0
        part.documents.append(document)
        part.splits.append(split)
        size += len(document)
    if part.documents:
        yield part


def read_unit(unit: Unit) -> Reading:
    for section in unit.sections:
        if section.source.has_changed():
            raise DataError(f"{section.source.path} has changed since the plan was made. Run the same command again.")
    return Reading(unit.sections, unit.settings.corpus)


class Done(NamedTuple):
    """A unit, or a part of one, and how many bytes of text were encoded for it just now."""

    input_bytes: int
    encoded_bytes: int
    shards: list[ShardEntry]
    is_unit: bool = True


def run_unit(unit: Unit) -> Done:
    """Whoever is interrupted here, or does what another is doing, has done no harm: every file is written whole, and its
    bytes are always the same."""
    entry, encoded = read_unit_entry(unit), 0
    if isinstance(entry, str) or damage(unit.out, [shard for _, shard in entry.shards]):
        reading = read_unit(unit)
        parts = [run_part(unit, part) for part in parts_of(unit, reading)]
        entry, encoded = finish_unit(unit, reading, [part for part, _ in parts]), sum(size for _, size in parts)
    return Done(unit.size, encoded, [shard for _, shard in entry.shards])


def finish_unit(unit: Unit, reading: Reading, parts: list[PartEntry]) -> UnitEntry:
    entry = UnitEntry(
        key=unit.key,
        parts=tuple(parts),
        documents=reading.documents,
        skipped=reading.skipped,
        replaced=reading.replaced,
        empty=tuple(reading.empty),
    )
    write_atomically(unit_path(unit), entry.model_dump_json().encode())
    return entry


def run_part(unit: Unit, part: TextPart) -> tuple[PartEntry, int]:
    """And how many bytes were encoded just now."""
    path = part_path(unit, part.number)
    found = _entry(PartEntry, path, unit.key)
    if not isinstance(found, str) and not damage(unit.out, list(found.shards.values())):
        return found, 0
    shards: dict[Split, ShardEntry] = {}
    for split in dict.fromkeys(part.splits):
        texts = [text.decode() for text, its in zip(part.documents, part.splits, strict=True) if its == split]
        if shard := _encode(unit, shard_name(split, unit.number, part.number), texts):
            shards[split] = shard
    entry = PartEntry(key=unit.key, shards=shards, text_bytes=sum(map(len, part.documents)))
    write_atomically(path, entry.model_dump_json().encode())
    return entry, entry.text_bytes


def read_unit_entry(unit: Unit) -> UnitEntry | str:
    """What was made of it, or why that cannot be used."""
    return _entry(UnitEntry, unit_path(unit), unit.key)


def damage(out: Place, shards: list[ShardEntry]) -> str | None:
    problems = ((shard.file, file_problem(out / shard.file, shard.bytes, shard.sha256)) for shard in shards)
    return next((f"{name} {problem}" for name, problem in problems if problem), None)


def unit_path(unit: Unit) -> Place:
    return unit.out / UNITS / f"{unit.number:05d}.json"


def part_path(unit: Unit, part: int) -> Place:
    return unit.out / UNITS / f"{unit.number:05d}-{part:05d}.json"


def shard_name(split: Split, unit: int, part: int) -> str:
    return f"{split}-{unit:05d}{f'-{part:05d}' if part else ''}.safetensors"


Entry = TypeVar("Entry", PartEntry, UnitEntry)


def _entry(kind: type[Entry], path: Place, key: str) -> Entry | str:
    try:
        entry = kind.model_validate(read_object(path))
    except ValueError:
        return "has a damaged entry" if path.exists() else "is missing"
    return entry if entry.key == key else "is of another plan"


def _encode(unit: Unit, name: str, texts: list[str]) -> ShardEntry | None:
    """Lines and documents without a token leave no trace."""
    words = _word_cache(unit.out, unit.tokenizer_sha256)
    encoded: list[bytes] = []
    ends: dict[str, list[int]] = {"documents": [], "lines": []}
    size = 0
    for text in texts:
        for line in text.split("\n"):
            encoded.append(words.encode(line))
            size += len(encoded[-1]) // words.dtype.itemsize
            ends["lines"].append(size)
        ends["documents"].append(size)
    if not size:
        return None
    arrays = {"tokens": np.frombuffer(b"".join(encoded), words.dtype)}
    arrays |= {kind: np.setdiff1d(np.array(places, np.int64), [0]) for kind, places in ends.items()}
    return write_shard(unit.out, name, arrays)


def write_shard(out: Place, name: str, arrays: dict[str, np.ndarray]) -> ShardEntry:
    data = save(arrays)
    write_atomically(out / name, data)
    counts = {kind: len(array) for kind, array in arrays.items()}
    return ShardEntry(file=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), **counts)


def start_worker(out: Place, tokenizer_sha256: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _word_cache(out, tokenizer_sha256)


@lru_cache(maxsize=1)
def _word_cache(out: Place, tokenizer_sha256: str) -> "WordCache":
    """Of the tokenizer that the plan put beside the shards: one in each process."""
    tokenizer = load_tokenizer(out)
    if (digest := tokenizer_hash(tokenizer)) != tokenizer_sha256:
        problem = f"is not the tokenizer of the plan: expected {tokenizer_sha256[:12]}, found {digest[:12]}"
        raise CorruptError(f"{out / TOKENIZER} {problem}. Make the plan again.")
    return WordCache(tokenizer)


class WordCache(dict[str, bytes]):
    """Text to ids, as the tokenizers library does it and several times as fast where that is possible.

    Text repeats its words: BERT's normaliser looks at single characters and its pre-tokeniser always splits at
    whitespace, so the ids of a line are the ids of its words one after the other, and a word that was seen needs no
    second look. With other kinds of tokenizers whitespace may matter, and the library gets whole lines. Ids come without
    [CLS] and [SEP], as bytes of `dtype`: joining those costs nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.dtype = np.dtype(token_dtype(vocabulary_size(tokenizer))).newbyteorder("<")
        self.words_are_independent = words_are_independent(tokenizer)
        self.characters = 0

    def encode(self, line: str) -> bytes:
        """A very long line goes in parts, cut before a whitespace, where no token is divided."""
        parts = cut_at_whitespace(line, _LONGEST_LINE)
        if self.words_are_independent:
            return b"".join(map(self.__getitem__, chain.from_iterable(map(str.split, parts))))
        return b"".join(map(self.look_up, parts))

    def __missing__(self, word: str) -> bytes:
        if self.characters > _REMEMBERED_CHARACTERS:
            self.clear()
            self.characters = 0
        self[word] = ids = self.look_up(word)
        self.characters += len(word)
        return ids

    def look_up(self, text: str) -> bytes:
        encoding = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoding.ids, self.dtype).tobytes()


def words_are_independent(tokenizer: Tokenizer) -> bool:
    parts = json.loads(tokenizer.to_str())
    kinds = [(parts[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")]
    return (
        kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]
        and parts["normalizer"]["clean_text"]
        and all(token["special"] for token in parts["added_tokens"])
    )
