"""Text to token shards. The main process reads documents in order and cuts them into units; workers do the units.

Which documents form a unit depends on the text alone, so the output does not depend on the number of workers. A unit is
done when its entry exists and carries the right key: a hash of its text, the split of each document, the tokenizer. A run
that was killed goes on with the units that are missing. The manifest is written last: a folder that has one is complete.

Workers import this module: it must load neither torch nor pyarrow, so that they start in a tenth of a second.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from pydantic import Field
from safetensors.numpy import save
from tokenizers import Tokenizer

from electra.base.config import Settings, differences, dump
from electra.base.errors import DataError, DiskFullError, MachineError, SettingsError
from electra.base.files import file_problem, lock, read_object, remove_leftovers, write_atomically
from electra.base.jobs import cpu_count, run_jobs
from electra.base.progress import Progress
from electra.data.corpus import Corpus, CorpusSettings, Reading, cut_at_whitespace
from electra.data.shards import (
    MANIFEST,
    SPLITS,
    InputsEntry,
    Manifest,
    ShardEntry,
    Split,
    SplitEntry,
    read_manifest,
    token_dtype,
    verify_shards,
)
from electra.data.tokenizer import load_tokenizer, save_tokenizer, tokenizer_hash, vocabulary_size

log = logging.getLogger(__name__)

_HASHES = 1 << 64
MOST_WORKERS = 1024
# The tokenizers library needs about 150 bytes for each byte of text that it encodes at once.
_LONGEST_LINE = 1 << 16
_REMEMBERED_CHARACTERS = 1 << 21


class PrepareSettings(Settings):
    """`heldout_share` of the documents, chosen by the hash of their text, are kept for evaluation, so that copies of a
    document are on the same side. `unit_bytes` of text make one unit of work, and one shard."""

    corpus: CorpusSettings = CorpusSettings()
    heldout_share: float = Field(default=0.01, ge=0, le=0.5)
    unit_bytes: int = Field(default=4 << 20, ge=1, le=1 << 32)


class UnitEntry(Settings):
    key: str
    shards: dict[Split, ShardEntry]


@dataclass(frozen=True)
class Unit:
    """UTF-8 text, for each document the split that it belongs to, and how many bytes of input files it comes from."""

    number: int
    documents: list[bytes]
    splits: list[Split]
    input_bytes: int

    def key(self, tokenizer_sha256: str) -> str:
        digest = hashlib.sha256(f"1 {tokenizer_sha256}".encode())
        for split, document in zip(self.splits, self.documents, strict=True):
            digest.update(f"\n{split} {len(document)}\n".encode())
            digest.update(document)
        return digest.hexdigest()


def prepare(
    inputs: Sequence[Path],
    out: Path,
    tokenizer: Path,
    settings: PrepareSettings | None = None,
    workers: int | None = None,
) -> Manifest:
    """Run it again after any interruption: it does what is missing, and nothing if nothing is."""
    settings = settings or PrepareSettings()
    workers = cpu_count() if workers is None else workers
    if not 1 <= workers <= MOST_WORKERS:
        raise SettingsError(f"{workers} workers cannot work. Give at least 1 and at most {MOST_WORKERS:,}.")
    loaded, corpus = load_tokenizer(tokenizer), Corpus(inputs, settings.corpus)
    for path in inputs:
        if out.resolve().is_relative_to(path.resolve()):
            raise SettingsError(f"{out} is inside the input {path}. Choose a folder outside it.")
    ours = any((out / name).exists() for name in (MANIFEST, "units", ".lock"))
    if out.is_dir() and not ours and any(out.iterdir()):
        raise SettingsError(f"{out} is not empty and not made by prepare. Choose another folder.")
    with lock(out):
        preparation = _Preparation(out, corpus, settings, tokenizer_hash(loaded), vocabulary_size(loaded))
        manifest = preparation.finished() if (out / MANIFEST).exists() else None
        if manifest:
            log.info("%s is already prepared: nothing to do.", out)
        else:
            try:
                preparation.check_space()
                (out / "units").mkdir(exist_ok=True)
                for folder in (out, out / "units"):
                    remove_leftovers(folder)
                save_tokenizer(loaded, out)
                manifest = preparation.run(workers)
                write_atomically(out / MANIFEST, (manifest.model_dump_json(indent=1) + "\n").encode())
            except DiskFullError as error:
                raise preparation.full(error) from None
            except OSError as error:
                raise MachineError(f"{error.filename or out} cannot be written: {error.strerror}.") from None
        preparation.tidy(manifest)
    return manifest


@dataclass
class _Preparation:
    """One run of `prepare`, and how far it is."""

    out: Path
    corpus: Corpus
    settings: PrepareSettings
    tokenizer_sha256: str
    vocab_size: int
    entries: dict[int, UnitEntry] = field(default_factory=dict)
    input_bytes: int = 0
    encoded_bytes: int = 0

    @property
    def inputs(self) -> InputsEntry:
        names = "".join(f"{source.name}\0{source.size}\n" for source in self.corpus.sources)
        digest = hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()
        return InputsEntry(files=len(self.corpus.sources), bytes=self.corpus.size, sha256=digest)

    def shards(self, *splits: Split) -> list[ShardEntry]:
        entries = [self.entries[number] for number in sorted(self.entries)]
        return [entry.shards[split] for entry in entries for split in splits if split in entry.shards]

    def finished(self) -> Manifest | None:
        """The manifest that is there, if it is what this run would write; None where shards are damaged or missing, which
        are then made again."""
        manifest = read_manifest(self.out)
        before = {"tokenizer": manifest.tokenizer_sha256[:12], "inputs": dump(manifest.inputs)}
        now = {"tokenizer": self.tokenizer_sha256[:12], "inputs": dump(self.inputs)}
        if changes := "; ".join(differences(manifest.settings | before, dump(self.settings) | now)):
            raise SettingsError(
                f"{self.out} already holds other shards ({changes}). Choose another folder, or delete it."
            )
        if problems := verify_shards(self.out):
            log.warning("%s Preparing again.", " ".join(problems[:3]))
            return None
        return manifest

    def check_space(self) -> None:
        """Shards take a third to a half of plain text, and more than compressed text: a third is surely needed."""
        needed = self.corpus.size // 3 - sum(path.stat().st_size for path in self.out.glob("*.safetensors"))
        free = shutil.disk_usage(self.out).free
        if needed > free:
            sizes = f"{needed:,} bytes, {free:,} are free"
            raise MachineError(f"{self.out} needs at least {sizes}. Free some, or choose another disk.")

    def full(self, error: DiskFullError) -> DiskFullError:
        free, left = shutil.disk_usage(self.out).free, self.corpus.size - self.input_bytes
        written = sum(shard.bytes for shard in self.shards(*SPLITS))
        needed = left * written // self.input_bytes if self.input_bytes else left // 3
        return DiskFullError(
            f"{self.out} is full: about {needed:,} more bytes needed, {free:,} free ({str(error).partition(': ')[0]}). "
            "What is done is kept: free some space and run the same command again."
        )

    def run(self, workers: int) -> Manifest:
        reading = self.corpus.read()
        started = time.monotonic()
        with Progress("prepare", self.corpus.size, unit="bytes", seconds_between_lines=5.0) as progress:
            missing = self._missing(reading, self._heldout_threshold())
            for result in run_jobs(_run_unit, missing, workers, start=partial(start_worker, self.out)):
                self._note(*result)
                self._report(progress, time.monotonic() - started)
            self._report(progress, time.monotonic() - started)
        splits = {}
        for split in SPLITS:
            shards = self.shards(split)
            counts = {name: sum(getattr(shard, name) for shard in shards) for name in ("tokens", "documents", "lines")}
            splits[split] = SplitEntry(shards=tuple(shards), **counts)
        if not splits["train"].tokens:
            raise DataError(f"{self.corpus.inputs[0]}: nothing left, the tokenizer finds no token in the text.")
        return Manifest(
            vocab_size=self.vocab_size,
            tokenizer_sha256=self.tokenizer_sha256,
            dtype=token_dtype(self.vocab_size),
            settings=dump(self.settings),
            inputs=self.inputs,
            skipped_documents=reading.skipped,
            replaced_documents=reading.replaced,
            empty_files=reading.empty_files,
            splits=splits,
        )

    def _heldout_threshold(self) -> int:
        """A document is held out if its hash is below this. Few documents may all be on one side of the wanted share; then
        the threshold moves just past the nearest one. Reading ends as soon as both sides have a document, mostly after a
        few hundred."""
        wanted = int(self.settings.heldout_share * _HASHES)
        smallest, largest = _HASHES, -1
        for text, continues in self.corpus.read() if wanted else ():
            if not continues:
                value = _hash(text.encode())
                smallest, largest = min(smallest, value), max(largest, value)
                if smallest < wanted <= largest:
                    return wanted
        if smallest >= largest:  # no two different documents
            return wanted
        return smallest + 1 if smallest >= wanted else largest

    def _missing(self, reading: Reading, threshold: int) -> Iterator[tuple[Unit, str]]:
        """The units to be done, each with its key; those that an earlier run finished are noted."""
        for unit in self._units(reading, threshold):
            key = unit.key(self.tokenizer_sha256)
            if entry := self._entry(unit.number, key):
                self._note(unit.number, entry, unit.input_bytes, 0)
            else:
                yield unit, key

    def _units(self, reading: Reading, threshold: int) -> Iterator[Unit]:
        documents: list[bytes] = []
        splits: list[Split] = []
        number = size = input_bytes = 0
        split: Split = "train"
        for text, continues in reading:
            document = text.encode()
            if not continues:
                split = "heldout" if _hash(document) < threshold else "train"
            if documents and size + len(document) > self.settings.unit_bytes:
                yield Unit(number, documents, splits, reading.bytes_read - input_bytes)
                input_bytes = reading.bytes_read
                documents, splits, size, number = [], [], 0, number + 1
            documents.append(document)
            splits.append(split)
            size += len(document)
        yield Unit(number, documents, splits, reading.bytes_read - input_bytes)

    def _entry(self, number: int, key: str) -> UnitEntry | None:
        """The entry of a unit that an earlier run finished, if it was the same unit and its shards are still there."""
        try:
            entry = UnitEntry.model_validate(read_object(_entry_path(self.out, number)))
        except ValueError:
            return None
        shards = entry.shards.values()
        damaged = any(file_problem(self.out / shard.file, shard.bytes, shard.sha256) for shard in shards)
        return entry if entry.key == key and not damaged else None

    def _note(self, number: int, entry: UnitEntry, input_bytes: int, encoded_bytes: int) -> None:
        self.entries[number] = entry
        self.input_bytes += input_bytes
        self.encoded_bytes += encoded_bytes

    def _report(self, progress: Progress, seconds: float) -> None:
        """The remaining time goes by bytes of files, the rate by bytes of text, of which compressed files hold more."""
        progress.advance(self.input_bytes)
        tokens = sum(shard.tokens for shard in self.shards(*SPLITS))
        rate = self.encoded_bytes / 1e6 / max(1e-9, seconds)
        left = seconds * (self.corpus.size - self.input_bytes) / max(1, self.input_bytes)
        progress.report(f"{rate:.1f} MB/s · {tokens:,} tokens", left)

    def tidy(self, manifest: Manifest) -> None:
        """Nothing stays that the manifest does not name."""
        shutil.rmtree(self.out / "units", ignore_errors=True)
        named = {shard.file for split in manifest.splits.values() for shard in split.shards}
        for path in [*self.out.glob("train-*.safetensors"), *self.out.glob("heldout-*.safetensors")]:
            if path.name not in named:
                path.unlink()


def _hash(document: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "little")


def _entry_path(folder: Path, number: int) -> Path:
    return folder / "units" / f"{number:05d}.json"


# What follows runs in worker processes. Both are set once in each, by start_worker.
_folder: Path
_words: "WordCache"


def start_worker(folder: Path) -> None:
    global _folder, _words
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _folder = folder
    _words = WordCache(load_tokenizer(folder))


def _run_unit(unit: Unit, key: str) -> tuple[int, UnitEntry, int, int]:
    """What `_note` wants to know."""
    shards: dict[Split, ShardEntry] = {}
    for split in dict.fromkeys(unit.splits):
        texts = [text.decode() for text, its in zip(unit.documents, unit.splits, strict=True) if its == split]
        if shard := _write_shard(f"{split}-{unit.number:05d}.safetensors", texts):
            shards[split] = shard
    entry = UnitEntry(key=key, shards=shards)
    write_atomically(_entry_path(_folder, unit.number), entry.model_dump_json(indent=1).encode())
    return unit.number, entry, unit.input_bytes, sum(map(len, unit.documents))


def _write_shard(name: str, texts: list[str]) -> ShardEntry | None:
    """Lines and documents without a token leave no trace."""
    encoded: list[bytes] = []
    ends: dict[str, list[int]] = {"documents": [], "lines": []}
    size = 0
    for text in texts:
        for line in text.split("\n"):
            encoded.append(_words.encode(line))
            size += len(encoded[-1]) // _words.dtype.itemsize
            ends["lines"].append(size)
        ends["documents"].append(size)
    if not size:
        return None
    arrays = {"tokens": np.frombuffer(b"".join(encoded), _words.dtype)}
    arrays |= {kind: np.setdiff1d(np.array(places, np.int64), [0]) for kind, places in ends.items()}
    data = save(arrays)
    write_atomically(_folder / name, data)
    counts = {kind: len(array) for kind, array in arrays.items()}
    return ShardEntry(file=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), **counts)


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
