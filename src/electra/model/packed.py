"""Who sees whom: masks for local attention, and attention over rows of different lengths that lie end to end (the
reference, and torch's kernel for it)."""

import inspect
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def band(length: int, reach: int, device: torch.device) -> Bool[Tensor, "length length"]:
    """Which tokens are at most `reach` apart."""
    places = torch.arange(length, device=device)
    return (places[:, None] - places[None, :]).abs() <= reach


def nearby_mask(
    attend: Bool[Tensor, "batch 1 1 length"] | None, length: int, reach: int, device: torch.device
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
    from torch.nn.attention.varlen import varlen_attn

    window: dict[str, Any] = {"window_size": (reach, reach)} if reach >= 0 else {}
    bounds = starts.to(torch.int32)
    parts = query.contiguous(), key.contiguous(), value.contiguous()
    mixed = varlen_attn(*parts, bounds, bounds, longest, longest, **window)
    assert isinstance(mixed, Tensor)
    return mixed


@cache
def varlen_arguments() -> frozenset[str]:
    """What torch's kernel can be asked for; nothing where torch has none. Windows came later than the kernel."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def has_varlen(device: torch.device, dtype: torch.dtype, windowed: bool) -> bool:
    needed = "window_size" if windowed else "query"
    half = dtype in (torch.bfloat16, torch.float16)
    return (
        device.type == "cuda"
        and half
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and needed in varlen_arguments()
    )
