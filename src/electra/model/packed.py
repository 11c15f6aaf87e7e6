"""Who sees whom: masks for local attention, and attention over rows of different lengths that lie end to end (the
reference, and torch's kernel for it)."""

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# Windows came later than the kernel.
KERNEL_HAS_WINDOWS = "window_size" in inspect.signature(varlen_attn).parameters


def band(length: int, reach: int, device: torch.device) -> Bool[Tensor, "length length"]:
    """Which tokens are at most `reach` apart."""
    places = torch.arange(length, device=device)
    return (places[:, None] - places[None, :]).abs() <= reach


def nearby_mask(
    attend: Bool[Tensor, "#batch 1 #query length"] | None, length: int, reach: int, device: torch.device
) -> Bool[Tensor, "#batch 1 length length"]:
    """Which tokens see which in a local layer. A padded token still sees itself: a softmax over nothing is not a number
    in some kernels."""
    near = band(length, reach, device)[None, None]
    return near if attend is None else (near & attend) | torch.eye(length, dtype=torch.bool, device=device)


def mix_row_by_row(
    query: Float[Tensor, "tokens heads size"],
    key: Float[Tensor, "tokens heads size"],
    value: Float[Tensor, "tokens heads size"],
    starts: Sequence[int],
    reach: int,
    dropout: float,
) -> Float[Tensor, "tokens heads size"]:
    """The reference for attention over packed rows. `reach` -1: no limit."""
    mixed = []
    for start, end in pairwise(starts):
        q, k, v = (part[start:end].transpose(0, 1)[None] for part in (query, key, value))
        limited = 0 <= reach < end - start - 1
        mask = band(end - start, reach, query.device) if limited else None
        mixed.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)[0])
    return torch.cat(mixed, dim=1).transpose(0, 1)


def mix_varlen(
    query: Float[Tensor, "tokens heads size"],
    key: Float[Tensor, "tokens heads size"],
    value: Float[Tensor, "tokens heads size"],
    starts: Int[Tensor, "rows_and_one"],
    longest: int,
    reach: int,
) -> Float[Tensor, "tokens heads size"]:
    """The same in one kernel."""
    window: dict[str, Any] = {"window_size": (reach, reach)} if reach >= 0 else {}
    bounds = starts.to(torch.int32)
    parts = query.contiguous(), key.contiguous(), value.contiguous()
    mixed = varlen_attn(*parts, bounds, bounds, longest, longest, **window)
    assert isinstance(mixed, Tensor)
    return mixed


def has_varlen(device: torch.device, dtype: torch.dtype, windowed: bool) -> bool:
    """Whether torch has a kernel for such rows."""
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or not half or (windowed and not KERNEL_HAS_WINDOWS):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
