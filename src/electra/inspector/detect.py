"""Text -> what a network says of it, as plain data: P(replaced) of each token, Electric's pseudo-log-likelihoods; vectors are in
embed.py. One reader for all of them: what is longer than the network's positions is read in windows.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from electra.base.batch import Batch
from electra.base.errors import DataError
from electra.base.files import parse_json
from electra.data.tokenizer import encode_texts, special_ids
from electra.interop.read import Pretrained, warn_beyond

log = logging.getLogger(__name__)
TOKENS_AT_ONCE = {"cpu": 1 << 12, "cuda": 1 << 16}
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


class TextWindow(NamedTuple):
    """A piece of a text. Tokens `begin` to `end` of the text are taken from here: where they have most context on both
    sides."""

    text: int
    first: int
    ids: Sequence[int] | np.ndarray
    begin: int
    end: int


def windows_of(text: int, ids: Sequence[int] | np.ndarray, size: int) -> Iterator[TextWindow]:
    """Of a text longer than `size`, windows that overlap by half and share what overlaps in its middle."""
    stride = max(1, size // 2)
    firsts = range(0, max(1, len(ids) - size + stride), stride)
    borders = [0, *((here + there + size) // 2 for here, there in pairwise(firsts)), len(ids)]
    for first, (begin, end) in zip(firsts, pairwise(borders), strict=True):
        yield TextWindow(text, first, ids[first : first + size], begin, end)


def read_windows(
    network: Pretrained, texts: Sequence[Sequence[int] | np.ndarray], first_only: bool = False
) -> Iterator[tuple[list[TextWindow], Tensor]]:
    """Hidden states of windows of like length together, the longest first, each window with [CLS] before and [SEP] after
    it. `first_only`: the state of [CLS] alone."""
    encoder, special = network.encoder, special_ids(network.tokenizer)
    device, size = encoder.embeddings.table.device, encoder.settings.positions - 2
    windows = [window for text, ids in enumerate(texts) for window in windows_of(text, ids, size)]
    windows.sort(key=lambda window: -len(window.ids))
    if windows:
        warn_beyond(encoder.settings, network.length, len(windows[0].ids) + 2)
    start = 0
    while start < len(windows):
        width = len(windows[start].ids) + 2
        part = windows[start : start + max(1, TOKENS_AT_ONCE[device.type] // width)]
        start += len(part)
        ids = np.full((len(part), width), special.pad, np.int64)
        for row, window in zip(ids, part, strict=True):
            row[: len(window.ids) + 2] = [special.cls, *window.ids, special.sep]
        is_real = torch.from_numpy(np.arange(width) < np.array([[len(window.ids) + 2] for window in part]))
        rows = torch.from_numpy(ids)
        batch = Batch.of_rows(rows, torch.zeros_like(rows), is_real).to(device)
        yield part, encoder(batch.ids, batch.segments, batch.is_real if batch.padded else None, first_only)


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
