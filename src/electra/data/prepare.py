"""Text to token shards. The main process reads documents in order and cuts them into units; workers do the units.

Which documents form a unit depends on the text alone, so the output does not depend on the number of workers, and a
run that was killed goes on with the units that are missing (`units.py` says when one is done). The manifest is written
last: a folder that has one is complete.
"""

import errno
import hashlib
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import Field, ValidationError

from electra.base.config import Settings, dump, flatten
from electra.base.errors import DataError, MachineError, SettingsError
from electra.base.files import lock, remove_leftovers, write_atomically
from electra.base.jobs import cpu_count, run_jobs
from electra.base.progress import Progress
from electra.data.corpus import Corpus, CorpusSettings, Reading
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
)
from electra.data.tokenizer import load_tokenizer, save_tokenizer, tokenizer_hash, vocabulary_size
from electra.data.units import Unit, UnitEntry, UnitResult, entry_path, run_unit, start_worker

log = logging.getLogger(__name__)

_HASHES = 1 << 64
_SECONDS_BETWEEN_LINES = 5.0


class PrepareSettings(Settings):
    """`heldout_share` of the documents, chosen by the hash of their text, are kept for evaluation, so that copies of a
    document are on the same side. `unit_bytes` of text make one unit of work, and one shard."""

    corpus: CorpusSettings = CorpusSettings()
    heldout_share: float = Field(default=0.01, ge=0, le=0.5)
    unit_bytes: int = Field(default=4 << 20, ge=1)


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
    if workers < 1:
        raise SettingsError(f"{workers} workers cannot work. Give at least 1.")
    encoder = load_tokenizer(tokenizer)
    corpus = Corpus(inputs, settings.corpus)
    for path in inputs:
        if out.resolve().is_relative_to(path.resolve()):
            raise SettingsError(f"{out} is inside the input {path}. Choose a folder outside it.")
    ours = any((out / name).exists() for name in (MANIFEST, "units", ".lock"))
    if out.is_dir() and not ours and any(out.iterdir()):
        raise SettingsError(f"{out} is not empty and not made by prepare. Choose another folder.")
    with lock(out):
        plan = _Plan(out, corpus, settings, tokenizer_hash(encoder), vocabulary_size(encoder))
        if (out / MANIFEST).exists():
            manifest = plan.finished()
            log.info("%s is already prepared: nothing to do.", out)
        else:
            try:
                plan.check_space()
                (out / "units").mkdir(exist_ok=True)
                for folder in (out, out / "units"):
                    remove_leftovers(folder)
                save_tokenizer(encoder, out)
                manifest = plan.run(workers)
                write_atomically(out / MANIFEST, (manifest.model_dump_json(indent=1) + "\n").encode())
            except OSError as error:
                raise plan.explained(error) from None
        plan.tidy(manifest)
    return manifest


@dataclass
class _Pass:
    """One reading of the corpus. The extreme hashes of documents tell how to mend a split that stayed empty."""

    reading: Reading = field(default_factory=Reading)
    entries: dict[int, UnitEntry] = field(default_factory=dict)
    smallest: int = _HASHES
    largest: int = -1

    def shards(self, split: Split) -> list[ShardEntry]:
        entries = [self.entries[number] for number in sorted(self.entries)]
        return [entry.shards[split] for entry in entries if split in entry.shards]


@dataclass
class _Plan:
    out: Path
    corpus: Corpus
    settings: PrepareSettings
    tokenizer_sha256: str
    vocab_size: int
    input_bytes_done: int = 0
    output_bytes_done: int = 0

    @property
    def inputs(self) -> InputsEntry:
        names = "".join(f"{source.name}\0{source.size}\n" for source in self.corpus.sources)
        digest = hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()
        return InputsEntry(files=len(self.corpus.sources), bytes=self.corpus.size, sha256=digest)

    def finished(self) -> Manifest:
        """The manifest that is there, if it is what this run would write."""
        manifest = read_manifest(self.out)
        there = flatten(manifest.settings) | {"tokenizer": manifest.tokenizer_sha256[:12]}
        here = flatten(dump(self.settings)) | {"tokenizer": self.tokenizer_sha256[:12]}
        for name, value in manifest.inputs:
            there[f"inputs.{name}"], here[f"inputs.{name}"] = value, getattr(self.inputs, name)
        keys = sorted(there.keys() | here.keys())
        if differing := [
            f"{key}: {there.get(key)!r} -> {here.get(key)!r}"
            for key in keys
            if there.get(key) != here.get(key)
        ]:
            raise SettingsError(
                f"{self.out} already holds other shards ({'; '.join(differing)}). Choose another folder, or delete it."
            )
        return manifest

    def check_space(self) -> None:
        """Shards take a third to a half of plain text, and more than compressed text: a third is surely needed."""
        needed = self.corpus.size // 3 - sum(path.stat().st_size for path in self.out.glob("*.safetensors"))
        free = shutil.disk_usage(self.out).free
        if needed > free:
            raise MachineError(
                f"{self.out} needs at least {needed:,} bytes, {free:,} are free. Free some, or choose another disk."
            )

    def explained(self, error: OSError) -> MachineError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return MachineError(f"{error.filename or self.out} cannot be written: {error.strerror}.")
        free = shutil.disk_usage(self.out).free
        left = self.corpus.size - self.input_bytes_done
        needed = (
            left * self.output_bytes_done // self.input_bytes_done if self.input_bytes_done else left // 3
        )
        return MachineError(
            f"{self.out} is full ({error.strerror}): about {needed:,} more bytes needed, {free:,} free. "
            "What is done is kept: free some space and run the same command again."
        )

    def run(self, workers: int) -> Manifest:
        """A document is held out if its hash is below a threshold. A corpus of few documents may leave one split empty;
        then the threshold moves just past the nearest document, and the few units that this changes are done again."""
        threshold = int(self.settings.heldout_share * _HASHES)
        done = self._pass(workers, threshold)
        if self.settings.heldout_share and done.smallest < done.largest:
            if done.smallest >= threshold:
                done = self._pass(workers, done.smallest + 1)
            elif done.largest < threshold:
                done = self._pass(workers, done.largest)
        splits = {}
        for split in SPLITS:
            shards = done.shards(split)
            totals = {
                name: sum(getattr(shard, name) for shard in shards)
                for name in ("tokens", "documents", "lines")
            }
            splits[split] = SplitEntry(shards=tuple(shards), **totals)
        if not splits["train"].tokens:
            raise DataError(
                f"{self.corpus.inputs[0]}: nothing left, the tokenizer finds no token in the text."
            )
        return Manifest(
            vocab_size=self.vocab_size,
            tokenizer_sha256=self.tokenizer_sha256,
            dtype=token_dtype(self.vocab_size),
            settings=dump(self.settings),
            inputs=self.inputs,
            skipped_documents=done.reading.skipped,
            replaced_documents=done.reading.replaced,
            empty_files=done.reading.empty_files,
            splits=splits,
        )

    def _pass(self, workers: int, threshold: int) -> _Pass:
        done = _Pass()
        encoded_bytes = tokens = 0
        started = time.monotonic()
        with Progress("prepare", self.corpus.size, 0, "bytes", _SECONDS_BETWEEN_LINES) as progress:

            def record(unit: UnitResult) -> None:
                nonlocal encoded_bytes, tokens
                done.entries[unit.number] = unit.entry
                shards = unit.entry.shards.values()
                self.input_bytes_done += unit.input_bytes
                self.output_bytes_done += sum(shard.bytes for shard in shards)
                encoded_bytes += unit.encoded_bytes
                tokens += sum(shard.tokens for shard in shards)
                # the rate is of text, of which compressed files hold more than their size
                seconds = time.monotonic() - started
                progress.advance(progress.done + unit.input_bytes)
                left = seconds * (self.corpus.size - progress.done) / max(1, progress.done)
                progress.report(
                    f"{encoded_bytes / 1e6 / max(1e-9, seconds):.1f} MB/s · {tokens:,} tokens", left
                )

            def missing() -> Iterator[tuple[Unit, str, int]]:
                before = 0
                for unit in self._units(done, threshold):
                    key = unit.key(self.tokenizer_sha256)
                    input_bytes, before = done.reading.bytes_read - before, done.reading.bytes_read
                    if entry := self._entry(unit.number, key):
                        record(UnitResult(unit.number, entry, input_bytes, 0))
                    else:
                        yield unit, key, input_bytes

            for result in run_jobs(run_unit, missing(), workers, start=partial(start_worker, self.out)):
                record(result)
        return done

    def _units(self, done: _Pass, threshold: int) -> Iterator[Unit]:
        documents: list[bytes] = []
        splits: list[Split] = []
        number = size = 0
        split: Split = "train"
        for text, continues in self.corpus.read(done.reading):
            document = text.encode()
            if not continues:
                value = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "little")
                split = "heldout" if value < threshold else "train"
                done.smallest, done.largest = min(done.smallest, value), max(done.largest, value)
            if documents and size + len(document) > self.settings.unit_bytes:
                yield Unit(number, documents, splits)
                documents, splits, size, number = [], [], 0, number + 1
            documents.append(document)
            splits.append(split)
            size += len(document)
        yield Unit(number, documents, splits)

    def _entry(self, number: int, key: str) -> UnitEntry | None:
        """The entry of a unit that an earlier run finished, if it was the same unit and its shards are still there."""
        try:
            entry = UnitEntry.model_validate_json(entry_path(self.out, number).read_bytes())
            whole = all(
                (self.out / shard.file).stat().st_size == shard.bytes for shard in entry.shards.values()
            )
        except (OSError, ValidationError):
            return None
        return entry if entry.key == key and whole else None

    def tidy(self, manifest: Manifest) -> None:
        """Nothing stays that the manifest does not name."""
        shutil.rmtree(self.out / "units", ignore_errors=True)
        named = {shard.file for split in manifest.splits.values() for shard in split.shards}
        for path in [*self.out.glob("train-*.safetensors"), *self.out.glob("heldout-*.safetensors")]:
            if path.name not in named:
                path.unlink()
