"""Muon (Jordan et al., 2024): momentum whose singular values are all made one, for the matrices inside the layers.

    m <- β m + (1 - β) g        u = β m + (1 - β) g  (Nesterov)
    W <- W - lr (0.2 sqrt(max(rows, columns)) UVᵀ + decay * W)        with u = U S Vᵀ

The factor gives the update the size that AdamW's has (root mean square 0.2; Liu et al., 2025), so that the same rate and
decay serve both. UVᵀ comes from five rounds of X <- aX + bXXᵀX + c(XXᵀ)²X. Where we differ from the original: (a, b, c)
are not the same in each round but the best for what the rounds before left over (as Amsel et al., 2025); matrices of
equal sizes, lying or standing, go through the rounds as one batch; what is stacked in one matrix (queries, keys and
values) is made orthogonal part by part.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn, optim

# Each line is the odd polynomial of degree five that brings [low, high] closest to 1, where [low, high] is what the line
# before makes of its own, from [0.001, 1]. All but the last are stretched by 1.02, so that singular values which rounding
# pushes beyond their interval come back. Together they bring [0.001, 1] into [0.83, 1.12].
ROUNDS = (
    (8.304244590, -23.659903264, 16.873111784),
    (4.100817890, -2.929398634, 0.525873398),
    (3.884173019, -2.783679715, 0.509904759),
    (3.222141373, -2.322559475, 0.459529362),
    (2.273748231, -1.644658774, 0.416190757),
)
UPDATE_SIZE = 0.2
TINY = 1e-30


@dataclass(frozen=True)
class Matrix:
    """A parameter for Muon: `parts` matrices of equal height, one above the other."""

    parameter: Tensor
    parts: int = 1

    @property
    def part_shape(self) -> tuple[int, int]:
        rows, columns = self.parameter.shape
        return rows // self.parts, columns

    @property
    def sides(self) -> tuple[int, int]:
        """Short and long: what goes through the rounds together."""
        rows, columns = self.part_shape
        return min(rows, columns), max(rows, columns)

    def lying(self, tensor: Tensor) -> Float[Tensor, "parts short long"]:
        rows, columns = self.part_shape
        parts = tensor.view(self.parts, rows, columns)
        return parts.mT if rows > columns else parts

    def standing(self, parts: Float[Tensor, "parts short long"]) -> Tensor:
        """The inverse of `lying`."""
        rows, columns = self.part_shape
        return (parts.mT if rows > columns else parts).reshape(self.parameter.shape)


def matrices_in_layers(model: nn.Module) -> list[Matrix]:
    """The weights of linear maps inside the layers. Everything else (embeddings and their projection, heads, norms,
    biases) is AdamW's. A linear map says by `stacked` how many matrices its weight is made of."""
    return [
        Matrix(part.weight, getattr(part, "stacked", 1))
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and re.search(r"(^|\.)layers\.\d+\.", name)
    ]


def orthogonalise(x: Float[Tensor, "batch short long"]) -> Float[Tensor, "batch short long"]:
    """UVᵀ for each U S Vᵀ, up to the width of the interval that ROUNDS ends with; singular values under a thousandth of
    the matrix's norm stay smaller. Zero stays zero. bfloat16 on CUDA, the tensor's own precision elsewhere."""
    norms = torch.linalg.matrix_norm(x, keepdim=True)
    dtype = torch.bfloat16 if x.is_cuda else x.dtype
    result = (x / norms.clamp(min=TINY)).to(dtype)
    for a, b, c in ROUNDS:
        gram = torch.bmm(result, result.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        result = torch.baddbmm(result, polynomial, result, beta=a)
    return result.to(x.dtype)


class Muon(optim.Optimizer):
    """Muon for groups of matrices, each with its `lr`, `weight_decay` and `momentum`, and in the same step `others`, an
    AdamW over the other parameters whose state is there already: one optimizer from outside. Groups and state of both
    are in `param_groups` and `state`, live, so that setting rates, saving and restoring need not know that there are
    two. A step can be recorded as a CUDA graph: nothing in it asks the device for a value."""

    def __init__(self, groups: list[tuple[list[Matrix], dict[str, Any]]], others: optim.Optimizer):
        super().__init__(
            [{"params": [m.parameter for m in matrices], **options} for matrices, options in groups], {}
        )
        self.batches: list[tuple[dict[str, Any], list[Matrix]]] = []
        for (matrices, _), group in zip(groups, self.param_groups, strict=True):
            by_sides: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
            for matrix in matrices:
                by_sides[matrix.sides].append(matrix)
                self.state[matrix.parameter] = {"momentum": torch.zeros_like(matrix.parameter)}
            self.batches.extend((group, same) for same in by_sides.values())
        self.others = others
        self.param_groups.extend(others.param_groups)
        self.state.update(others.state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        self.others.step()
        for group, matrices in self.batches:
            if found := [matrix for matrix in matrices if matrix.parameter.grad is not None]:
                update(found, [self.state[matrix.parameter]["momentum"] for matrix in found], group)


def update(matrices: list[Matrix], momenta: list[Tensor], group: dict[str, Any]) -> None:
    """Matrices of equal sides. `lr` may be a tensor on the device."""
    beta, lr, decay = group["momentum"], group["lr"], group["weight_decay"]
    parameters: list[Tensor] = [matrix.parameter for matrix in matrices]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_lerp_(momenta, gradients, 1 - beta)
    ahead = torch._foreach_lerp(gradients, momenta, beta)

    lying = [matrix.lying(direction) for matrix, direction in zip(matrices, ahead, strict=True)]
    size = UPDATE_SIZE * math.sqrt(matrices[0].sides[1])
    updates = orthogonalise(torch.cat(lying)) * (-lr * size)
    pieces = updates.split([matrix.parts for matrix in matrices])
    torch._foreach_mul_(parameters, 1 - lr * decay)
    torch._foreach_add_(
        parameters, [matrix.standing(piece) for matrix, piece in zip(matrices, pieces, strict=True)]
    )
