"""ELECTRA's game on one text: what the generator proposes, and what the discriminator says of what was put there. Tokens are
replaced as ids, as in pre-training: text that was written out and read again may be cut into other tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tokenizers import Tokenizer

from electra.base.batch import Batch, SpecialIds
from electra.base.errors import DataError, SettingsError
from electra.base.randomness import mix
from electra.data.tokenizer import TokenIds, continuing_tokens, encode_texts, special_ids
from electra.inspector.detect import token_logits
from electra.interop.read import Pretrained
from electra.model.generators import GeneratorSettings, TransformerGenerator
from electra.model.heads import TokenHead
from electra.objectives.corruption import Corruptor, MaskingSettings, ObjectiveInputs, SamplingSettings, mark

MOST_PROPOSALS = 1000


@dataclass(frozen=True)
class Proposal:
    """A token that the generator would put at a place, and how probably."""

    token: str
    probability: float


@dataclass(frozen=True)
class PlayedToken:
    """`original` stands in the text at `start` to `end`, `token` is what the discriminator read there. `is_chosen`: the generator
    had the place, and may have put back what stood there. `probability` of having been replaced; of an Electric model it
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
    """The ids of a text with other tokens, by their names in the vocabulary, at some places."""
    ids, vocabulary = list(encoding.ids), tokenizer.get_vocab()
    for place, token in replacements.items():
        if token not in vocabulary:
            raise DataError(f"{token[:60]!r} is no token of the vocabulary.")
        ids[checked_place(place, len(ids))] = vocabulary[token]
    return ids


def checked_place(place: int, count: int) -> int:
    if not 0 <= place < count:
        raise DataError(f"there is no token {place}: the text has {count} tokens, counted from 0.")
    return place


@torch.no_grad()
def propose(
    generator: Pretrained, text: str, places: Sequence[int], top: int, replacements: Mapping[int, str]
) -> list[list[Proposal]]:
    """The `top` likeliest tokens at each place, all of which are masked at once. Of a text that is longer than the network reads,
    it sees what is around the place."""
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
    """The ids after the generator has had its turn, and which places it had: as in pre-training, at a temperature of 1. A text that
    is longer than the network reads is corrupted piece by piece."""
    if not 0 < share < 1:
        raise SettingsError(f"share={share}: choose a share of the tokens between 0 and 1.")
    encoder, special = generator.encoder, special_ids(generator.tokenizer)
    continues = torch.from_numpy(continuing_tokens(generator.tokenizer))
    inputs = ObjectiveInputs(
        encoder=encoder.settings,
        generator=GeneratorSettings(),
        masking=MaskingSettings(share=share, mask_token_share=1.0),
        sampling=SamplingSettings(),
        special=special,
        continues=continues,
        token_counts=torch.zeros(len(continues)),
        seed=seed,
    )
    device, size = encoder.embeddings.table.device, encoder.settings.positions - 2
    corruptor = Corruptor(inputs, as_generator(generator)).to(device).eval()
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
    """What the network says of the tokens `ids` in the places of the text's own. One that neither detects nor scores says
    nothing."""
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
