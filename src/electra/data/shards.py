"""Token shards: the format, and reading it through memory maps. docs/formats.md describes both.

A shard is a safetensors file of three arrays: all tokens concatenated, and the ends of documents and of lines in them.
The manifest is written last and holds the size and sha256 of every shard; a folder without one is unfinished.
"""

import hashlib
import json
import math
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from electra.base.config import Settings
from electra.base.errors import CorruptError, DataError, ElectraError, MachineError, counted
from electra.base.files import parse_json, read_bytes, read_model, unreadable
from electra.base.remote import Place

MANIFEST = "manifest.json"
UNITS = "units"
PLAN = "plan.json"
"""In UNITS, until the manifest is written."""
TOKENIZER = "tokenizer.json"
Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
MOST_TOKENS = 1 << 24
"""The largest vocabulary. A damaged or hostile id beyond it would only cost memory."""

ENOUGH_HELD_OUT = 5000
"""Tokens. About a tenth of them is replaced, and the standard error of an AUC near 0.8 is 0.27 / sqrt(number of replaced tokens)
(Hanley and McNeil, 1982): with more tokens, chance (two standard errors) moves it by less than 0.025, which is what recipes differ by."""

_SAFETENSORS_NAMES = {"uint16": "U16", "uint32": "U32", "int64": "I64"}


Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class ShardEntry(Settings):
    file: str = Field(pattern=r"^(train|heldout)-\d{5,}(-\d{5,})?(-k)?\.safetensors$")
    bytes: Count
    sha256: str
    tokens: Count
    documents: Count
    lines: Count


class SplitEntry(Settings):
    shards: tuple[ShardEntry, ...]
    tokens: Count
    documents: Count
    lines: Count

    @model_validator(mode="after")
    def sums_agree(self) -> "SplitEntry":
        for name in ("tokens", "documents", "lines"):
            if getattr(self, name) != sum(getattr(shard, name) for shard in self.shards):
                raise ValueError(f"{name} is not the sum over its shards")
        return self


class InputsEntry(Settings):
    """Which files were read: their number, their bytes on disk, and a hash over their names and sizes."""

    files: int
    bytes: int
    sha256: str


class Manifest(Settings):
    version: Literal[1] = 1
    vocab_size: int = Field(ge=1, le=MOST_TOKENS)
    tokenizer_sha256: str
    dtype: Literal["uint16", "uint32"]
    settings: dict[str, Any]
    inputs: InputsEntry
    skipped_documents: int
    replaced_documents: int
    empty_files: int
    removed_documents: dict[str, Count] = Field(default_factory=dict)  # by each filter, and as copies
    splits: dict[Split, SplitEntry]

    @field_validator("splits")
    @classmethod
    def both_are_there(cls, splits: dict[Split, SplitEntry]) -> dict[Split, SplitEntry]:
        if missing := [name for name in SPLITS if name not in splits]:
            raise ValueError(f"there is no {missing[0]}")
        return splits


@dataclass(frozen=True)
class Shard:
    """One memory-mapped file. `documents` and `lines` hold the offset in `tokens` just after each one's last token;
    every end of a document is also an end of a line, and none of them is empty."""

    tokens: np.ndarray
    documents: np.ndarray
    lines: np.ndarray


@dataclass(frozen=True)
class TokenData:
    """One split of a prepared folder."""

    shards: tuple[Shard, ...]
    manifest: Manifest

    def token_counts(self) -> np.ndarray:
        """How often each token of the vocabulary occurs in the split."""
        counts = np.zeros(self.manifest.vocab_size, dtype=np.int64)
        for shard in self.shards:
            counts += np.bincount(shard.tokens, minlength=len(counts))
        return counts


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def json_hash(text: str) -> str:
    """sha256 of JSON in one fixed spelling, so that spacing and the order of keys do not matter."""
    spelling = json.dumps(parse_json(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(spelling.encode()).hexdigest()


def few_held_out(manifest: Manifest) -> str:
    """A warning about held-out metrics if little text is held out; empty if there is none at all, or enough."""
    tokens = manifest.splits["heldout"].tokens
    if not 0 < tokens < ENOUGH_HELD_OUT:
        return ""
    chance = 2 * 0.27 / math.sqrt(tokens / 10)
    what = f"only {counted(tokens, 'token')} held out: chance alone moves their AUC by {chance:.2f}"
    return f"{what}. Hold out a larger fraction, or prepare more text, to reach {ENOUGH_HELD_OUT:,} or more."


def read_manifest(folder: Place) -> Manifest:
    if not (folder / MANIFEST).exists():
        if (folder / UNITS / PLAN).exists():
            again = 'Run the same "electra prepare" again, or "electra prepare-finish" where jobs did its units'
            raise DataError(f"{folder} has no {MANIFEST}: its preparation is not finished. {again}.")
        what = f"has no {MANIFEST}" if folder.exists() else "does not exist"
        raise DataError(f'{folder} {what}. Run "electra prepare" to build token shards there.')
    return read_model(folder / MANIFEST, Manifest, 'remove it and run "electra prepare" again')


def manifest_hash(folder: Path) -> str:
    read_manifest(folder)  # raises an error if there is none
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def open_data(folder: Path, split: Split = "train", verify: bool = True) -> TokenData:
    """The tokens of a split, memory-mapped. Sizes are always checked, contents (about 1.5 GB per second) if `verify`: a
    flipped bit would otherwise show hours later as a strange loss, or never."""
    manifest = read_manifest(folder)
    _check_tokenizer(folder, manifest)
    entries = manifest.splits[split].shards if split in manifest.splits else ()
    if not entries:
        raise DataError(f"{folder} has no {split} documents. Prepare more text, or hold out another fraction.")
    _allow_open_files(len(entries))
    return TokenData(tuple(_open_shard(folder, entry, manifest, verify) for entry in entries), manifest)


def verify_shards(folder: Path) -> list[str]:
    """Every problem of a prepared folder, one line each; empty if it is intact."""
    try:
        manifest = read_manifest(folder)
    except ElectraError as error:
        return [str(error)]
    entries = [entry for split in manifest.splits.values() for entry in split.shards]
    checks: list[Callable[[], object]] = [partial(_check_tokenizer, folder, manifest)]
    checks += [partial(_open_shard, folder, entry, manifest, True) for entry in entries]
    problems = []
    for check in checks:
        try:
            check()
        except CorruptError as error:
            problems.append(str(error))
    return problems


def _open_shard(folder: Path, entry: ShardEntry, manifest: Manifest, verify: bool) -> Shard:
    path = folder / entry.file
    try:
        if (size := path.stat().st_size) != entry.bytes:
            raise _damaged(path, f"expected {entry.bytes} bytes, found {size}")
        data = np.memmap(path, np.uint8, "r")
    except FileNotFoundError:
        raise _damaged(path, "the file is missing") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if verify and (digest := hashlib.sha256(data.data).hexdigest()) != entry.sha256:
        raise _damaged(path, f"expected sha256 {entry.sha256}, found {digest}")
    shard = _parse(path, entry, data, manifest.dtype)
    if verify:
        _check_arrays(path, shard, manifest.vocab_size)
    return shard


def _check_tokenizer(folder: Path, manifest: Manifest) -> None:
    path = folder / TOKENIZER
    try:
        digest = json_hash(read_bytes(path).decode("utf-8"))
    except MachineError:
        raise
    except ValueError as error:  # a CorruptError is one
        raise CorruptError(f'{path} cannot be used ({error}). Run "electra prepare" again.') from None
    if digest != manifest.tokenizer_sha256:
        what = f"is not the tokenizer of these shards: expected {manifest.tokenizer_sha256}, found {digest}"
        raise CorruptError(f'{path} {what}. Put the right one back, or run "electra prepare" again.')


def _allow_open_files(count: int) -> None:
    """Raises the limit on open files if needed: a memory map keeps its file open, and the usual soft limit of 1,024 is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = Path("/proc/self/fd")  # includes splits that are open already
    wanted = (len(list(descriptors.iterdir())) if descriptors.is_dir() else 4096) + count + 64
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise MachineError(f'{count} shards need {wanted} open files, {hard} are allowed. Raise "ulimit -n".')
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _damaged(path: Path, what: str) -> CorruptError:
    return CorruptError(f'{path} is damaged: {what}. Delete its folder and run "electra prepare" again.')


def _parse(path: Path, entry: ShardEntry, data: np.ndarray, dtype: str) -> Shard:
    """The safetensors header is untrusted: every offset is checked before it is used."""
    try:
        length = int.from_bytes(data[:8].tobytes(), "little")
        header, body = parse_json(data[8 : 8 + length].tobytes()), data[8 + length :]
        arrays = {}
        for name, kind in (("tokens", dtype), ("documents", "int64"), ("lines", "int64")):
            little_endian = np.dtype(kind).newbyteorder("<")  # numpy converts on big-endian machines
            begin, count = header[name]["data_offsets"][0], getattr(entry, name)
            end = begin + count * little_endian.itemsize
            expected = {"dtype": _SAFETENSORS_NAMES[kind], "shape": [count], "data_offsets": [begin, end]}
            if header[name] != expected or not 0 <= begin <= end <= len(body):
                raise ValueError(f"{name} is {header[name]}, {expected} expected")
            arrays[name] = body[begin:end].view(little_endian)
        return Shard(**arrays)
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(path, f"its header does not fit ({error})") from None


def _check_arrays(path: Path, shard: Shard, vocab_size: int) -> None:
    beyond = shard.tokens >= vocab_size
    if beyond.any():
        where = f"token {shard.tokens[beyond.argmax()]} at position {beyond.argmax()}"
        remedy = 'Run "electra prepare" again with the right tokenizer'
        raise CorruptError(f"{path}: {where} is beyond the vocabulary of {vocab_size}. {remedy}.")
    for name, ends in (("documents", shard.documents), ("lines", shard.lines)):
        if not len(ends) or ends[0] <= 0 or ends[-1] != len(shard.tokens) or (np.diff(ends) <= 0).any():
            raise _damaged(path, f"the ends of {name} do not increase up to {len(shard.tokens)}")
    if not np.isin(shard.documents, shard.lines, assume_unique=True).all():
        raise _damaged(path, "a document ends inside a line")
