"""Exact draws from a softmax, with two uniform numbers a row."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

SAMPLING_BLOCK = 128


def sample_tokens(
    logits: Float[Tensor, "rows vocab"],
    noise: Float[Tensor, "rows 2"],
    temperature: float | Float[Tensor, ""],
) -> Int[Tensor, "rows"]:
    """One token a row from softmax(logits / temperature), by the inverse of the distribution function.

    In two stages, so that float32 is enough for any vocabulary: first a block of 128 tokens by the blocks' sums, then a
    token within it. Two uniform numbers a row do what the Gumbel trick needs one a token for.
    """
    logits = logits.detach().float() / temperature
    weights = (logits - logits.amax(1, keepdim=True)).exp()
    rows, vocab = weights.shape
    blocks = -(-vocab // SAMPLING_BLOCK)
    weights = F.pad(weights, (0, blocks * SAMPLING_BLOCK - vocab)).view(rows, blocks, SAMPLING_BLOCK)
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
