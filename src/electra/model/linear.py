"""Linear layers that use oneDNN on CPUs that are not Intel's. For float32, torch calls MKL, which keeps its fast paths for Intel: a core
of an AMD EPYC reaches 105 GFLOP/s with it and 245 with oneDNN, which torch includes but calls for half precision only. On other CPUs
large products go to oneDNN here: the same float32 arithmetic, summed in another order.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BLOCKS = 1024, 256
"""Rows per product. oneDNN caches a compiled kernel and its memory, a megabyte and more, for every new shape, and texts have ever new
lengths, so products are cut into these few shapes. MKL computes the remaining rows."""
LEAST = 1 << 13
"""Weights of a matrix. With fewer, the call costs more than it saves."""


class Linear(nn.Linear):
    """A linear layer that knows its initialisation and its parts. `start`: "glorot" if the original code uses Glorot's distribution
    (or the result of a normal one would vanish), "residual" if the result is added to the residual stream, where ModernBERT
    initialises with a deviation that shrinks with the number of layers. `stacked`: how many matrices its weight is made of, stacked
    along the outputs (queries, keys and values); Muon updates each on its own."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool = True, *,
        start: Literal["normal", "glorot", "residual"] = "normal", stacked: int = 1,
    ):  # fmt: skip
        super().__init__(inputs, outputs, bias)
        self.start, self.stacked = start, stacked

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(
    x: Float[Tensor, "*rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, "outputs"] | None = None,
) -> Float[Tensor, "*rows outputs"]:
    """F.linear, by oneDNN if that is faster."""
    if gains_by_onednn(x, weight):
        return OneDnnLinear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


def gains_by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and weight.numel() >= LEAST
        and x.numel() >= BLOCKS[-1] * weight.shape[1]
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()  # compilers and exports need operators that they know
        and is_mkl_slow()
    )


@cache
def is_mkl_slow() -> bool:
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and hasattr(torch.ops.mkldnn, "_linear_pointwise") and "Intel" not in processor()


def processor() -> str:
    described = Path("/proc/cpuinfo")
    return described.read_text("utf-8", "replace") if described.is_file() else platform.processor()


class OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.reshape(-1, weight.shape[1]).contiguous(), weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # oneDNN is a hundred times slower on a gradient that is one number expanded by strides of zero
        grad, rows = (it.reshape(-1, it.shape[-1]).contiguous() for it in (grad, x))
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            product(grad, weight.T).view(x.shape) if for_x else None,
            crossed(grad, rows) if for_weight else None,
            grad.sum(0) if for_bias else None,
        )


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows weightᵀ + bias."""
    parts = [multiply(part, weight, bias, len(part)) for part in rows.split(sizes(len(rows)))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def crossed(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right. oneDNN copies its first operand if it is transposed, so the narrower one goes first."""
    if right.shape[1] < left.shape[1]:
        return crossed(right, left).T
    parts = zip(left.split(sizes(len(left))), right.split(sizes(len(left))), strict=True)
    total, *others = (multiply(one.T, other.T, None, len(one)) for one, other in parts)
    for part in others:
        total += part
    return total


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    if rows in BLOCKS:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def sizes(count: int) -> list[int]:
    """The sizes of the pieces that `count` rows are cut into."""
    found = []
    for block in BLOCKS:
        found += [block] * (count // block)
        count %= block
    return [*found, count] if count else found
