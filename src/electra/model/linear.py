"""Linear maps, and who multiplies on a CPU. In float32 torch asks MKL, which keeps its fast paths for Intel's processors: a core of an
AMD EPYC gets 105 GFLOP/s from it and 245 from oneDNN, which torch has too and asks for half precision only. Elsewhere large
products are oneDNN's here: the same float32, summed up in another order.
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
"""Rows. oneDNN keeps a program and its memory, a megabyte and more, for every shape that it meets, and lengths of texts are ever new:
products are cut so that it meets few. Rows that are left over stay with MKL."""
LEAST = 1 << 13
"""Weights: below, the call costs more than is saved."""


class Linear(nn.Linear):
    """A linear map that says how it starts and what it holds. `start`: "glorot" where the original code leaves the weights to
    Glorot's distribution (or a normal one would vanish), "residual" where the result is added to what the layers before
    made, so that ModernBERT starts it smaller the more layers there are. `stacked`: how many matrices its weight is made of,
    one above the other (queries, keys and values); Muon takes each by itself."""

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
    """F.linear."""
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
        and not torch.compiler.is_compiling()  # compilers and exports want operators that they know
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
        # oneDNN is slow a hundredfold where a gradient is one number, spread out by strides of zero
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
    """leftᵀ right. oneDNN copies what it is given first if that is turned: the narrower of both."""
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
    """That a number of rows is cut into."""
    found = []
    for block in BLOCKS:
        found += [block] * (count // block)
        count %= block
    return [*found, count] if count else found
