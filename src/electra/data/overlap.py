"""Which texts have an n-gram of words in common with a corpus of token shards: are the texts that a model is scored on among those
that it was trained on?

Words are lower-cased letters and digits, reassembled from their tokens, so that neither punctuation nor the way in which
a tokenizer cuts a word matters. An n-gram is a 64-bit hash: half a million of them collide with the n-grams of a billion words
by chance in one of thirty thousand corpora. The corpus is read once, shard by shard; memory holds only the hashes of the texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders

from electra.base.progress import Progress
from electra.data.shards import open_data
from electra.data.tokenizer import SPECIAL_TOKENS, continuing_tokens, encode_ids, load_tokenizer

LONG, FEW_WORDS = 13, 8
"""Texts of 13 words and more are looked up by their 13-grams (as in GPT-3's check), shorter ones by 8-grams. Texts of fewer than
8 words are not checked: such short n-grams are common language."""
TABLE_BITS = 24
SHOWN_ROWS = 3

Texts = Sequence[str]


@dataclass(frozen=True)
class Overlap:
    """How many rows a task has, how many are long enough to check, how many have an n-gram in the corpus, and how many have a text
    of which every n-gram is there. `examples` are texts of the last kind or, if there are none, of the one before."""

    rows: int
    checked: int
    with_ngram: int
    whole_text: int
    examples: list[str]


def letter_powers(count: int) -> np.ndarray:
    """The factor of a letter at each place of a word in the word's hash, modulo 2^64."""
    return np.power(np.uint64(0x9E3779B97F4A7C15), np.arange(count, dtype=np.uint64))


def byte_values() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for, as in GPT-2: one that is visible in Latin-1 for itself."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + number): byte for number, byte in enumerate(others)}


class WordHashes:
    """Token ids -> a hash for each word. A word's hash depends on the bytes of its letters only, not on how they are cut into tokens:
    byte-level tokens may hold a part of a letter, which counts as it is."""

    def __init__(self, tokenizer: Tokenizer):
        self.continues = continuing_tokens(tokenizer)
        self.values = np.zeros(len(self.continues), np.uint64)
        self.lengths = np.zeros(len(self.continues), np.int64)
        self.shifts = letter_powers(1024)
        self.places = np.random.default_rng(0).integers(1, 1 << 63, LONG, np.uint64) * np.uint64(2) + np.uint64(1)
        values = byte_values() if isinstance(tokenizer.decoder, decoders.ByteLevel) else {}
        for token, number in tokenizer.get_vocab().items():
            if token in SPECIAL_TOKENS:  # [UNK] may be anything, punctuation too
                continue
            if values.keys() >= set(token):
                token = bytes(values[character] for character in token).decode("utf-8", "surrogateescape")
            word = "".join(it for it in token.lower() if it.isalnum() or "\udc80" <= it <= "\udcff")
            letters = np.frombuffer(word.encode("utf-8", "surrogateescape"), np.uint8).astype(np.uint64)
            self.values[number] = (letters * letter_powers(len(letters))).sum()
            self.lengths[number] = len(letters)

    def words(self, tokens: np.ndarray) -> np.ndarray:
        starts = np.flatnonzero(~self.continues[tokens])
        if not len(starts):
            return np.zeros(0, np.uint64)
        tokens, starts = tokens[starts[0] :], starts - starts[0]
        lengths = self.lengths[tokens]
        before = np.cumsum(lengths) - lengths
        inside = before - np.repeat(before[starts], np.diff(starts, append=len(tokens)))
        values = np.add.reduceat(self.values[tokens] * self.shifts[inside % 1024], starts)
        values = values[np.add.reduceat(lengths, starts) > 0]
        values ^= values >> np.uint64(31)
        return np.asarray(values * np.uint64(0xBF58476D1CE4E5B9))

    def ngrams(self, words: np.ndarray, size: int) -> np.ndarray:
        count = max(0, len(words) - size + 1)
        hashes = np.zeros(count, np.uint64)
        for place in range(size):
            hashes += words[place : place + count] * self.places[place]
        return hashes ^ hashes >> np.uint64(29)


class Wanted:
    """The n-grams of one size to look for, and which of them have been seen."""

    def __init__(self, hashes: Sequence[np.ndarray]):
        self.hashes = np.unique(np.concatenate([*hashes, np.zeros(1, np.uint64)]))
        self.seen = np.zeros(len(self.hashes), bool)
        self.table = np.zeros(1 << TABLE_BITS, bool)
        self.table[self.hashes >> np.uint64(64 - TABLE_BITS)] = True

    def look(self, ngrams: np.ndarray) -> None:
        """Marks which wanted n-grams are among `ngrams`. The table is a fast first filter: few false positives, no false negatives."""
        likely = ngrams[self.table[ngrams >> np.uint64(64 - TABLE_BITS)]]
        places = np.minimum(np.searchsorted(self.hashes, likely), len(self.hashes) - 1)
        self.seen[places[self.hashes[places] == likely]] = True

    def is_seen(self, ngrams: np.ndarray) -> np.ndarray:
        return np.asarray(self.seen[np.searchsorted(self.hashes, ngrams)])


def find_overlap(tasks: Mapping[str, Sequence[Texts]], data: Path) -> dict[str, Overlap]:
    """The overlap of each task with a corpus. `tasks`: the texts of each row, by task; `data`: prepared shards (training split)."""
    tokenizer, corpus = load_tokenizer(data), open_data(data, verify=False)
    hashes = WordHashes(tokenizer)

    # the n-grams of every text, of the size that suits its length
    ngrams: dict[str, tuple[int, np.ndarray]] = {}
    texts = list(dict.fromkeys(text for rows in tasks.values() for row in rows for text in row))
    for text, ids in zip(texts, encode_ids(tokenizer, texts), strict=True):
        words = hashes.words(ids)
        size = LONG if len(words) >= LONG else FEW_WORDS
        ngrams[text] = size, hashes.ngrams(words, size)
    wanted = {size: Wanted([grams for own, grams in ngrams.values() if own == size]) for size in (LONG, FEW_WORDS)}

    # one pass over the corpus
    total = sum(len(shard.tokens) for shard in corpus.shards)
    with Progress("overlap", total, unit="bytes", seconds_between_lines=5.0) as progress:
        for shard in corpus.shards:
            words = hashes.words(shard.tokens)
            for size, looking in wanted.items():
                looking.look(hashes.ngrams(words, size))
            progress.advance(progress.done + len(shard.tokens))
            progress.report(f"{progress.rate / 1e6:.1f} M tokens/s")

    hits = {text: wanted[size].is_seen(grams) for text, (size, grams) in ngrams.items()}
    return {name: overlap_of(rows, hits) for name, rows in tasks.items()}


def overlap_of(rows: Sequence[Texts], hits: Mapping[str, np.ndarray]) -> Overlap:
    checked = sum(any(len(hits[text]) for text in row) for row in rows)
    some = [[text for text in row if hits[text].any()] for row in rows]
    whole = [[text for text in row if len(hits[text]) and hits[text].all()] for row in rows]
    examples = [texts[0] for texts in whole if texts] or [texts[0] for texts in some if texts]
    return Overlap(len(rows), checked, sum(map(bool, some)), sum(map(bool, whole)), examples[:SHOWN_ROWS])
