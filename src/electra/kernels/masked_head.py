"""The generator's head at the chosen positions: logits over the vocabulary, log p(target), one exact draw a row.

At 1,024 rows of 128 the logits are 19,456 x 30,522 numbers, more than a gigabyte in bfloat16; written, read and
differentiated in memory they cost more than the product that makes them. `masked_head` therefore never stores them where
it can (a CUDA device with Triton), and is plain torch everywhere else. The choice is made in `available`, nowhere else.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from electra.kernels.sampling import sample_tokens
from electra.kernels.switch import wanted

WIDEST = 128


class Filled(NamedTuple):
    """log p(target), a token drawn at the asked temperature, and whether the target is the most likely token. A gradient
    passes through the first alone."""

    log_likelihood: Float[Tensor, "rows"]
    sampled: Int[Tensor, "rows"]
    is_best: Bool[Tensor, "rows"]


def masked_head(
    states: Float[Tensor, "rows embedding"],
    words: Float[Tensor, "vocab embedding"],
    bias: Float[Tensor, "vocab"],
    targets: Int[Tensor, "rows"],
    noise: Float[Tensor, "rows 2"],
    temperature: float | Float[Tensor, ""] = 1.0,
    forbid_target: bool = False,
) -> Filled:
    """logits = states wordsᵀ + bias;  log_likelihood = log softmax(logits)[target];  sampled ~ softmax(logits /
    temperature), with probability zero for the target under `forbid_target`. `noise` holds uniform numbers in (0, 1),
    float32; both ways of computing turn the same noise into the same tokens, but for rounding. A temperature that changes
    in the course of a captured graph is a tensor."""
    if available(states):
        from electra.kernels.masked_head_fused import fused

        dtype = product_dtype(states)
        return Filled(*fused(states, words, bias, targets, noise, temperature, forbid_target, dtype))
    return reference(states, words, bias, targets, noise, temperature, forbid_target)


def product_dtype(states: Tensor) -> torch.dtype:
    """What a matrix product of these is computed in: under autocast, its type."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def available(states: Tensor) -> bool:
    """Whether the kernels can do it, and gain by it: Triton, a CUDA device with tensor cores for bfloat16, products in half
    precision (those in float32 run on no tensor core that is exact), and an embedding so narrow that a tile holds it
    whole. With ELECTRA-Base's 768 the product outweighs the traffic, and the library's is the better one."""
    return (
        wanted(states.device)
        and product_dtype(states) in (torch.bfloat16, torch.float16)
        and states.shape[1] <= WIDEST
        and torch.cuda.get_device_properties(states.device).major >= 8
    )


def reference(
    states: Float[Tensor, "rows embedding"],
    words: Float[Tensor, "vocab embedding"],
    bias: Float[Tensor, "vocab"],
    targets: Int[Tensor, "rows"],
    noise: Float[Tensor, "rows 2"],
    temperature: float | Float[Tensor, ""] = 1.0,
    forbid_target: bool = False,
) -> Filled:
    logits = F.linear(states, words, bias)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_likelihood = -F.cross_entropy(wide, targets, reduction="none")
    logits = logits.detach()
    is_best = logits.argmax(1) == targets
    if forbid_target:
        logits = logits.scatter(1, targets[:, None], -torch.inf)
    return Filled(log_likelihood, sample_tokens(logits, noise, temperature), is_best)
