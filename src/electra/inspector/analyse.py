"""Text -> each token with its probability of having been replaced, as plain data."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from electra.batch import SpecialIds
from electra.model.encoder import Encoder
from electra.model.heads import DetectionHead


@dataclass(frozen=True)
class ScoredToken:
    """`start` and `end` are character offsets in the text."""

    token: str
    start: int
    end: int
    probability: float


def detect(
    text: str, encoder: Encoder, head: DetectionHead, tokenizer: Tokenizer, special: SpecialIds
) -> list[ScoredToken]:
    """P(replaced) of every token. A text longer than the network's positions is read in windows that overlap by half,
    and each token is scored where it has most context on both sides."""
    device = next(encoder.parameters()).device
    encoding = tokenizer.encode(text, add_special_tokens=False)
    best: dict[int, tuple[int, float]] = {}
    for first, ids in windows(encoding.ids, encoder.settings.positions - 2):
        row = torch.tensor([[special.cls, *ids, special.sep]], device=device)
        with torch.no_grad():
            logits = head(encoder(row, torch.zeros_like(row), None))[0, 1:-1]
        for place, probability in enumerate(logits.sigmoid().tolist()):
            context = min(place, len(ids) - 1 - place)
            if context >= best.get(first + place, (-1, 0.0))[0]:
                best[first + place] = (context, probability)
    return [
        ScoredToken(token, start, end, best[index][1])
        for index, (token, (start, end)) in enumerate(zip(encoding.tokens, encoding.offsets, strict=True))
    ]


def windows(ids: list[int], size: int) -> Iterator[tuple[int, list[int]]]:
    stride = max(1, size // 2)
    for first in range(0, max(1, len(ids) - size + stride), stride):
        yield first, ids[first : first + size]
