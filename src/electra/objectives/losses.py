"""The losses, as pure functions. Half precision is widened to float32 before each of them; float64 stays float64."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from electra.base.ranks import over_ranks
from electra.model.heads import widen

Sums = dict[str, Tensor]


class Loss(NamedTuple):
    """`total` is minimised. `sums` are the sums and counts that metrics are computed from: they add up over batches and
    processes, and are read only when metrics are wanted."""

    total: Tensor
    sums: Sums


def mean_over(values: Float[Tensor, "*shape"], where: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """The mean of the values at `where`; 0 if there are none. With several processes, this process's part of the mean over all
    their values: the parts add up to that mean, however unevenly padding is spread."""
    return torch.where(where, values, 0.0).sum() / count(where).clamp(min=1)


def count(where: Bool[Tensor, "*shape"]) -> Int[Tensor, ""]:
    """The number that `mean_over` divides by, summed over processes."""
    return over_ranks(where.sum())


def log_likelihood(logits: Float[Tensor, "*rows vocab"], tokens: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """log p(token) under softmax(logits)."""
    flat = F.cross_entropy(widen(logits).flatten(0, -2), tokens.flatten(), reduction="none")
    return -flat.view(tokens.shape)


def masked_lm_loss(
    logits: Float[Tensor, "*rows vocab"], targets: Int[Tensor, "*rows"], used: Bool[Tensor, "*rows"]
) -> Float[Tensor, ""]:
    """L_MLM = mean over chosen positions of -log p_G(x_i | x^masked)."""
    return mean_over(-log_likelihood(logits, targets), used)


def detection_losses(logits: Float[Tensor, "*shape"], is_replaced: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """-[x^corrupt_t = x_t] log D(x^corrupt, t) - [x^corrupt_t ≠ x_t] log(1 - D(x^corrupt, t))"""
    logits = widen(logits)
    return F.binary_cross_entropy_with_logits(logits, is_replaced.to(logits.dtype), reduction="none")


def detection_loss(
    logits: Float[Tensor, "*shape"], is_replaced: Bool[Tensor, "*shape"], where: Bool[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """L_Disc: the mean over the positions `where`, usually all real ones, [CLS] and [SEP] included. The paper writes a sum over
    the row; the original code divides by the number of real tokens, and so do we."""
    return mean_over(detection_losses(logits, is_replaced), where)


def copying_loss(
    logits: Float[Tensor, "*rows vocab"],
    replaced: Float[Tensor, "*rows"],
    corrupted: Int[Tensor, "*rows"],
    targets: Int[Tensor, "*rows"],
    where: Bool[Tensor, "*rows"],
) -> Float[Tensor, ""]:
    """Mean of -log p(x_t) with p(x_t) = D_t [x^corrupt_t = x_t] + (1 - D_t) softmax(logits_t)[x_t]: the network copies
    its input with probability D_t = sigmoid(-replaced_t), and otherwise predicts the token."""
    replaced = widen(replaced)
    copies = torch.where(corrupted == targets, F.logsigmoid(-replaced), -torch.inf)
    names = F.logsigmoid(replaced) + log_likelihood(logits, targets)
    return mean_over(-torch.logaddexp(copies, names), where)


def noise_logits(
    energies: Float[Tensor, "*shape"], log_q: Float[Tensor, "*shape"], share: float
) -> Float[Tensor, "*shape"]:
    """The logit of "this token is noise": E(x, t) + log q(x_t | x_\\t) + log(k / (1 - k)), where k is the fraction of noise.
    At the minimum of its cross-entropy, -E(x, t) = log p(x_t | x_\\t). No gradient flows into q."""
    return widen(energies) + widen(log_q).detach() + math.log(share / (1 - share))


def policy_loss(
    log_probability: Float[Tensor, "*rows"],
    reward: Float[Tensor, "*rows"],
    baseline: Float[Tensor, "*rows"],
    used: Bool[Tensor, "*rows"],
) -> Float[Tensor, ""]:
    """REINFORCE: -mean of (R - b) log p_G(x̂_t). Its gradient is the negated gradient of the expected reward, so minimising
    it raises the reward. No gradient flows through R or b."""
    return -mean_over((reward - baseline).detach() * log_probability, used)


def baseline_loss(
    logits: Float[Tensor, "*rows"], reward: Float[Tensor, "*rows"], used: Bool[Tensor, "*rows"]
) -> Float[Tensor, ""]:
    """Cross-entropy that fits b = -log sigmoid(logit) to R = -log P(the discriminator is right)."""
    right = (-reward).exp().detach()
    return mean_over(F.binary_cross_entropy_with_logits(widen(logits), right, reduction="none"), used)


def selection_loss(scores: Float[Tensor, "*rows candidates"], used: Bool[Tensor, "*rows"]) -> Float[Tensor, ""]:
    """-log softmax(scores)[0]: the original token is candidate 0 among those sampled."""
    return mean_over(-F.log_softmax(widen(scores), dim=-1)[..., 0], used)
