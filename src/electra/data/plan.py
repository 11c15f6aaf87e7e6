"""The plan of `prepare`: a list of units of work, which any number of machines may share.

A unit is a byte range of a large file, a few small files, or one file that must be read from its beginning (a compressed one, for
example). The list depends only on the names, sizes and formats of the files. A unit's key is a hash of everything that determines its
output, so a unit that is done under that key need not be done again, and two processes that do the same unit write the same bytes.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal
from urllib.parse import quote, unquote

from pydantic import Field, model_validator

from electra.base.config import Settings, dump
from electra.base.errors import DataError, SettingsError, counted
from electra.base.files import read_model, write_atomically
from electra.base.remote import Place, as_place
from electra.data.corpus import Corpus, CorpusSettings, divides
from electra.data.files import Section, Source
from electra.data.filters import FilterSettings, removed_by, text_hash
from electra.data.shards import MOST_TOKENS, PLAN, UNITS, InputsEntry

_HASHES = 1 << 64
SMALL_UNIT = 1 << 20
MOST_SMALL_UNITS = 10_000
_BYTES = "surrogateescape"
_SAFE = "".join(map(chr, range(32, 127))).replace("%", "")


class PrepareSettings(Settings):
    """The fraction `heldout_share` of the documents is held out for evaluation, chosen by the hash of their text, so that copies of
    a document are in the same split; a training document that differs from a held-out one only in case and spacing is removed.
    `unit_bytes` of text make one unit of work, and one shard. `duplicates` "exact" removes such copies everywhere, "near" also
    documents that share the fraction `near_share` of their word 5-grams with an earlier one."""

    corpus: CorpusSettings = CorpusSettings()
    heldout_share: float = Field(default=0.01, ge=0, le=0.5)
    unit_bytes: int = Field(default=4 << 20, ge=1, le=1 << 32)
    filters: FilterSettings = FilterSettings()
    duplicates: Literal["keep", "exact", "near"] = "keep"
    near_share: float = Field(default=0.8, ge=0.3, le=1)

    @property
    def fingerprint_share(self) -> float | None:
        """The `share` for `fingerprint`; None if nothing needs fingerprints."""
        if self.duplicates == "keep" and not self.heldout_share:
            return None
        return self.near_share if self.duplicates == "near" else 0.0


class PlannedSource(Settings):
    path: str
    name: str
    size: int = Field(ge=0)
    stamp: str


class PreparePlan(Settings):
    """`units` are lists of (number of the source, begin, end). A document is held out if its hash is below `threshold`."""

    version: int = Field(default=1, ge=1, le=1)
    settings: PrepareSettings
    tokenizer_sha256: str
    vocab_size: int = Field(ge=1, le=MOST_TOKENS)
    threshold: str = Field(pattern=r"^[0-9]{1,20}$")
    inputs: tuple[str, ...]
    sources: tuple[PlannedSource, ...]
    units: tuple[tuple[tuple[int, int, int], ...], ...]

    @model_validator(mode="after")
    def units_are_of_the_sources(self) -> "PreparePlan":
        for source, begin, end in (section for unit in self.units for section in unit):
            if not (0 <= source < len(self.sources) and 0 <= begin <= end <= self.sources[source].size):
                raise ValueError(f"source {source} has no bytes {begin} to {end}")
        return self

    @cached_property
    def files(self) -> tuple[Source, ...]:
        """The sources, with names as the file system has them: they need not be valid UTF-8."""
        texts = [(unquote(it.path, errors=_BYTES), unquote(it.name, errors=_BYTES)) for it in self.sources]
        pairs = zip(texts, self.sources, strict=True)
        return tuple(Source(as_place(path), name, it.size, it.stamp) for (path, name), it in pairs)

    @property
    def size(self) -> int:
        return sum(source.size for source in self.sources)

    @property
    def input_names(self) -> list[str]:
        return [unquote(name, errors=_BYTES) for name in self.inputs]

    @cached_property
    def header(self) -> str:
        """The beginning of the text that each unit's key is the hash of, the same for all."""
        return json.dumps([self.version, dump(self.settings), self.tokenizer_sha256, self.threshold], sort_keys=True)

    def unit(self, number: int, out: Place) -> "Unit":
        step, files = self.settings.unit_bytes, self.files
        sections = tuple(Section(files[source], begin, end, step) for source, begin, end in self.units[number])
        rows = [[section.source.name, section.source.size, section.source.stamp, *section[1:]] for section in sections]
        key = hashlib.sha256(f"{self.header}\n{json.dumps([number, rows])}".encode()).hexdigest()
        return Unit(number, key, sections, self.settings, int(self.threshold), self.tokenizer_sha256, out)

    def all_units(self, out: Place) -> "Iterator[Unit]":
        return (self.unit(number, out) for number in range(len(self.units)))


@dataclass(frozen=True)
class Unit:
    """One piece of work, with everything that a worker needs to know."""

    number: int
    key: str
    sections: tuple[Section, ...]
    settings: PrepareSettings
    threshold: int
    tokenizer_sha256: str
    out: Place

    @property
    def size(self) -> int:
        return sum(section.end - section.begin for section in self.sections)

    @property
    def is_one_file(self) -> bool:
        return len(self.sections) == 1 and self.sections[0].whole


def plan_corpus(corpus: Corpus, settings: PrepareSettings, tokenizer_sha256: str, vocab_size: int) -> PreparePlan:
    step = settings.unit_bytes
    units: list[list[tuple[int, int, int]]] = []
    size = 0
    for number, source in enumerate(corpus.sources):
        divided = source.size > step and divides(source.path, settings.corpus)
        for begin in range(0, source.size, step) if divided else (0,):
            end = min(begin + step, source.size) if divided else source.size
            if not units or size + end - begin > step:
                units.append([])
                size = 0
            units[-1].append((number, begin, end))
            size += end - begin
            if len(units) > MOST_SMALL_UNITS and step < SMALL_UNIT:
                raise _too_many_units(corpus, step)
    return PreparePlan(
        settings=settings,
        tokenizer_sha256=tokenizer_sha256,
        vocab_size=vocab_size,
        threshold=str(heldout_threshold(corpus, settings)),
        inputs=tuple(_spelling(str(path)) for path in corpus.inputs),
        sources=tuple(
            PlannedSource(path=_spelling(str(it.path.resolve())), name=_spelling(it.name), size=it.size, stamp=it.stamp)
            for it in corpus.sources
        ),
        units=tuple(map(tuple, units)),
    )


def _too_many_units(corpus: Corpus, step: int) -> SettingsError:
    """Each unit becomes a shard and several files. Two neighbours are longer than one step, so twice the mean is enough."""
    enough = min(SMALL_UNIT, -(-2 * corpus.size // (MOST_SMALL_UNITS - 1)))
    return SettingsError(
        f"units of {counted(step, 'byte')} would make more than {MOST_SMALL_UNITS:,} shards of {counted(corpus.size, 'byte')}. "
        f"Give at least {enough} as unit_bytes, or leave it out.",
        ("unit_bytes",),
    )


def inputs_entry(sources: Sequence[Source]) -> InputsEntry:
    names = "".join(f"{source.name}\0{source.size}\n" for source in sources)
    digest = hashlib.sha256(names.encode("utf-8", _BYTES)).hexdigest()
    return InputsEntry(files=len(sources), bytes=sum(source.size for source in sources), sha256=digest)


def _spelling(name: str) -> str:
    return quote(name, safe=_SAFE, errors=_BYTES)


def heldout_threshold(corpus: Corpus, settings: PrepareSettings) -> int:
    """A document is held out if its hash is below this threshold. With few documents, all may end up on one side of it; then
    the threshold moves just past the nearest one. Reading ends as soon as both sides have a document, mostly after a
    few hundred."""
    wanted = int(settings.heldout_share * _HASHES)
    smallest, largest = _HASHES, -1
    for text, continues in corpus.read() if wanted else ():
        if not continues and not removed_by(text, settings.filters):
            value = text_hash(text)
            smallest, largest = min(smallest, value), max(largest, value)
            if smallest < wanted <= largest:
                return wanted
    if smallest >= largest:  # no two different documents: the only one is to train on
        return 0
    return smallest + 1 if smallest >= wanted else largest


def write_plan(out: Place, plan: PreparePlan) -> None:
    write_atomically(out / UNITS / PLAN, plan.model_dump_json().encode())


def read_plan(out: Place) -> PreparePlan:
    path = out / UNITS / PLAN
    if not path.exists():
        raise DataError(f'{out} has no plan. Run "electra prepare-plan" first.')
    return read_model(path, PreparePlan, 'run "electra prepare-plan" again')
