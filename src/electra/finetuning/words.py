"""Words to tokens, and sentences that are too long to parts that fit, without losing a word."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from electra.data.tokenizer import special_ids

_REMEMBERED_WORDS = 1 << 18


class WordPieces(dict[str, list[int]]):
    """The ids of a word: those of its text by itself. A word of which the tokenizer leaves nothing (a control character,
    a lone accent where accents are stripped) is [UNK], so that every word has a first token to stand for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        tokenizer.encode_special_tokens = True  # a word "[SEP]" is a word
        self.tokenizer = tokenizer
        self.special = special_ids(tokenizer)

    def __missing__(self, word: str) -> list[int]:
        if len(self) >= _REMEMBERED_WORDS:
            self.clear()
        text = word.encode("utf-8", "replace").decode()  # lone surrogates
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids or [self.special.unk]
        self[word] = ids
        return ids


class Part(NamedTuple):
    """Words `start` to `end` are seen together; the answer about those in `own` is taken from here."""

    start: int
    end: int
    own: range


def split_words(sizes: Sequence[int], room: int) -> list[Part]:
    """Parts of at most `room` tokens that begin and end between words; `sizes` are the tokens of each word, 1 to `room`.

    A part shares up to half its tokens with the one before it, and the last is as full as the others. A word in both a
    and b (a before b) belongs to b as soon as more tokens precede it in b than follow it in a: that is where the shorter
    of its two contexts is longest. With c the tokens before each word, this reads c(a.end) - c(w + 1) < c(w) - c(b.start).
    Every word is in exactly one `own`; a part that would own none, which the last may leave, is left out."""
    before = np.concatenate([[0], np.cumsum(sizes)])
    bounds = []
    start, end = 0, 0
    while end < len(sizes):
        end = int(np.searchsorted(before, before[start] + room, "right")) - 1
        if end == len(sizes):
            start = int(np.searchsorted(before, before[-1] - room))
        bounds.append((start, end))
        if end < len(sizes):
            shared = min(room // 2, room - sizes[end])  # the next part must reach beyond this one
            start = int(np.searchsorted(before, before[end] - shared))
    middles = before[:-1] + before[1:]
    borders = [
        int(np.searchsorted(middles, before[end] + before[start], "right"))
        for (_, end), (start, _) in pairwise(bounds)
    ]
    owned = map(range, [0, *borders], [*borders, len(sizes)])
    return [Part(*bound, own) for bound, own in zip(bounds, owned, strict=False) if own]
