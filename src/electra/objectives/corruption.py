"""Choose positions, mask them, sample replacements: pure functions of their arguments, static shapes, no host sync.

Where we differ from the original code: positions are drawn without replacement (there, with: a position drawn twice got
the mean of two token ids), so exactly the asked share is chosen; a row with nothing to choose is left alone (there 0/0).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from electra.batch import Batch, SpecialIds

SAMPLING_BLOCK = 128


def maskable(batch: Batch, special: SpecialIds) -> Bool[Tensor, "batch seq"]:
    """Real tokens other than [CLS], [SEP] and [MASK]. [UNK] may be chosen, as in the original."""
    ids = batch.ids
    return batch.is_real & (ids != special.cls) & (ids != special.sep) & (ids != special.mask)


def choose_positions(
    can_mask: Bool[Tensor, "batch seq"],
    is_real: Bool[Tensor, "batch seq"],
    share: float,
    noise: Float[Tensor, "batch seq"],
) -> tuple[Int[Tensor, "batch count"], Bool[Tensor, "batch count"]]:
    """count = round(share * seq) slots a row, always. Slot j of a row is used while j < max(1, round(share * real
    tokens of that row)) and maskable tokens are left; the rest is marked unused. [CLS] and [SEP] count as real tokens
    here, as in the original."""
    length = can_mask.shape[1]
    count = max(1, round(share * length))
    scores, positions = noise.masked_fill(~can_mask, -1.0).topk(count, dim=1)
    wanted = (is_real.sum(1, keepdim=True) * share).round().clamp(min=1)
    slots = torch.arange(count, device=noise.device)
    return positions, (slots < wanted) & (scores >= 0)


def replace_at(
    ids: Int[Tensor, "batch seq"],
    positions: Int[Tensor, "batch count"],
    tokens: Int[Tensor, "batch count"],
    where: Bool[Tensor, "batch count"],
) -> Int[Tensor, "batch seq"]:
    """REPLACE(x, m, tokens): positions within a row are distinct, so the order of writing cannot matter."""
    return ids.scatter(1, positions, torch.where(where, tokens, ids.gather(1, positions)))


def sample_tokens(
    logits: Float[Tensor, "rows vocab"],
    noise: Float[Tensor, "rows 2"],
    temperature: float,
    forbidden: Int[Tensor, "rows"] | None,
) -> Int[Tensor, "rows"]:
    """One token a row from softmax(logits / temperature), by the inverse of the distribution function.

    In two stages, so that float32 is enough for any vocabulary: first a block of 128 tokens by the blocks' sums, then a
    token within it. Two uniform numbers a row do what the Gumbel trick needs one a token for. `forbidden` (the original
    token, for disallow_correct) gets probability zero.
    """
    logits = logits.detach().float() / temperature
    if forbidden is not None:
        logits = logits.scatter(1, forbidden[:, None], -torch.inf)
    weights = (logits - logits.amax(1, keepdim=True)).exp()
    rows, vocab = weights.shape
    blocks = -(-vocab // SAMPLING_BLOCK)
    weights = torch.nn.functional.pad(weights, (0, blocks * SAMPLING_BLOCK - vocab))
    weights = weights.view(rows, blocks, SAMPLING_BLOCK)
    block = inverse_cdf(weights.sum(2), noise[:, 0])
    within = weights.gather(1, block[:, None, None].expand(-1, 1, SAMPLING_BLOCK)).squeeze(1)
    return block * SAMPLING_BLOCK + inverse_cdf(within, noise[:, 1])


def inverse_cdf(weights: Float[Tensor, "rows n"], noise: Float[Tensor, "rows"]) -> Int[Tensor, "rows"]:
    """The first index whose cumulative weight exceeds noise * total: never one of weight zero, because there the
    cumulative weight does not grow; rounding at the far end falls back on the last index of positive weight."""
    cumulative = weights.double().cumsum(1)
    target = noise.double() * cumulative[:, -1]
    found = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    last = (weights > 0).long().cumsum(1).argmax(1)
    return torch.minimum(found, last)
