"""Text -> what a discriminator says of each token, as plain data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from electra.base.batch import SpecialIds
from electra.model.encoders import AnyEncoder, DetectionHead

ROWS_AT_ONCE = 32


@dataclass(frozen=True)
class ScoredToken:
    """`start` and `end` are character offsets in the text."""

    token: str
    start: int
    end: int
    probability: float


def detect(
    text: str, encoder: AnyEncoder, head: DetectionHead, tokenizer: Tokenizer, special: SpecialIds
) -> list[ScoredToken]:
    """P(replaced) of every token."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    (logits,) = read_logits([encoding.ids], encoder, head, special)
    probabilities = 1 / (1 + np.exp(-logits))
    return [
        ScoredToken(token, start, end, float(probability))
        for token, (start, end), probability in zip(
            encoding.tokens, encoding.offsets, probabilities, strict=True
        )
    ]


def read_logits(
    texts: Sequence[Sequence[int]], encoder: AnyEncoder, head: DetectionHead, special: SpecialIds
) -> list[np.ndarray]:
    """The head's logit for every token of every text, given as ids without [CLS] and [SEP]. A text longer than the
    network's positions is read in windows that overlap by half, and each token is taken from where it has most context
    on both sides. Rows of like length are read together."""
    rows = [
        (text, first, ids)
        for text, tokens in enumerate(texts)
        for first, ids in windows(tokens, encoder.settings.positions - 2)
    ]
    order = sorted(range(len(rows)), key=lambda row: len(rows[row][2]))
    found = [np.zeros(len(tokens), dtype=np.float64) for tokens in texts]
    context = [np.full(len(tokens), -1) for tokens in texts]
    for start in range(0, len(order), ROWS_AT_ONCE):
        part = [rows[row] for row in order[start : start + ROWS_AT_ONCE]]
        logits = read_rows([ids for *_, ids in part], encoder, head, special)
        for (text, first, ids), values in zip(part, logits, strict=True):
            places = np.arange(len(ids))
            margin = np.minimum(places, len(ids) - 1 - places)
            better = margin >= context[text][first : first + len(ids)]
            found[text][first : first + len(ids)][better] = values[: len(ids)][better]
            context[text][first : first + len(ids)][better] = margin[better]
    return found


def read_rows(
    rows: Sequence[Sequence[int]], encoder: AnyEncoder, head: DetectionHead, special: SpecialIds
) -> np.ndarray:
    device = next(encoder.parameters()).device
    width = max(map(len, rows)) + 2
    padded = [[special.cls, *ids, special.sep] + [special.pad] * (width - len(ids) - 2) for ids in rows]
    ids = torch.tensor(padded, device=device)
    lengths = torch.tensor([[len(row) + 2] for row in rows], device=device)
    is_real = torch.arange(width, device=device) < lengths
    with torch.no_grad():
        logits = head(encoder(ids, torch.zeros_like(ids), None if is_real.all() else is_real))
    return logits[:, 1:].double().cpu().numpy()


def windows(ids: Sequence[int], size: int) -> Iterator[tuple[int, Sequence[int]]]:
    stride = max(1, size // 2)
    for first in range(0, max(1, len(ids) - size + stride), stride):
        yield first, ids[first : first + size]
