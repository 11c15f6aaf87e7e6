"""Launches the layer's kernels: tiles, warps, and the tensors that they write."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from electra.kernels import has_shared_memory, processors
from electra.kernels.layer import triton as kernels

SHORT = 128  # rows up to this length are one tile of attention
PROGRAMS = 4  # per multiprocessor at most, for kernels that add up columns


class Launch(NamedTuple):
    """Tiles and warps, fixed rather than tuned at run time: a run repeats bit for bit."""

    norm_forward: tuple[int, int] = (8, 4)  # rows of 256, warps
    norm_backward: tuple[int, int, int] = (4, 2, 4)  # the same, and stages: one less with dropout
    gelu_forward: tuple[int, int] = (1024, 4)  # elements, warps
    gelu_backward: tuple[int, int, int, int] = (4, 256, 4, 3)  # rows, columns, warps, stages
    geglu: tuple[int, int] = (1024, 4)  # elements, warps
    attention_forward: tuple[int, int] = (8, 2)  # warps, stages
    attention_backward: tuple[int, int] = (8, 2)
    rotary_forward: tuple[int, int, int] = (8, 2, 2)  # warps, stages, programs per multiprocessor
    rotary_backward: tuple[int, int, int] = (8, 2, 1)
    long_attention: tuple[int, int, int] = (64, 4, 2)  # tokens, warps, stages
    sum_columns: tuple[int, int] = (16, 4)  # columns, warps


LAUNCH = Launch()


def drop_numbers(dropout: float) -> tuple[float, int]:
    """Dropout as the kernels take it: the factor of what is kept, and the dropped fraction times 2^32, as a signed number."""
    threshold = min(round(dropout * 2**32), 2**32 - 1)
    return 1 / (1 - dropout), threshold - 2**32 if threshold >= 2**31 else threshold


def rows_per_tile(rows_of_256: int, hidden: int) -> int:
    return max(1, rows_of_256 * 256 // next_power_of_2(hidden))


def add_norm(
    product: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor, seed: Tensor | None, stream: int, dropout: float,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """residual + dropout(product), and its LayerNorm."""
    rows, hidden = product.shape
    tile, warps = rows_per_tile(LAUNCH.norm_forward[0], hidden), LAUNCH.norm_forward[1]
    total, result = torch.empty_like(product), torch.empty_like(product)
    kernels.add_norm_forward_kernel[(cdiv(rows, tile),)](
        product, residual, gamma, beta, seed, total, None, result, rows, hidden, eps, *drop_numbers(dropout), stream,
        DROPS=dropout > 0, ROWS=tile, HIDDEN=next_power_of_2(hidden), num_warps=warps,
    )  # fmt: skip
    return total, result


def add_norm_in_place(product: Tensor, stream: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `product` to the residual stream, which has a precision of its own. Returns the sum as the backward pass reads it,
    in the product's precision, and its LayerNorm without a bias."""
    rows, hidden = product.shape
    tile, warps = rows_per_tile(LAUNCH.norm_forward[0], hidden), LAUNCH.norm_forward[1]
    kept, result = torch.empty_like(product), torch.empty_like(product)
    kernels.add_norm_forward_kernel[(cdiv(rows, tile),)](
        product, stream, gamma, None, None, stream, kept, result, rows, hidden, eps, *drop_numbers(0.0), 0,
        DROPS=False, ROWS=tile, HIDDEN=next_power_of_2(hidden), num_warps=warps,
    )  # fmt: skip
    return kept, result


def add_norm_backward(
    grad_output: Tensor, total: Tensor, gamma: Tensor, seed: Tensor | None, stream: int, dropout: float, eps: float,
    partial: Tensor, past: Tensor | None = None, has_biases: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of residual and product, the same tensor if nothing is dropped. `past` is added to them."""
    rows, hidden = total.shape
    rows_of_256, warps, stages = LAUNCH.norm_backward
    tile = rows_per_tile(rows_of_256, hidden)
    grad_residual = torch.empty_like(grad_output)
    grad_product = torch.empty_like(grad_output) if dropout > 0 else grad_residual
    kernels.add_norm_backward_kernel[(len(partial),)](
        grad_output, total, past, gamma, seed, grad_residual, grad_product, partial,
        rows, hidden, partial.stride(0), eps, *drop_numbers(dropout), stream,
        BIASES=has_biases, DROPS=dropout > 0, ROWS=tile, HIDDEN=next_power_of_2(hidden), STAGES=stages - (dropout > 0),
        num_warps=warps,
    )  # fmt: skip
    return grad_residual, grad_product


def gelu(before: Tensor) -> Tensor:
    block, warps = LAUNCH.gelu_forward
    after = torch.empty_like(before)
    kernels.gelu_forward_kernel[(cdiv(before.numel(), block),)](
        before, after, before.numel(), BLOCK=block, num_warps=warps
    )
    return after


def gelu_backward(grad_output: Tensor, before: Tensor, partial: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient, which overwrites `grad_output`, and GELU itself."""
    rows, width = before.shape
    tile, most, warps, stages = LAUNCH.gelu_backward
    columns = min(most, next_power_of_2(width))
    across = cdiv(width, columns)
    after = torch.empty_like(before)
    kernels.gelu_backward_kernel[(max(1, len(partial) // across), across)](
        grad_output, before, grad_output, after, partial, rows, width, partial.stride(0),
        ROWS=tile, WIDTH=columns, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return grad_output, after


def geglu(wide: Tensor) -> Tensor:
    rows, width = len(wide), wide.shape[1] // 2
    after = wide.new_empty(rows, width)
    grid, sizes = geglu_tiles(rows, width)
    kernels.geglu_forward_kernel[grid](wide, after, rows, width, **sizes)
    return after


def geglu_backward(grad_output: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `wide`, and GeGLU itself."""
    rows, width = grad_output.shape
    grad_wide, after = torch.empty_like(wide), torch.empty_like(grad_output)
    grid, sizes = geglu_tiles(rows, width)
    kernels.geglu_backward_kernel[grid](grad_output, wide, grad_wide, after, rows, width, **sizes)
    return grad_wide, after


def geglu_tiles(rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Tiles whose width divides `width` if that is wide enough for efficient reads: 704 are 11 of 64."""
    elements, warps = LAUNCH.geglu
    divides = width & -width
    columns = min(256, divides) if divides >= 32 else min(256, next_power_of_2(width))
    tile = elements // columns
    return (cdiv(rows, tile), cdiv(width, columns)), {"ROWS": tile, "WIDTH": columns, "num_warps": warps}


def attention(
    projected: Tensor, is_real: Tensor | None, seed: Tensor | None, batch: int, heads: int, dropout: float
) -> Tensor:
    """Attention over short rows. `projected` holds queries, keys and values side by side, one token per row."""
    tokens, width = projected.shape
    seq, hidden = tokens // batch, width // 3
    warps, stages = LAUNCH.attention_forward
    attention_out = projected.new_empty(tokens, hidden)
    kernels.attention_forward_kernel[(batch, heads)](
        projected, is_real, seed, attention_out, seq, (hidden // heads) ** -0.5, *drop_numbers(dropout),
        **row_sizes(seq, hidden, heads, is_real), DROPS=dropout > 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return attention_out


def attention_backward(
    projected: Tensor, is_real: Tensor | None, seed: Tensor | None, grad_output: Tensor, batch: int, heads: int,
    dropout: float, partial: Tensor,
) -> Tensor:  # fmt: skip
    tokens, width = projected.shape
    seq, hidden = tokens // batch, width // 3
    warps, stages = LAUNCH.attention_backward
    stages = stages if has_shared_memory(projected.device, 200_000) else 1
    grad_projected = torch.empty_like(projected)
    programs = min(batch, max(1, processors(projected.device) // heads))
    kernels.attention_backward_kernel[(programs, heads)](
        projected, is_real, seed, grad_output, grad_projected, partial,
        batch, seq, partial.stride(0), (hidden // heads) ** -0.5, *drop_numbers(dropout),
        **row_sizes(seq, hidden, heads, is_real), DROPS=dropout > 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return grad_projected


def row_sizes(seq: int, hidden: int, heads: int, is_real: Tensor | None) -> dict[str, Any]:
    """The constants of an attention kernel whose tile is a whole row."""
    tile = max(16, next_power_of_2(seq))
    return {"HEADS": heads, "SIZE": hidden // heads, "SEQ": tile, "MASKED": is_real is not None, "FULL": seq == tile}


def rotary_attention(
    projected: Tensor, is_real: Tensor | None, angles: Tensor, heads: int, reach: int
) -> tuple[Tensor, Tensor]:
    """`angles`: cos and sin of each position, for half of a head. `reach`: how far a token sees, 0 for the whole row. Returns the
    attention output and what the backward pass of long rows needs: the logarithm of each token's sum of weights."""
    seq, hidden = angles.shape[1], projected.shape[1] // 3
    batch, scale = len(projected) // seq, (hidden // heads) ** -0.5
    attention_out = projected.new_empty(len(projected), hidden)
    if seq > SHORT:
        tile, warps, stages = LAUNCH.long_attention
        log_sums = projected.new_empty(batch * heads * seq, dtype=torch.float32)
        kernels.long_attention_forward_kernel[(cdiv(seq, tile), heads, batch)](
            projected, is_real, angles, attention_out, log_sums, seq, scale, reach,
            **long_sizes(seq, hidden, heads, is_real, reach), num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return attention_out, log_sums
    warps, stages, each = LAUNCH.rotary_forward
    programs = min(batch, max(1, each * processors(projected.device) // heads))
    kernels.rotary_attention_forward_kernel[(programs, heads)](
        projected, is_real, angles, attention_out, batch, seq, scale, reach,
        **rotary_sizes(seq, hidden, heads, is_real, reach), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return attention_out, projected.new_empty(0, dtype=torch.float32)


def rotary_attention_backward(
    projected: Tensor, is_real: Tensor | None, angles: Tensor, attention_out: Tensor, log_sums: Tensor, grad_output: Tensor,
    heads: int, reach: int,
) -> Tensor:  # fmt: skip
    seq, hidden = angles.shape[1], projected.shape[1] // 3
    batch, scale = len(projected) // seq, (hidden // heads) ** -0.5
    grad_projected = torch.empty_like(projected)
    if seq > SHORT:
        tile, warps, stages = LAUNCH.long_attention
        kernels.long_attention_backward_kernel[(cdiv(seq, tile), heads, batch)](
            projected, is_real, angles, attention_out, log_sums, grad_output, grad_projected, seq, scale, reach,
            **long_sizes(seq, hidden, heads, is_real, reach), num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return grad_projected
    warps, stages, each = LAUNCH.rotary_backward
    stages = stages if has_shared_memory(projected.device, 200_000) else 1
    programs = min(batch, max(1, each * processors(projected.device) // heads))
    kernels.rotary_attention_backward_kernel[(programs, heads)](
        projected, is_real, angles, grad_output, grad_projected, batch, seq, scale, reach,
        **rotary_sizes(seq, hidden, heads, is_real, reach), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return grad_projected


def long_sizes(seq: int, hidden: int, heads: int, is_real: Tensor | None, reach: int) -> dict[str, Any]:
    size = hidden // heads
    sizes = {"HEADS": heads, "SIZE": size, "HALF": size // 2, "TILE": LAUNCH.long_attention[0]}
    return sizes | {"MASKED": is_real is not None, "LOCAL": 0 < reach < seq - 1}


def rotary_sizes(seq: int, hidden: int, heads: int, is_real: Tensor | None, reach: int) -> dict[str, Any]:
    half = hidden // heads // 2
    return row_sizes(seq, hidden, heads, is_real) | {"HALF": half, "LOCAL": 0 < reach < seq - 1}


class ColumnSums:
    """A buffer for the column sums of a backward pass: a line for each program, all added up once at the end. Lines for which a
    kernel has no program stay zero."""

    def __init__(self, device: torch.device, *lengths: int):
        self.partial = torch.zeros(PROGRAMS * processors(device), sum(lengths), device=device)
        self.parts = self.partial.split(lengths, dim=1)

    def total(self) -> Tensor:
        return sum_columns(self.partial)


def sum_columns(partial: Tensor) -> Tensor:
    rows, columns = partial.shape
    total = partial.new_empty(columns)
    width, warps = LAUNCH.sum_columns
    kernels.sum_columns_kernel[(cdiv(columns, width),)](
        partial, total, rows, columns, ROWS=64, WIDTH=width, num_warps=warps
    )
    return total
