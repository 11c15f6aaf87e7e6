"""What a network says about text, as plain data: P(replaced) of each token, Electric's pseudo-log-likelihoods; vectors are in
embed.py. All of them read text the same way: if it is longer than the network's positions, in windows.

`propose`, `corrupted_ids` and `played` replace ids, as in pre-training: text written out and read again may be tokenized differently.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from electra.base.batch import Batch, SpecialIds
from electra.base.errors import DataError, SettingsError, counted
from electra.base.files import parse_json
from electra.base.randomness import mix
from electra.data.tokenizer import TokenIds, continuing_tokens, encode_texts, special_ids
from electra.finetuning import in_chunks
from electra.interop.read import Pretrained, warn_beyond
from electra.model import encode
from electra.model.generators import TransformerGenerator
from electra.model.heads import TokenHead
from electra.objectives.corruption import Corruptor, MaskingSettings, SamplingSettings, mark

log = logging.getLogger(__name__)
TOKENS_AT_ONCE = {"cpu": 1 << 12, "cuda": 1 << 16}
LISTS_AT_ONCE = 64
# if at least this many tokens have scores that vary by no more than this fraction of their mean, nothing was learned
ENOUGH_TOKENS, SAME_SCORE = 5, 0.02
MOST_PROPOSALS = 1000


@dataclass(frozen=True)
class ScoredToken:
    """A token with its P(replaced). `start` and `end` are character offsets in the text."""

    token: str
    start: int
    end: int
    probability: float


@dataclass(frozen=True)
class Scored:
    """Electric's scores of a text. `score` = Σ_t -E(x, t), an estimate of Σ_t log p(x_t | x_\\t)."""

    tokens: list[str]
    token_scores: np.ndarray

    @property
    def score(self) -> float:
        return float(self.token_scores.sum())


def detect_texts(network: Pretrained, texts: Sequence[str]) -> list[list[ScoredToken]]:
    """P(replaced) of every token of each text."""
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
    if len(values) >= ENOUGH_TOKENS and values.std() <= SAME_SCORE * abs(values.mean()):
        say_same_score()
    return [Scored(it.tokens, -energy) for it, energy in zip(encodings, energies, strict=True)]


@lru_cache
def say_same_score() -> None:
    """Warns once per process, however many texts are scored."""
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
    """A piece of a text, from token `first` on. The results for tokens `begin` to `end` of the text are taken from this window,
    where they have most context on both sides."""

    text: int
    first: int
    ids: Sequence[int] | np.ndarray
    begin: int
    end: int


def windows_of(text: int, ids: Sequence[int] | np.ndarray, size: int) -> Iterator[TextWindow]:
    """Cuts a text longer than `size` into windows that overlap by half; each overlap is divided in its middle."""
    stride = max(1, size // 2)
    firsts = range(0, max(1, len(ids) - size + stride), stride)
    borders = [0, *((here + there + size) // 2 for here, there in pairwise(firsts)), len(ids)]
    for first, (begin, end) in zip(firsts, pairwise(borders), strict=True):
        yield TextWindow(text, first, ids[first : first + size], begin, end)


def read_windows(
    network: Pretrained, texts: Sequence[Sequence[int] | np.ndarray], first_only: bool = False
) -> Iterator[tuple[list[TextWindow], Tensor]]:
    """Yields batches of windows of similar length with their hidden states, the longest first; each window has [CLS] before and
    [SEP] after it. `first_only`: the state of [CLS] alone."""
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
        yield part, encode(encoder, batch, first_only)


def rerank(
    lines: Iterable[str], score: Callable[[Sequence[str]], list[Scored]], weight: float
) -> Iterator[dict[str, Any]]:
    """Each line is a list of hypotheses, {"hypotheses": [{"text": …, "score": …}, …], …}; `score` may be missing and is
    then 0. Yields the same with "pll" and "total" = score + weight * pll in each hypothesis, the best first."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    for part in in_chunks(numbered, LISTS_AT_ONCE):
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
        are_scores = (
            isinstance(it.get("score", 0), int | float) and math.isfinite(it.get("score", 0))
            for it in record["hypotheses"]
        )
        if isinstance(record["hypotheses"], list) and all(are_texts) and all(are_scores):
            return record
    except (KeyError, TypeError, AttributeError):
        pass
    except (ValueError, OverflowError) as error:
        reason = f" ({error})"
    example = '{"hypotheses": [{"text": "…", "score": -1.5}, …]}'
    raise DataError(f"line {number} is not a list of hypotheses{reason}. Each line must look like {example}.")


# Replaced token detection on one text: what the generator proposes, and what the discriminator says about replaced tokens


@dataclass(frozen=True)
class Proposal:
    """A token that the generator would put at a place, with its probability."""

    token: str
    probability: float


@dataclass(frozen=True)
class PlayedToken:
    """`original` is in the text from `start` to `end`, `token` is what the discriminator read there. `is_chosen`: the place was
    chosen for replacement; the generator may have put back the original. `probability` is P(replaced); for an Electric model it
    is None, and `score` is the pseudo-log-likelihood."""

    token: str
    original: str
    start: int
    end: int
    is_chosen: bool
    probability: float | None
    score: float | None = None


def as_generator(network: Pretrained) -> TransformerGenerator:
    assert isinstance(network.head, TokenHead)
    return TransformerGenerator(network.encoder, network.head, learns=False).eval()


def single_row(ids: Sequence[int], special: SpecialIds, device: torch.device) -> Batch:
    row = torch.tensor([[special.cls, *ids, special.sep]])
    return Batch.of_rows(row, torch.zeros_like(row), torch.ones_like(row, dtype=torch.bool)).to(device)


def encode_one(tokenizer: Tokenizer, text: str) -> TokenIds:
    return encode_texts(tokenizer, [text])[0]


def replaced_ids(tokenizer: Tokenizer, encoding: TokenIds, replacements: Mapping[int, str]) -> list[int]:
    """The ids of a text with other tokens, named as in the vocabulary, at some places."""
    ids, vocabulary = list(encoding.ids), tokenizer.get_vocab()
    for place, token in replacements.items():
        if token not in vocabulary:
            raise DataError(f"{token[:60]!r} is not in the vocabulary.")
        ids[checked_place(place, len(ids))] = vocabulary[token]
    return ids


def checked_place(place: int, count: int) -> int:
    if not 0 <= place < count:
        raise DataError(f"there is no token {place}: the text has {counted(count, 'token')}, counted from 0.")
    return place


@torch.no_grad()
def propose(
    generator: Pretrained, text: str, places: Sequence[int], top: int, replacements: Mapping[int, str]
) -> list[list[Proposal]]:
    """The `top` most probable tokens at each place; all places are masked at once. If a text is longer than the network reads, it
    sees the part around the place."""
    if not 1 <= top <= MOST_PROPOSALS:
        raise SettingsError(f"top={top}: ask for 1 to {MOST_PROPOSALS} proposals.")
    tokenizer, special = generator.tokenizer, special_ids(generator.tokenizer)
    encoding = encode_one(tokenizer, text)
    ids = replaced_ids(tokenizer, encoding, replacements)
    for place in places:
        ids[checked_place(place, len(ids))] = special.mask
    network, size = as_generator(generator), generator.encoder.settings.positions - 2
    device, proposals = generator.encoder.embeddings.table.device, []
    for place in places:
        first = max(0, min(place - size // 2, len(ids) - size))
        batch = single_row(ids[first : first + size], special, device)
        logits = network(batch, torch.tensor([[place - first + 1]], device=device))[0, 0].double()
        best = logits.softmax(0).topk(min(top, len(logits)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        proposals.append([Proposal(tokenizer.id_to_token(number) or "", value) for number, value in pairs])
    return proposals


@torch.no_grad()
def corrupted_ids(generator: Pretrained, ids: Sequence[int], share: float, seed: int) -> tuple[list[int], list[bool]]:
    """The ids after the generator has replaced some, and which places were chosen: as in pre-training, at a temperature of 1. A text
    that is longer than the network reads is corrupted piece by piece."""
    if not 0 < share < 1:
        raise SettingsError(f"share={share}: choose a share of the tokens between 0 and 1.")
    encoder, special = generator.encoder, special_ids(generator.tokenizer)
    masking = MaskingSettings(share=share, mask_token_share=1.0)
    continues = torch.from_numpy(continuing_tokens(generator.tokenizer))
    device, size = encoder.embeddings.table.device, encoder.settings.positions - 2
    corruptor = Corruptor(as_generator(generator), masking, SamplingSettings(), special, continues).to(device).eval()
    made, chosen = list[int](), list[bool]()
    for number, first in enumerate(range(0, len(ids), size)):
        batch = single_row(ids[first : first + size], special, device)
        batch = replace(batch, seed=mix(seed, "inspector"), samples=torch.tensor([number], device=device))
        corrupted = corruptor(batch)
        made += corrupted.batch.ids[0, 1:-1].tolist()
        chosen += mark(corrupted.chosen)[0, 1:-1].tolist()
    return made, chosen


def played(
    network: Pretrained, encoding: TokenIds, ids: Sequence[int], chosen: Sequence[bool], detects: bool
) -> list[PlayedToken]:
    """What the network says about the tokens `ids` in place of the text's own. Without a detection or Electric head, probabilities
    and scores are None."""
    probabilities: list[float | None] = [None] * len(ids)
    scores = list(probabilities)
    if network.kind == "discriminator":
        logits = token_logits(network, [ids])[0]
        if detects:
            probabilities = (1 / (1 + np.exp(-logits))).tolist()
        else:
            scores = (-logits).tolist()
    names = [network.tokenizer.id_to_token(number) or "" for number in ids]
    columns = zip(names, encoding.tokens, encoding.offsets, chosen, probabilities, scores, strict=True)
    return [PlayedToken(name, original, *place, *rest) for name, original, place, *rest in columns]
