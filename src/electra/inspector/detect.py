"""Text -> what a network says of it, as plain data: P(replaced) of each token, Electric's pseudo-log-likelihoods, a vector
for each text. One reader for all of them: what is longer than the network's positions is read in windows.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.errors import DataError
from electra.base.files import parse_json
from electra.data.tokenizer import encode_texts, special_ids
from electra.interop.read import Pretrained, warn_beyond
from electra.model import encode

log = logging.getLogger(__name__)
WINDOWS_AT_ONCE = 32
LISTS_AT_ONCE = 64
ENOUGH_TOKENS, SAME_SCORE = 8, 1e-3  # so many tokens with scores no further apart say that nothing was learned


@dataclass(frozen=True)
class ScoredToken:
    """`start` and `end` are character offsets in the text."""

    token: str
    start: int
    end: int
    probability: float


@dataclass(frozen=True)
class Scored:
    """`score` = Σ_t -E(x, t), an estimate of Σ_t log p(x_t | x_\\t)."""

    tokens: list[str]
    token_scores: np.ndarray

    @property
    def score(self) -> float:
        return float(self.token_scores.sum())


def detect_texts(network: Pretrained, texts: Sequence[str]) -> list[list[ScoredToken]]:
    """P(replaced) of every token."""
    encodings = encode_texts(network.tokenizer, texts)
    scored = []
    for encoding, logits in zip(encodings, token_logits(network, [it.ids for it in encodings]), strict=True):
        tokens = zip(encoding.tokens, encoding.offsets, 1 / (1 + np.exp(-logits)), strict=True)
        scored.append([ScoredToken(token, *place, float(probability)) for token, place, probability in tokens])
    return scored


def score_texts(network: Pretrained, texts: Sequence[str]) -> list[Scored]:
    """How well every token fits the others, in one pass over the text."""
    encodings = encode_texts(network.tokenizer, texts)
    energies = token_logits(network, [encoding.ids for encoding in encodings])
    values = np.concatenate([np.zeros(0), *energies])
    if len(values) >= ENOUGH_TOKENS and np.ptp(values) < SAME_SCORE:
        say_same_score()
    return [Scored(it.tokens, -energy) for it, energy in zip(encodings, energies, strict=True)]


@lru_cache
def say_same_score() -> None:
    """Once in a process, however many texts are scored."""
    log.warning(
        "every token has the same score: this Electric model ignores its text (a collapsed run). Train it again with a "
        "longer schedule.warmup or a lower optimizer.lr."
    )


@torch.no_grad()
def token_logits(network: Pretrained, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The head's logit for every token of every text, given as ids without [CLS] and [SEP]."""
    assert network.head is not None
    logits = [np.zeros(len(ids), dtype=np.float64) for ids in texts]
    for windows, hidden in read_windows(network, texts):
        values = network.head(hidden)[:, 1:].double().cpu().numpy()
        for window, row in zip(windows, values, strict=True):
            own = row[window.begin - window.first : window.end - window.first]
            logits[window.text][window.begin : window.end] = own
    return logits


@torch.no_grad()
def text_vectors(network: Pretrained, texts: Sequence[str], length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The last layer's vectors averaged over each text, [CLS] and [SEP] included, and that of [CLS]. Of a text that is read
    in windows each token counts once, and [CLS] is the first window's. With a `length` texts are cut there, in tokens."""
    encodings = encode_texts(network.tokenizer, texts, length)
    ids = [encoding.ids[: None if length is None else length - 2] for encoding in encodings]
    mean, first = np.zeros((2, len(ids), network.encoder.settings.hidden), dtype=np.float32)
    for windows, hidden in read_windows(network, ids):
        counts = torch.zeros(hidden.shape[:2], dtype=torch.bool)
        for row, window in zip(counts, windows, strict=True):
            begin = window.begin - window.first + 1 if window.begin else 0
            is_last = window.end == len(ids[window.text])
            row[begin : window.end - window.first + (2 if is_last else 1)] = True
        sums = (hidden.float() * counts.to(hidden.device)[:, :, None]).sum(1).cpu().numpy()
        starts = hidden[:, 0].float().cpu().numpy()
        for row, window in enumerate(windows):
            mean[window.text] += sums[row]
            if not window.first:
                first[window.text] = starts[row]
    lengths = np.array([len(it) + 2 for it in ids], dtype=np.float32)
    return mean / lengths[:, None], first


class TextWindow(NamedTuple):
    """A piece of a text. Tokens `begin` to `end` of the text are taken from here: where they have most context on both
    sides."""

    text: int
    first: int
    ids: Sequence[int]
    begin: int
    end: int


def windows_of(text: int, ids: Sequence[int], size: int) -> Iterator[TextWindow]:
    """Of a text longer than `size`, windows that overlap by half and share what overlaps in its middle."""
    stride = max(1, size // 2)
    firsts = range(0, max(1, len(ids) - size + stride), stride)
    borders = [0, *((here + there + size) // 2 for here, there in pairwise(firsts)), len(ids)]
    for first, (begin, end) in zip(firsts, pairwise(borders), strict=True):
        yield TextWindow(text, first, ids[first : first + size], begin, end)


def read_windows(network: Pretrained, texts: Sequence[Sequence[int]]) -> Iterator[tuple[list[TextWindow], Tensor]]:
    """Hidden states of windows of like length together, each window with [CLS] before and [SEP] after it."""
    encoder, special = network.encoder, special_ids(network.tokenizer)
    device, size = encoder.embeddings.table.device, encoder.settings.positions - 2
    windows = [window for text, ids in enumerate(texts) for window in windows_of(text, ids, size)]
    windows.sort(key=lambda window: len(window.ids))
    if windows:
        warn_beyond(encoder.settings, network.length, len(windows[-1].ids) + 2)
    for start in range(0, len(windows), WINDOWS_AT_ONCE):
        part = windows[start : start + WINDOWS_AT_ONCE]
        rows = [torch.tensor([special.cls, *window.ids, special.sep]) for window in part]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=special.pad)
        is_real = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
        yield part, encode(encoder, Batch.of_rows(ids, torch.zeros_like(ids), is_real).to(device))


def rerank(
    lines: Iterable[str], score: Callable[[Sequence[str]], list[Scored]], weight: float
) -> Iterator[dict[str, Any]]:
    """Each line is a list of hypotheses, {"hypotheses": [{"text": …, "score": …}, …], …}; `score` may be missing and is
    then 0. Gives the same with "pll" and "total" = score + weight * pll in each hypothesis, the best first."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    while part := list(islice(numbered, LISTS_AT_ONCE)):
        records = [read_hypotheses(number, line) for number, line in part]
        scores = iter(score([hypothesis["text"] for record in records for hypothesis in record["hypotheses"]]))
        for record in records:
            ranked = []
            for hypothesis in record["hypotheses"]:
                pll = next(scores).score
                ranked.append(hypothesis | {"pll": pll, "total": hypothesis.get("score", 0.0) + weight * pll})
            yield record | {"hypotheses": sorted(ranked, key=lambda it: -it["total"])}


def read_hypotheses(number: int, line: str) -> dict[str, Any]:
    reason = ""
    try:
        record = parse_json(line)
        are_texts = (isinstance(it.get("text"), str) for it in record["hypotheses"])
        are_scores = (isinstance(it.get("score", 0), int | float) for it in record["hypotheses"])
        if isinstance(record["hypotheses"], list) and all(are_texts) and all(are_scores):
            return record
    except (KeyError, TypeError, AttributeError):
        pass
    except ValueError as error:
        reason = f" ({error})"
    example = '{"hypotheses": [{"text": "…", "score": -1.5}, …]}'
    raise DataError(f"line {number} is not a list of hypotheses{reason}. Each line must look like {example}.")
