"""Pseudo-log-likelihoods from an Electric model: how well every token fits the others, in one pass over the text."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from electra.base.batch import SpecialIds
from electra.base.errors import DataError
from electra.inspector.detect import read_logits
from electra.model.encoders import AnyEncoder, DetectionHead

LISTS_AT_ONCE = 64


@dataclass(frozen=True)
class Scored:
    """`score` = Σ_t -E(x, t), an estimate of Σ_t log p(x_t | x_\\t)."""

    tokens: list[str]
    token_scores: np.ndarray

    @property
    def score(self) -> float:
        return float(self.token_scores.sum())


def score_texts(
    texts: Sequence[str], encoder: AnyEncoder, head: DetectionHead, tokenizer: Tokenizer, special: SpecialIds
) -> list[Scored]:
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    energies = read_logits([encoding.ids for encoding in encodings], encoder, head, special)
    return [Scored(e.tokens, -energy) for e, energy in zip(encodings, energies, strict=True)]


def rerank(
    lines: Iterable[str], score: Callable[[Sequence[str]], list[Scored]], weight: float
) -> Iterator[dict[str, Any]]:
    """Each line is a list of hypotheses, {"hypotheses": [{"text": …, "score": …}, …], …}; `score` may be missing and is
    then 0. Gives the same with "pll" and "total" = score + weight * pll in each hypothesis, the best first."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    while part := list(islice(numbered, LISTS_AT_ONCE)):
        records = [read_record(number, line) for number, line in part]
        texts = [hypothesis["text"] for record in records for hypothesis in record["hypotheses"]]
        scores = iter(score(texts))
        for record in records:
            ranked = []
            for hypothesis in record["hypotheses"]:
                pll = next(scores).score
                total = hypothesis.get("score", 0.0) + weight * pll
                ranked.append(hypothesis | {"pll": pll, "total": total})
            yield record | {"hypotheses": sorted(ranked, key=lambda it: -it["total"])}


def read_record(number: int, line: str) -> dict[str, Any]:
    example = '{"hypotheses": [{"text": "…", "score": -1.5}, …]}'
    try:
        record = json.loads(line)
        hypotheses = record["hypotheses"]
        fine = isinstance(hypotheses, list) and all(
            isinstance(it.get("text"), str) and isinstance(it.get("score", 0), int | float)
            for it in hypotheses
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        fine = False
    if not fine:
        raise DataError(f"line {number} is not a list of hypotheses. Each line must look like {example}.")
    return record
