"""The two losses of the paper, as pure functions."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def mean_over(values: Float[Tensor, "*shape"], where: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """The mean of the marked values; 0 where none is marked."""
    return torch.where(where, values, 0.0).sum() / where.sum().clamp(min=1)


def masked_lm_loss(
    logits: Float[Tensor, "rows vocab"], targets: Int[Tensor, "rows"], used: Bool[Tensor, "rows"]
) -> Float[Tensor, ""]:
    """L_MLM = mean over chosen positions of -log p_G(x_i | x^masked)."""
    return mean_over(F.cross_entropy(logits.float(), targets, reduction="none"), used)


def detection_loss(
    logits: Float[Tensor, "batch seq"],
    is_replaced: Bool[Tensor, "batch seq"],
    is_real: Bool[Tensor, "batch seq"],
) -> Float[Tensor, ""]:
    """L_Disc = mean over all real positions, [CLS] and [SEP] included, of
    -[x^corrupt_t = x_t] log D(x^corrupt, t) - [x^corrupt_t ≠ x_t] log(1 - D(x^corrupt, t)).
    The paper writes a sum over the row; the original code divides by the number of real tokens, and so do we."""
    losses = F.binary_cross_entropy_with_logits(logits.float(), is_replaced.float(), reduction="none")
    return mean_over(losses, is_real)
