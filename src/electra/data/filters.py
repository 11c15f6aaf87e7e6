"""Which documents are worth training on.

Filters use what can be counted: length, script, symbols, words, lines. All are off unless set. They are coarse on purpose and
need no model, except for the language: that is detected by py3langid, a naive Bayes classifier of byte n-grams.

Copies are documents that are the same except for case, spacing and forms of characters, or nearly the same. A document's fingerprint
is a hash of its normalised text and, if near copies are looked for, hashes of bands of its MinHash signature (Broder 1997). With J the
Jaccard similarity of two documents' sets of word 5-grams (in both / in either), one position of the signatures agrees with probability
J, a band of r positions with J^r, and at least one of b bands with 1 - (1 - J^r)^b. Two documents are near copies if a band agrees, without
a second comparison. The first of several copies is kept, and held-out documents come first.
"""

import math
import re
import tempfile
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from electra.base.config import Settings
from electra.base.errors import MachineError, SettingsError

Script = Literal[
    "", "latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "bengali", "thai", "hangul", "kana", "han"
]
_SCRIPTS = {
    "latin": "A-Za-zªºÀ-ÖØ-öø-ɏḀ-ỿ",
    "cyrillic": "\u0400-\u052f",
    "greek": "\u0370-\u03ff\u1f00-\u1fff",
    "arabic": "\u0600-\u06ff\u0750-\u077f",
    "hebrew": "\u0590-\u05ff",
    "devanagari": "\u0900-\u097f",
    "bengali": "\u0980-\u09ff",
    "thai": "\u0e00-\u0e7f",
    "hangul": "\uac00-\ud7a3\u1100-\u11ff\u3130-\u318f",
    "kana": "\u3040-\u30ff\u3400-\u9fff",  # Japanese is written with both
    "han": "\u3400-\u9fff\U00020000-\U0003134f",
}
_LETTERS = {name: re.compile(f"[{letters}]") for name, letters in _SCRIPTS.items()}
_ENDS = tuple(".!?…\"'”’»)」』。！？؟।")
_READ = 2000  # characters
_SYMBOL = re.compile(r"[^\w\s]|_")
SHINGLE = 5
PERMUTATIONS = 128
RECALL = 0.9
_MEMORY = 1 << 28
_SHINGLES_AT_ONCE = 1 << 12
# Scripts that write without spaces: Thai, Lao, Myanmar, Khmer, kana, Han. There a character counts as a word.
_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_MULTIPLY = np.uint64(0x9E3779B97F4A7C15)

Fingerprints = np.ndarray
"""uint64 of shape (documents, 1 + bands): the hash of the text, then the bands."""


class FilterSettings(Settings):
    """A document is removed if it has fewer than `min_characters` or more than `max_characters` (0: any number), if less than
    the fraction `script_share` of its letters is in `script`, if its first 2,000 characters are not in `language`, if more than
    `symbol_share` of its non-space characters are neither letters nor digits, if more than `repeated_lines` of its characters are in
    lines that repeat an earlier line, if the mean length of its words is not from `min_word_length` to `max_word_length` (0: any), or if
    less than `punctuated_lines` of its lines end in punctuation. A document too long for one piece is judged by its first piece."""

    min_characters: int = Field(default=0, ge=0)
    max_characters: int = Field(default=0, ge=0)
    script: Script = ""
    script_share: float = Field(default=0.5, ge=0, le=1)
    language: str = ""
    symbol_share: float = Field(default=1.0, ge=0, le=1)
    repeated_lines: float = Field(default=1.0, ge=0, le=1)
    min_word_length: float = Field(default=0.0, ge=0)
    max_word_length: float = Field(default=0.0, ge=0)
    punctuated_lines: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def something_may_stay(self) -> "FilterSettings":
        for what in ("characters", "word_length"):
            least, most = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if least > most > 0:
                raise ValueError(f"min_{what} ({least:g}) is above max_{what} ({most:g}): no document would stay")
        return self


def removed_by(text: str, filters: FilterSettings) -> str | None:
    """The name of the first filter that removes a document; None if it stays."""
    if len(text) < filters.min_characters:
        return "min_characters"
    if filters.max_characters and len(text) > filters.max_characters:
        return "max_characters"
    if filters.script:
        letters, own = (sum(map(str.isalpha, it)) for it in (text, _LETTERS[filters.script].findall(text)))
        if own < filters.script_share * max(1, letters):
            return "script_share"
    if filters.language and identifier(filters.language)(text[:_READ])[0] != filters.language:
        return "language"
    if filters.symbol_share < 1:
        visible = len("".join(text.split()))
        # a vowel sign or an accent is part of its letter, although \w has no marks
        symbols = sum(unicodedata.category(it)[0] != "M" for it in _SYMBOL.findall(text))
        if symbols > filters.symbol_share * visible:
            return "symbol_share"
    if filters.repeated_lines < 1:
        lines = Counter(line.strip() for line in text.split("\n"))
        again = sum(len(line) * (count - 1) for line, count in lines.items())
        if again > filters.repeated_lines * sum(len(line) * count for line, count in lines.items()):
            return "repeated_lines"
    if filters.min_word_length or filters.max_word_length:
        words = text.split()
        if not filters.min_word_length <= sum(map(len, words)) / len(words) <= (filters.max_word_length or math.inf):
            return "word_length"
    if filters.punctuated_lines:
        full = [line.rstrip() for line in text.split("\n") if line.strip()]
        if sum(line.endswith(_ENDS) for line in full) < filters.punctuated_lines * len(full):
            return "punctuated_lines"
    return None


@lru_cache
def identifier(language: str) -> Callable[[str], tuple[str, float]]:
    """The function that maps a text to (language, score)."""
    try:
        import py3langid
    except ImportError:
        raise MachineError(
            "the filter language needs py3langid. Install it from the clone: pip install '.[filters]'."
        ) from None
    known = sorted(name for name, _ in py3langid.rank(""))
    if language not in known:
        raise SettingsError(f"the filter language={language} is unknown. Use one of {', '.join(known)}.")
    return py3langid.classify


# Copies


def text_hash(text: str) -> int:
    """64 bits, the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def normalised(text: str) -> str:
    text = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


@lru_cache
def bands_for(share: float) -> tuple[int, int]:
    """(bands, rows per band): the most rows, and so the fewest false matches, for which documents of similarity `share` match
    with a probability of at least 0.9."""
    fitting = [rows for rows in range(1, PERMUTATIONS + 1) if 1 - (1 - share**rows) ** (PERMUTATIONS // rows) >= RECALL]
    rows = max(fitting, default=1)
    return PERMUTATIONS // rows, rows


def fingerprint(text: str, share: float) -> list[int]:
    """The hash of a text, then its bands. `share` is the similarity of near copies; 0 looks for exact copies only, without bands."""
    plain = normalised(text)
    first = text_hash(plain)
    return [first, *near_fingerprint(plain, first, *bands_for(share)).tolist()] if share else [first]


def near_fingerprint(plain: str, first: int, bands: int, rows: int) -> np.ndarray:
    shingles = shingle_hashes(plain)
    if not len(shingles):  # punctuation only: matches nothing but exact copies
        return np.full(bands, first, np.uint64)
    factors, summands = _permutations()
    signature = np.full(PERMUTATIONS, np.iinfo(np.uint32).max, "<u4")
    for start in range(0, len(shingles), _SHINGLES_AT_ONCE):
        values = shingles[None, start : start + _SHINGLES_AT_ONCE] * factors + summands  # modulo 2^32
        np.minimum(signature, values.min(1), out=signature)
    parts = (signature[band * rows : (band + 1) * rows].tobytes() for band in range(bands))
    return np.frombuffer(b"".join(blake2b(part, digest_size=8).digest() for part in parts), "<u8")


def shingle_hashes(plain: str) -> np.ndarray:
    """A 32-bit hash of each run of five words, or of all words if there are fewer."""
    words = np.fromiter((zlib.crc32(word.encode()) for word in _WORD.findall(plain)), np.uint64)
    width = min(SHINGLE, len(words))
    hashes = np.zeros(max(0, len(words) - SHINGLE) + 1 if width else 0, np.uint64)
    for place in range(width):
        hashes = hashes * _MULTIPLY + words[place : place + len(hashes)]
    return (_mix(hashes) >> np.uint64(32)).astype(np.uint32)


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache
def _permutations() -> tuple[np.ndarray, np.ndarray]:
    numbers = (_mix(np.arange(1, 2 * PERMUTATIONS + 1, dtype=np.uint64) * _MULTIPLY) >> np.uint64(32)).astype(np.uint32)
    return numbers[:PERMUTATIONS, None] | np.uint32(1), numbers[PERMUTATIONS:, None]


Stream = Callable[[], Iterable[Fingerprints]]


def in_heldout(heldout: Stream, train: Stream) -> np.ndarray:
    """For each training document, whether a held-out one has the same normalised text."""
    kept = [np.unique(part[:, 0]) for part in heldout()]
    hashes = np.unique(np.concatenate(kept)) if kept else np.zeros(0, np.uint64)
    matches = [np.isin(part[:, 0], hashes) for part in train()]
    return np.concatenate(matches) if matches else np.zeros(0, bool)


def repeated(documents: Stream, columns: range, memory: int = _MEMORY) -> np.ndarray:
    """For each document, whether an earlier one agrees with it in one of the columns. If the pairs of hash and place do not fit
    into `memory`, they go through temporary files, partitioned by hash."""
    count = sum(map(len, documents()))
    result = np.zeros(count, bool)
    for column in columns:
        for hashes, places in _groups(documents, column, -(-count * 16 // memory)):
            order = np.argsort(hashes, kind="stable")
            again = hashes[order][1:] == hashes[order][:-1]
            result[places[order[1:][again]].astype(np.int64)] = True
    return result


def _groups(documents: Stream, column: int, parts: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    def pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        start = 0
        for part in documents():
            yield part[:, column], np.arange(start, start + len(part), dtype=np.uint64)
            start += len(part)

    if parts <= 1:
        listed = list(pairs())
        if listed:
            yield np.concatenate([hashes for hashes, _ in listed]), np.concatenate([places for _, places in listed])
        return
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder) / str(number)).open("w+b") for number in range(parts)]
        for hashes, places in pairs():
            which = hashes % np.uint64(parts)
            for number in np.unique(which):
                chosen = which == number
                files[int(number)].write(np.stack([hashes[chosen], places[chosen]], 1).tobytes())
        for file in files:
            file.seek(0)
            hashes, places = np.frombuffer(file.read(), np.uint64).reshape(-1, 2).T
            file.close()
            yield hashes, places
