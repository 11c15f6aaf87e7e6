"""Text to token shards: make a plan, run its units in any order with some engine, and collect their shards in a manifest.

The output is a function of the text, the tokenizer and the settings, never of the engine, the number of workers, the order of
the units or how often one was tried. The manifest is written last: a folder that has one is complete.

`prepare` does all of it. For job schedulers, `plan_units`, `run_share` and `finish_units` are its three steps.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from pydantic import ValidationError

from electra.base.config import differences, dump, validate
from electra.base.errors import CorruptError, DataError, DiskFullError, MachineError, SettingsError, counted
from electra.base.files import lock, remove_leftovers, write_atomically
from electra.base.jobs import cpu_count, ending_at_signals, preempted
from electra.base.progress import Progress
from electra.base.remote import Place, RemotePath
from electra.data.corpus import Corpus, CorpusSettings, no_documents
from electra.data.engines import run_local, run_ray
from electra.data.files import status
from electra.data.filters import bands_for, identifier, in_heldout, repeated
from electra.data.plan import PreparePlan, PrepareSettings, inputs_entry, plan_corpus, read_plan, write_plan
from electra.data.shards import (
    MANIFEST,
    PLAN,
    SPLITS,
    TOKENIZER,
    UNITS,
    Manifest,
    ShardEntry,
    Split,
    SplitEntry,
    read_manifest,
    token_dtype,
    verify_shards,
)
from electra.data.tokenizer import load_tokenizer, tokenizer_bytes, tokenizer_hash, vocabulary_size
from electra.data.units import Done, UnitEntry, damage, fingerprints, read_unit_entry, run_unit, without

log = logging.getLogger(__name__)

Engine = Literal["local", "ray"]
MOST_WORKERS = 1024
_NAMED_MISSING = 20


def prepare_settings(heldout_share: float, unit_bytes: int, more: Mapping[str, Any]) -> PrepareSettings:
    """The settings of a preparation. `more` are those of reading files (`CorpusSettings`), filters and duplicates."""
    reading = {name: value for name, value in more.items() if name in CorpusSettings.model_fields}
    others = {name: value for name, value in more.items() if name not in reading}
    tree = {"corpus": reading, "heldout_share": heldout_share, "unit_bytes": unit_bytes, **others}
    return validate(PrepareSettings, tree)


def prepare(
    inputs: Sequence[Place],
    out: Place,
    tokenizer: Place,
    settings: PrepareSettings | None = None,
    workers: int | None = None,
    engine: Engine = "local",
) -> Manifest:
    """Prepares token shards in `out` and returns their manifest. After an interruption, call it again: it does only what is missing."""
    workers = cpu_count() if workers is None else workers
    if not 1 <= workers <= MOST_WORKERS:
        raise SettingsError(f"cannot run {workers} workers. Give at least 1 and at most {MOST_WORKERS:,}.")
    if engine not in get_args(Engine):
        arrays = "arrays of jobs: prepare-plan, prepare-unit, prepare-finish"
        raise SettingsError(f"engine {engine!r} is unknown. There are local and ray; for {arrays}.", ("engine",))
    # other processes cannot see memory://
    is_alone = any(isinstance(path, RemotePath) and path.in_this_process for path in (*inputs, out))
    if engine == "ray" and is_alone:
        raise SettingsError("memory:// is seen by one process only: use the local engine, or another place.")
    preparation = _Preparation(inputs, out, tokenizer, settings)
    with lock(out), ending_at_signals(preempted):
        if manifest := preparation.finished():
            return manifest
        plan = preparation.begin(replace=isinstance(out, Path))
        run = _Run(plan, out, range(len(plan.units)))
        with run.writing():
            if engine == "ray":
                run.follow(run_ray(plan, out, workers))
            elif is_alone:
                run.follow(map(run_unit, plan.all_units(out)))
            else:
                run.follow(run_local(plan, out, workers))
            return _finish(plan, out)


def plan_units(
    inputs: Sequence[Place], out: Place, tokenizer: Place, settings: PrepareSettings | None = None
) -> PreparePlan | None:
    """Writes the plan and the tokenizer to `out`, for `run_share` on any machine. Returns None if everything is done already."""
    preparation = _Preparation(inputs, out, tokenizer, settings)
    with lock(out, required=False), ending_at_signals(preempted):
        return None if preparation.finished() else preparation.begin(replace=False)


def run_share(out: Place, index: int, count: int) -> int:
    """Runs every `count`-th unit of the plan in `out`, starting at `index`; returns how many. Two processes may run the same share."""
    if not 0 <= index < count:
        raise SettingsError(f"{index}/{count} is not a part of the units: of four they are 0/4, 1/4, 2/4 and 3/4.")
    if _is_finished(out):
        return 0
    read_plan(out)  # raises an error before a folder without a plan is locked
    with lock(out, shared=True, required=False), ending_at_signals(preempted):
        plan = read_plan(out)
        run = _Run(plan, out, range(index, len(plan.units), count))
        with run.writing():
            return run.follow(run_unit(plan.unit(number, out)) for number in run.numbers)


def finish_units(out: Place) -> Manifest:
    """Writes and returns the manifest; refuses to if a unit of the plan in `out` is missing or damaged."""
    if _is_finished(out):
        return read_manifest(out)
    read_plan(out)
    with lock(out, required=False), ending_at_signals(preempted):
        plan = read_plan(out)
        with _Run(plan, out).writing():
            return _finish(plan, out, verify=True)


def _is_finished(out: Place) -> bool:
    """Whether `out` is complete: a job of an array may start late, or twice."""
    finished = (out / MANIFEST).exists() and not (out / UNITS / PLAN).exists()
    if finished:
        log.info("%s is already prepared: nothing to do.", out)
    return finished


class _Preparation:
    """A requested preparation, checked against what the output folder already holds."""

    def __init__(self, inputs: Sequence[Place], out: Place, tokenizer: Place, settings: PrepareSettings | None) -> None:
        self.out, self.settings = out, settings or PrepareSettings()
        self.tokenizer = load_tokenizer(tokenizer)
        self.sha256 = tokenizer_hash(self.tokenizer)
        self.corpus = Corpus(inputs, self.settings.corpus)
        if language := self.settings.filters.language:
            identifier(language)
        for path in inputs:
            if is_inside(out, path):
                raise SettingsError(f"{out} is inside the input {path}. Choose a folder outside it.")
        ours = any((out / name).exists() for name in (MANIFEST, UNITS, ".lock"))
        if not ours and out.is_dir() and next(out.iterdir(), None):
            raise SettingsError(f"{out} is not empty and not made by prepare. Choose another folder.")

    def finished(self) -> Manifest | None:
        """The existing manifest, if it is what this run would write; None if shards are damaged or missing, which are then
        made again."""
        if not (self.out / MANIFEST).exists():
            return None
        manifest = read_manifest(self.out)
        before = {"tokenizer": manifest.tokenizer_sha256, "inputs": dump(manifest.inputs)}
        self._refuse_others(_with_defaults(manifest.settings) | before, "shards")
        shards = [shard for split in manifest.splits.values() for shard in split.shards]
        problems = [damage(self.out, shards)] if isinstance(self.out, RemotePath) else verify_shards(self.out)
        if any(problems):
            log.warning("%s Preparing again.", " ".join(map(str, problems[:3])))
            return None
        log.info("%s is already prepared: nothing to do.", self.out)
        made, local = status(self.out / MANIFEST)[1], [it for it in self.corpus.sources if isinstance(it.path, Path)]
        if newer := [it.path for it in local if isinstance(self.out, Path) and int(it.stamp) > int(made)]:
            text = "%s was changed after %s was prepared, and is not read again. If its text has changed, delete %s."
            log.warning(text, newer[0], self.out, self.out)
        _tidy(self.out, manifest)
        return manifest

    def _refuse_others(self, before: dict[str, Any], what: str) -> None:
        now = {"tokenizer": self.sha256, "inputs": dump(inputs_entry(self.corpus.sources))}
        if changes := "; ".join(differences(before, dump(self.settings) | now)):
            raise SettingsError(
                f"{self.out} already holds other {what} ({changes}). Choose another folder, or delete it."
            )

    def begin(self, replace: bool) -> PreparePlan:
        """Writes the plan and returns it. Unless `replace`, others may be working on a plan there, and only an equal one replaces it."""
        if not replace and (self.out / UNITS / PLAN).exists():
            plan = read_plan(self.out)
            before = {"tokenizer": plan.tokenizer_sha256, "inputs": dump(inputs_entry(plan.files))}
            self._refuse_others(dump(plan.settings) | before, "units")
        plan = plan_corpus(self.corpus, self.settings, self.sha256, vocabulary_size(self.tokenizer))
        self._note_division(plan, replace)
        with _Run(plan, self.out).writing():
            if isinstance(self.out, Path):
                self._check_space(self.out)
                (self.out / UNITS).mkdir(exist_ok=True)
            for folder in (self.out, self.out / UNITS) if replace else ():
                remove_leftovers(folder)
            write_atomically(self.out / TOKENIZER, tokenizer_bytes(self.tokenizer))
            write_plan(self.out, plan)
        return plan

    def _note_division(self, plan: PreparePlan, replace: bool) -> None:
        """Notes or refuses a plan of an earlier version, which did not divide JSON lines: its units must not be mixed with this plan's."""
        with suppress(DataError, CorruptError):
            before = read_plan(self.out)
            if (before.settings, before.files) != (plan.settings, plan.files) or before.units == plan.units:
                return
            what = f"the same text in {counted(len(before.units), 'unit')}, which an earlier version split differently"
            if not replace:
                remedy = "Finish it (prepare-unit, prepare-finish), choose another folder, or delete it"
                raise SettingsError(f"{self.out} holds {what}: now it would be {len(plan.units):,}. {remedy}.")
            log.info("%s holds %s: it is prepared again from the start.", self.out, what)

    def _check_space(self, out: Path) -> None:
        """Shards take a third to a half of the size of plain text, and more than compressed text: at least a third is needed."""
        needed = self.corpus.size // 3 - sum(path.stat().st_size for path in out.glob("*.safetensors"))
        free = shutil.disk_usage(out).free
        if needed > free:
            sizes = f"{needed:,} bytes, {free:,} are free"
            raise MachineError(f"{out} needs at least {sizes}. Free some, or choose another disk.")


def is_inside(out: Place, folder: Place) -> bool:
    if isinstance(out, Path) and isinstance(folder, Path):
        return out.resolve().is_relative_to(folder.resolve())
    return isinstance(out, RemotePath) and f"{out}/".startswith(f"{str(folder).rstrip('/')}/")


def _with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Adds the defaults of settings that did not exist when an older folder was made."""
    try:
        return dump(PrepareSettings.model_validate(settings))
    except ValidationError:
        return settings


@dataclass
class _Run:
    """Some units of a plan, and their progress."""

    plan: PreparePlan
    out: Place
    numbers: Sequence[int] = ()
    input_bytes: int = 0
    shard_bytes: int = 0

    def follow(self, results: Iterator[Done]) -> int:
        """Waits for the units, reports their progress, and returns how many there were."""
        size = sum(end - begin for number in self.numbers for _, begin, end in self.plan.units[number])
        units = encoded_bytes = tokens = 0
        with Progress("prepare", size, unit="bytes", seconds_between_lines=5.0) as progress:
            for done in results:
                units += done.is_unit
                encoded_bytes += done.encoded_bytes
                tokens += sum(shard.tokens for shard in done.shards)
                self.input_bytes += done.input_bytes
                self.shard_bytes += sum(shard.bytes for shard in done.shards)
                progress.advance(self.input_bytes)
                # the remaining time is measured in bytes of files, the rate in bytes of text (compressed files hold more)
                progress.report(f"{encoded_bytes / 1e6 / progress.seconds:.1f} MB/s · {tokens:,} tokens")
        return units

    @contextmanager
    def writing(self) -> Iterator[None]:
        try:
            yield
        except DiskFullError as error:
            free, left = shutil.disk_usage(str(self.out)).free, self.plan.size - self.input_bytes
            needed = left * self.shard_bytes // self.input_bytes if self.input_bytes else left // 3
            raise DiskFullError(
                f"{self.out} is full: about {needed:,} more bytes needed, {free:,} free ({str(error).partition(': ')[0]}). "
                "What is done is kept: free some space and run the same command again."
            ) from None
        except OSError as error:
            raise MachineError(f"{error.filename or self.out} cannot be written: {error.strerror or error}.") from None


def _finish(plan: PreparePlan, out: Place, verify: bool = False) -> Manifest:
    """Writes the manifest of what the units made, in the order of the plan."""
    shards: dict[Split, list[ShardEntry]] = {split: [] for split in SPLITS}
    counts, removed, empty, problems = Counter[str](), Counter[str](), Counter[int](), {}
    entries: dict[int, UnitEntry] = {}
    for unit in plan.all_units(out):
        entry = read_unit_entry(unit, verify)
        if isinstance(entry, str):
            problems[unit.number] = entry
            continue
        entries[unit.number] = entry
        removed.update(entry.removed)
        for split, shard in entry.shards:
            shards[split].append(shard)
        counts.update(documents=entry.documents, skipped=entry.skipped, replaced=entry.replaced)
        empty.update(plan.units[unit.number][section][0] for section in entry.empty)
    if problems:
        raise _incomplete(out, plan, problems)
    if not counts["documents"]:
        raise no_documents(plan.input_names, counts["skipped"], plan.settings.corpus.text_key)
    shards = _without_copies(plan, out, entries, shards, removed)
    if not shards["train"]:
        filtered = f"the filters removed {counted(removed.total(), 'document')}"
        reason = filtered if removed.total() else "the tokenizer finds no token in the text"
        raise DataError(f"{plan.input_names[0]}: nothing left, {reason}.")
    sections = Counter(source for unit in plan.units for source, *_ in unit)
    manifest = Manifest(
        vocab_size=plan.vocab_size,
        tokenizer_sha256=plan.tokenizer_sha256,
        dtype=token_dtype(plan.vocab_size),
        settings=dump(plan.settings),
        inputs=inputs_entry(plan.files),
        skipped_documents=counts["skipped"],
        replaced_documents=counts["replaced"],
        empty_files=sum(count == sections[source] for source, count in empty.items()),
        removed_documents={name: count for name, count in sorted(removed.items()) if count},
        splits={split: _sums(entries) for split, entries in shards.items()},
    )
    write_atomically(out / MANIFEST, (manifest.model_dump_json(indent=1) + "\n").encode())
    _tidy(out, manifest)
    return manifest


Shards = dict[Split, list[ShardEntry]]


def _without_copies(
    plan: PreparePlan, out: Place, entries: dict[int, UnitEntry], shards: Shards, removed: Counter[str]
) -> Shards:
    """The shards without duplicates. Held-out documents come first, so that of copies in both splits the held-out one stays."""
    settings = plan.settings
    if settings.fingerprint_share is None:
        return shards

    def stream(*splits: Split) -> Iterator[np.ndarray]:
        for split in splits:
            for number, entry in entries.items():
                yield from fingerprints(plan.unit(number, out), entry, split)

    held = sum(shard.documents for shard in shards["heldout"])
    if settings.duplicates == "keep":
        copies = in_heldout(lambda: stream("heldout"), lambda: stream("train"))
        copies = np.concatenate([np.zeros(held, bool), copies])
        removed["copies of held-out documents"] = int(copies.sum())
    else:
        everything = partial(stream, "heldout", "train")
        copies = repeated(everything, range(1))
        removed["exact copies"] = int(copies.sum())
        if settings.duplicates == "near":
            copies |= repeated(everything, range(1, 1 + bands_for(settings.near_share)[0]))
            removed["near copies"] = int(copies.sum()) - removed["exact copies"]
    kept: Shards = {"train": [], "heldout": []}
    start = 0
    for split in ("heldout", "train"):
        for shard in shards[split]:
            its = copies[start : start + shard.documents]
            start += shard.documents
            entry = without(out, shard, its) if its.any() else shard
            kept[split] += [entry] if entry else []
    return kept


def _incomplete(out: Place, plan: PreparePlan, problems: dict[int, str]) -> DataError:
    names = ", ".join(map(str, list(problems)[:_NAMED_MISSING])) + (", …" if len(problems) > _NAMED_MISSING else "")
    number, problem = next(iter(problems.items()))
    return DataError(
        f"{out}: {len(problems)} of {len(plan.units)} units are not done: {names} (unit {number} {problem}). "
        "Run their shares again, then finish."
    )


def _sums(shards: list[ShardEntry]) -> SplitEntry:
    sums = {name: sum(getattr(shard, name) for shard in shards) for name in ("tokens", "documents", "lines")}
    return SplitEntry(shards=tuple(shards), **sums)


def _tidy(out: Place, manifest: Manifest) -> None:
    """Removes everything of a preparation that the manifest does not name."""
    remove_leftovers(out)
    named = {shard.file for split in manifest.splits.values() for shard in split.shards}
    paths: list[Place] = list(out.iterdir())
    for path in paths:
        is_shard = path.name.startswith(("train-", "heldout-")) and path.name.endswith(".safetensors")
        if is_shard and path.name not in named:
            path.unlink()
    if isinstance(out, RemotePath):
        (out / UNITS).remove()
    else:
        shutil.rmtree(out / UNITS, ignore_errors=True)
