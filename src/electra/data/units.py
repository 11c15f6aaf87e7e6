"""One unit of a preparation: documents in, shards out. This module runs in worker processes, on any machine.

A unit's text is divided into parts of bounded size, each with a shard per split and an entry that says it is done; the unit's own
entry is written last. If a worker finds an entry with the unit's key and shards that match it, it keeps them.

Workers import this module: it must import neither torch nor pyarrow, so that they start in a tenth of a second.
"""

import json
import os
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
from pydantic import Field
from safetensors.numpy import load, save
from tokenizers import Tokenizer

from electra.base.config import Settings
from electra.base.errors import CorruptError, DataError, ForbiddenError
from electra.base.files import file_problem, manifest_entry, read_bytes, read_object, write_atomically
from electra.base.remote import Place
from electra.data.corpus import Reading, cut_at_whitespace
from electra.data.filters import fingerprint, removed_by, text_hash
from electra.data.plan import Unit
from electra.data.shards import SPLITS, TOKENIZER, UNITS, ShardEntry, Split, token_dtype
from electra.data.tokenizer import ENCODED_AT_ONCE, load_tokenizer, tokenizer_hash, vocabulary_size

_REMEMBERED_CHARACTERS = 1 << 21


class PartEntry(Settings):
    """A finished part. `fingerprints` of its documents serve to find copies when all units are done; base64 of uint64."""

    key: str
    shards: dict[Split, ShardEntry]
    fingerprints: dict[Split, str]
    text_bytes: int = Field(ge=0)


class UnitEntry(Settings):
    """A finished unit. `empty` are the sections without text, by their number in the unit; `removed` counts documents by filter."""

    key: str
    parts: int = Field(ge=0)
    shards: tuple[tuple[Split, ShardEntry], ...]
    removed: dict[str, int]
    documents: int = Field(ge=0)
    skipped: int = Field(ge=0)
    replaced: int = Field(ge=0)
    empty: tuple[int, ...]


@dataclass(frozen=True)
class TextPart:
    """The documents of each split, as UTF-8."""

    number: int
    documents: dict[Split, list[bytes]]


def text_parts(unit: Unit, reading: Reading, removed: Counter[str]) -> Iterator[TextPart]:
    """The parts of a unit's text; `removed` counts what the filters remove. A range of a file ends with its last document, so it may
    be slightly longer than `unit_bytes`, and is one part all the same."""
    most = unit.settings.unit_bytes * (1 if unit.is_one_file else 2)
    part, size = TextPart(0, {}), 0
    split, reason = SPLITS[0], None
    for text, continues in reading:
        if not continues and (reason := removed_by(text, unit.settings.filters)):
            removed[reason] += 1
        if reason:
            continue
        document = text.encode()
        if not continues:
            split = "heldout" if text_hash(text) < unit.threshold else "train"
        if part.documents and size + len(document) > most:
            yield part
            part, size = TextPart(part.number + 1, {}), 0
        part.documents.setdefault(split, []).append(document)
        size += len(document)
    if part.documents:
        yield part


def read_unit(unit: Unit) -> Reading:
    for section in unit.sections:
        if not section.source.path.exists():
            raise DataError(f"{section.source.path} does not exist here. Every machine must see the files of the plan.")
        if section.source.has_changed():
            raise DataError(
                f"{section.source.path} has changed since the plan was made. Run prepare again; an array needs a new plan in another folder."
            )
    return Reading(unit.sections, unit.settings.corpus)


class Done(NamedTuple):
    """The result of a unit, or of a part of one. `encoded_bytes` of text were encoded just now, not in an earlier run."""

    input_bytes: int
    encoded_bytes: int
    shards: list[ShardEntry]
    is_unit: bool = True


def run_unit(unit: Unit) -> Done:
    """Runs a unit. Interrupting it, or running it twice at the same time, does no harm: every file is written atomically, always
    with the same bytes."""
    entry, encoded = read_unit_entry(unit), 0
    if isinstance(entry, str):
        reading, removed = read_unit(unit), Counter[str]()
        parts = [run_part(unit, part) for part in text_parts(unit, reading, removed)]
        entry = finish_unit(unit, reading, removed, [part for part, _ in parts])
        encoded = sum(size for _, size in parts)
    return Done(unit.size, encoded, [shard for _, shard in entry.shards])


def finish_unit(unit: Unit, reading: Reading, removed: Counter[str], parts: list[PartEntry]) -> UnitEntry:
    entry = UnitEntry(
        key=unit.key,
        parts=len(parts),
        shards=tuple((split, shard) for part in parts for split, shard in part.shards.items()),
        removed=dict(removed),
        documents=reading.documents,
        skipped=reading.skipped,
        replaced=reading.replaced,
        empty=tuple(reading.empty),
    )
    write_atomically(unit_path(unit), entry.model_dump_json().encode())
    return entry


def run_part(unit: Unit, part: TextPart) -> tuple[PartEntry, int]:
    """Writes the shards and the entry of a part; returns the entry and how many bytes of text were encoded just now."""
    path = part_path(unit, part.number)
    entry = _entry(PartEntry, path, unit.key)
    if isinstance(entry, PartEntry) and not damage(unit.out, list(entry.shards.values())):
        return entry, 0
    shards: dict[Split, ShardEntry] = {}
    prints: dict[Split, str] = {}
    for split, documents in part.documents.items():
        arrays, kept = _encode(unit, [document.decode() for document in documents])
        if kept:
            shards[split] = write_shard(unit.out, shard_name(split, unit.number, part.number), arrays)
            if (share := unit.settings.fingerprint_share) is not None:
                rows = np.array([fingerprint(text, share) for text in kept], "<u8")
                prints[split] = b64encode(rows.tobytes()).decode()
    text_bytes = sum(len(document) for documents in part.documents.values() for document in documents)
    entry = PartEntry(key=unit.key, shards=shards, fingerprints=prints, text_bytes=text_bytes)
    write_atomically(path, entry.model_dump_json().encode())
    return entry, entry.text_bytes


def read_unit_entry(unit: Unit, verify: bool = True) -> UnitEntry | str:
    """The entry of a finished unit, or why it cannot be used; `verify` also reads the shards."""
    entry = _entry(UnitEntry, unit_path(unit), unit.key)
    if isinstance(entry, str):
        return entry
    if not set(entry.empty) <= set(range(len(unit.sections))):
        return "has a damaged entry"
    return (damage(unit.out, [shard for _, shard in entry.shards]) if verify else None) or entry


def damage(out: Place, shards: list[ShardEntry]) -> str | None:
    problems = ((shard.file, file_problem(out / shard.file, shard.bytes, shard.sha256)) for shard in shards)
    return next((f"{name} {problem}" for name, problem in problems if problem), None)


def fingerprints(unit: Unit, entry: UnitEntry, split: Split) -> Iterator[np.ndarray]:
    """The fingerprints of a unit's documents in a split, in order: one array per shard."""
    for number in range(entry.parts):
        part = _entry(PartEntry, part_path(unit, number), unit.key)
        if isinstance(part, str):
            raise CorruptError(f"{part_path(unit, number)} {part}. Remove it, and run the unit again.")
        if split in part.shards:
            documents, rows = part.shards[split].documents, np.frombuffer(b"")
            with suppress(ValueError):
                rows = np.frombuffer(b64decode(part.fingerprints.get(split, ""), validate=True), "<u8")
            if not len(rows) or len(rows) % documents:
                raise CorruptError(f"{part_path(unit, number)} is damaged. Remove it, and run the unit again.")
            yield rows.reshape(documents, -1)


def without(out: Place, shard: ShardEntry, copies: np.ndarray) -> ShardEntry | None:
    """Writes a shard without some of its documents under another name, so that an interruption leaves the original as it was."""
    arrays = load(read_bytes(out / shard.file, 1 << 40))
    tokens, documents, lines = arrays["tokens"], arrays["documents"], arrays["lines"]
    if copies.all():
        return None
    kept_tokens = ~np.repeat(copies, np.diff(documents, prepend=0))
    kept_lines = ~copies[np.searchsorted(documents, lines)]
    shorter = {
        "tokens": tokens[kept_tokens],
        "documents": np.cumsum(np.diff(documents, prepend=0)[~copies]),
        "lines": np.cumsum(np.diff(lines, prepend=0)[kept_lines]),
    }
    return write_shard(out, shard.file.replace(".safetensors", "-k.safetensors"), shorter)


def unit_path(unit: Unit) -> Place:
    return unit.out / UNITS / f"{unit.number:05d}.json"


def part_path(unit: Unit, part: int) -> Place:
    return unit.out / UNITS / f"{unit.number:05d}-{part:05d}.json"


def shard_name(split: Split, unit: int, part: int) -> str:
    return f"{split}-{unit:05d}{f'-{part:05d}' if part else ''}.safetensors"


AnEntry = TypeVar("AnEntry", PartEntry, UnitEntry)


def _entry(kind: type[AnEntry], path: Place, key: str) -> AnEntry | str:
    try:
        entry = kind.model_validate(read_object(path))
    except ForbiddenError:
        raise
    except ValueError:
        return "has a damaged entry" if path.exists() else "is missing"
    return entry if entry.key == key else "belongs to another plan"


def _encode(unit: Unit, texts: list[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays of a shard, and the texts in it. Lines and documents without tokens are left out."""
    words = _word_cache(unit.out, unit.tokenizer_sha256)
    encoded: list[bytes] = []
    ends: dict[str, list[int]] = {"documents": [], "lines": []}
    size, kept = 0, []
    for text in texts:
        before = size
        for line in text.split("\n"):
            encoded.append(words.encode(line))
            size += len(encoded[-1]) // words.dtype.itemsize
            ends["lines"].append(size)
        ends["documents"].append(size)
        if size > before:
            kept.append(text)
    arrays = {"tokens": np.frombuffer(b"".join(encoded), words.dtype)}
    arrays |= {kind: np.setdiff1d(np.array(places, np.int64), [0]) for kind, places in ends.items()}
    return arrays, kept


def write_shard(out: Place, name: str, arrays: dict[str, np.ndarray]) -> ShardEntry:
    data = save(arrays)
    write_atomically(out / name, data)
    counts = {kind: len(array) for kind, array in arrays.items()}
    return ShardEntry(file=name, **manifest_entry(data), **counts)


def start_worker(out: Place, tokenizer_sha256: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _word_cache(out, tokenizer_sha256)


@lru_cache(maxsize=1)
def _word_cache(out: Place, tokenizer_sha256: str) -> "WordCache":
    """The process's one cache for the tokenizer that the plan put beside the shards."""
    tokenizer = load_tokenizer(out)
    if (digest := tokenizer_hash(tokenizer)) != tokenizer_sha256:
        problem = f"is not the tokenizer of the plan: expected {tokenizer_sha256[:12]}, found {digest[:12]}"
        raise CorruptError(f"{out / TOKENIZER} {problem}. Make the plan again.")
    return WordCache(tokenizer)


class WordCache(dict[str, bytes]):
    """Text to ids, as the tokenizers library does it, but several times as fast if the tokenizer is BERT's.

    Text repeats its words: BERT's normaliser looks at single characters and its pre-tokeniser always splits at
    whitespace, so the ids of a line are the concatenated ids of its words, and each word is encoded only once. In other
    kinds of tokenizers whitespace may matter, so the library encodes whole lines. Ids come without [CLS] and [SEP], as
    bytes of `dtype`, which are cheap to join."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.dtype = np.dtype(token_dtype(vocabulary_size(tokenizer))).newbyteorder("<")
        self.words_are_independent = words_are_independent(tokenizer)
        self.characters = 0

    def encode(self, line: str) -> bytes:
        """The ids of a line. A very long line is encoded in parts, cut before whitespace so that no token is divided."""
        parts = cut_at_whitespace(line, ENCODED_AT_ONCE)
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
