"""Training a unigram language model of word pieces (Kudo 2018, as in SentencePiece), the same result every time.

The tokenizers library has a trainer of its own, but it sums floating-point numbers in the order of a randomised hash
map: no two trainings agree. This one works on the most frequent words in a fixed order, with numpy.

Pieces x have probabilities p(x); a word is explained by all its segmentations, P(w) = sum over s of prod p(x in s).
EM raises sum of count(w) log P(w); between its rounds the pieces whose loss would be missed least are dropped.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.special import digamma

_LONGEST_PIECE = 16
_LONGEST_WORD = 64
_WORDS = 200_000
_SUBSTRINGS = 3_000_000
_SEEDS_PER_PIECE = 10
_KEPT_EACH_ROUND = 0.75


def train_unigram(counts: Counter[str], size: int, alphabet: Sequence[str]) -> list[tuple[str, float]]:
    """`size` pieces with their log probabilities, likeliest first. Every character of the alphabet is one of them;
    words with other characters are not looked at."""
    characters = set(alphabet)
    usable = (
        item for item in counts.items() if len(item[0]) <= _LONGEST_WORD and characters.issuperset(item[0])
    )
    words = sorted(usable, key=lambda item: (-item[1], item[0]))[:_WORDS]
    pieces, weights = _seeds(words, size, alphabet)
    lattices = _Lattices.build([word for word, _ in words], [count for _, count in words], pieces)
    inner = _Lattices.build(pieces, [1] * len(pieces), pieces)
    is_character = np.array([len(piece) == 1 for piece in pieces])
    scores = _log_probabilities(weights)
    while True:
        for _ in range(2):
            expected = lattices.expected_counts(scores)
            expected[is_character] = np.maximum(expected[is_character], 0.5)
            scores = _log_probabilities(np.where(expected >= 0.5, expected, 0))
        alive = np.isfinite(scores)
        if alive.sum() <= size:
            break
        # What dropping a piece costs: its uses, each explained by the best segmentation of what it spells.
        loss = np.where(is_character, np.inf, -np.inf)
        candidates = alive & ~is_character
        replaced = inner.best_without_whole(scores, len(pieces))
        loss[candidates] = expected[candidates] * (scores - replaced)[candidates]
        kept = max(size, int(alive.sum() * _KEPT_EACH_ROUND))
        scores[np.argsort(-loss, kind="stable")[kept:]] = -np.inf
    learned = [(pieces[index], round(float(scores[index]), 6)) for index in np.flatnonzero(alive)]
    return sorted(learned, key=lambda item: (-item[1], item[0]))


def _seeds(words: list[tuple[str, int]], size: int, alphabet: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The substrings that cover most text, and all characters. Words come by falling frequency; whenever there are
    too many substrings to hold, the rarest are forgotten."""
    counts: dict[str, int] = defaultdict(int)
    least = 1
    for word, count in words:
        while len(counts) > _SUBSTRINGS:
            least += 1
            counts = defaultdict(int, ((piece, seen) for piece, seen in counts.items() if seen >= least))
        for start in range(len(word)):
            for end in range(start + 2, min(len(word), start + _LONGEST_PIECE) + 1):
                counts[word[start:end]] += count
    covering = sorted(counts.items(), key=lambda item: (-item[1] * len(item[0]), item[0]))
    longer = [item for item in covering[: size * _SEEDS_PER_PIECE] if item[1] > 1]
    single: Counter[str] = Counter()
    for word, count in words:
        for character in word:
            single[character] += count
    pieces = [*sorted(alphabet), *(piece for piece, _ in longer)]
    weights = [max(1, single[character]) for character in sorted(alphabet)] + [
        count * len(piece) for piece, count in longer
    ]
    return pieces, np.array(weights, np.float64)


def _log_probabilities(counts: np.ndarray) -> np.ndarray:
    """exp(digamma(c)) instead of c: the Bayesian estimate, which favours a sparse vocabulary. -inf where c is 0."""
    scores = np.full(len(counts), -np.inf)
    used = counts > 0
    scores[used] = digamma(counts[used]) - digamma(counts.sum())
    return scores


class _Lattices:
    """The segmentations of many words at once. Words of one length share their edges (start, end); `ids` says which
    piece a word has on each, and the number of pieces, whose score is -inf, where it has none."""

    def __init__(self) -> None:
        self.groups: list[tuple[list[tuple[int, int]], np.ndarray, np.ndarray, np.ndarray]] = []

    @classmethod
    def build(cls, words: Sequence[str], counts: Sequence[int], pieces: Sequence[str]) -> "_Lattices":
        lattices = cls()
        number = {piece: index for index, piece in enumerate(pieces)}
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, word in enumerate(words):
            by_length[len(word)].append(index)
        for length, indices in sorted(by_length.items()):
            edges = [
                (start, end)
                for end in range(1, length + 1)
                for start in range(max(0, end - _LONGEST_PIECE), end)
            ]
            ids = [
                [number.get(words[index][start:end], len(pieces)) for index in indices]
                for start, end in edges
            ]
            group = np.array(ids, np.int32), np.array([counts[index] for index in indices], np.float64)
            lattices.groups.append((edges, *group, np.array(indices)))
        return lattices

    def expected_counts(self, scores: np.ndarray) -> np.ndarray:
        """How often each piece is used, over all segmentations: forward, backward, and the share of every edge."""
        scores = np.append(scores, -np.inf)
        expected = np.zeros(len(scores))
        for edges, ids, counts, _ in self.groups:
            length = edges[-1][1]
            forward = np.full((length + 1, len(counts)), -np.inf)
            backward = forward.copy()
            forward[0] = backward[length] = 0
            for edge, (start, end) in enumerate(edges):
                forward[end] = np.logaddexp(forward[end], forward[start] + scores[ids[edge]])
            for edge, (start, end) in sorted(enumerate(edges), key=lambda item: -item[1][0]):
                backward[start] = np.logaddexp(backward[start], backward[end] + scores[ids[edge]])
            for edge, (start, end) in enumerate(edges):
                share = np.exp(forward[start] + scores[ids[edge]] + backward[end] - forward[length])
                expected += np.bincount(ids[edge], share * counts, len(scores))
        return expected[:-1]

    def best_without_whole(self, scores: np.ndarray, size: int) -> np.ndarray:
        """The score of each word's best segmentation into at least two pieces."""
        scores, result = np.append(scores, -np.inf), np.full(size, -np.inf)
        for edges, ids, counts, indices in self.groups:
            length = edges[-1][1]
            best = np.full((length + 1, len(counts)), -np.inf)
            best[0] = 0
            for edge, (start, end) in enumerate(edges):
                if (start, end) != (0, length):
                    best[end] = np.maximum(best[end], best[start] + scores[ids[edge]])
            result[indices] = best[length]
        return result
