"""A whole layer of the encoder on the GPU: library matrix products, our kernels between them, and one operator that
autograd and torch.compile see.

One operator for the layer, not one for each kernel, because the backward pass then says itself what is added to what: the
gradients that meet at a residual connection are added inside a matrix product instead of by a kernel of their own.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from electra.kernels import layer_triton as kernels

SHORT = 128  # rows up to this length are one tile of attention
PROGRAMS = 4  # a processor, for kernels that add up columns


class Launch(NamedTuple):
    """Tiles and warps, fixed rather than tuned at run time: a run repeats bit for bit."""

    norm_forward: tuple[int, int] = (4, 4)  # rows of 256, warps
    norm_backward: tuple[int, int] = (4, 4)
    gelu_forward: tuple[int, int] = (2048, 4)  # elements, warps
    gelu_backward: tuple[int, int, int] = (16, 256, 8)  # rows, columns, warps
    attention_forward: tuple[int, int] = (4, 1)  # warps, stages
    attention_backward: tuple[int, int] = (8, 1)


LAUNCH = Launch()


class Drop(NamedTuple):
    """Dropout as kernels take it: factor of what stays, and the share that goes, in 2^-32, as a signed number."""

    scale: float
    threshold: int

    @classmethod
    def of(cls, share: float) -> "Drop":
        threshold = min(round(share * 2**32), 2**32 - 1)
        return cls(1 / (1 - share), threshold - 2**32 if threshold >= 2**31 else threshold)


@lru_cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def rows_a_tile(rows_of_256: int, hidden: int) -> int:
    return max(1, rows_of_256 * 256 // triton.next_power_of_2(hidden))


def add_norm(
    product: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor, seed: Tensor | None, stream: int, share: float,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """residual + dropout(product), and its LayerNorm."""
    rows, hidden = product.shape
    tile, warps = rows_a_tile(LAUNCH.norm_forward[0], hidden), LAUNCH.norm_forward[1]
    total, result = torch.empty_like(product), torch.empty_like(product)
    kernels.add_norm_forward[(triton.cdiv(rows, tile),)](
        product, residual, gamma, beta, seed, total, result, rows, hidden, eps, *Drop.of(share),
        STREAM=stream, DROPS=share > 0, ROWS=tile, HIDDEN=triton.next_power_of_2(hidden), num_warps=warps,
    )  # fmt: skip
    return total, result


def add_norm_backward(
    upstream: Tensor, total: Tensor, gamma: Tensor, seed: Tensor | None, stream: int, share: float, eps: float,
    partial: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of residual and product: the same tensor where nothing is dropped."""
    rows, hidden = total.shape
    tile, warps = rows_a_tile(LAUNCH.norm_backward[0], hidden), LAUNCH.norm_backward[1]
    of_residual = torch.empty_like(total)
    of_product = torch.empty_like(total) if share > 0 else of_residual
    kernels.add_norm_backward[(len(partial),)](
        upstream, total, gamma, seed, of_residual, of_product, partial,
        rows, hidden, partial.stride(0), eps, *Drop.of(share),
        STREAM=stream, DROPS=share > 0, ROWS=tile, HIDDEN=triton.next_power_of_2(hidden), num_warps=warps,
    )  # fmt: skip
    return of_residual, of_product


def gelu(before: Tensor) -> Tensor:
    block, warps = LAUNCH.gelu_forward
    after = torch.empty_like(before)
    kernels.gelu_forward[(triton.cdiv(before.numel(), block),)](
        before, after, before.numel(), BLOCK=block, num_warps=warps
    )
    return after


def gelu_backward(upstream: Tensor, before: Tensor, partial: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient, in the place of `upstream`, and GELU itself."""
    rows, width = before.shape
    tile, most, warps = LAUNCH.gelu_backward
    columns = min(most, triton.next_power_of_2(width))
    across = triton.cdiv(width, columns)
    after = torch.empty_like(before)
    kernels.gelu_backward[(max(1, len(partial) // across), across)](
        upstream, before, upstream, after, partial, rows, width, partial.stride(0),
        ROWS=tile, WIDTH=columns, num_warps=warps,
    )  # fmt: skip
    return upstream, after


def attention(
    projected: Tensor, is_real: Tensor | None, seed: Tensor | None, batch: int, heads: int, share: float
) -> Tensor:
    """`projected` holds queries, keys and values side by side, a token a row."""
    tokens, width = projected.shape
    seq, hidden = tokens // batch, width // 3
    warps, stages = LAUNCH.attention_forward
    mixed = projected.new_empty(tokens, hidden)
    kernels.attention_forward[(batch, heads)](
        projected, is_real, seed, mixed, seq, (hidden // heads) ** -0.5, *Drop.of(share),
        **attention_sizes(seq, hidden, heads, is_real, share), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return mixed


def attention_backward(
    projected: Tensor, is_real: Tensor | None, seed: Tensor | None, upstream: Tensor, batch: int, heads: int,
    share: float, partial: Tensor,
) -> Tensor:  # fmt: skip
    tokens, width = projected.shape
    seq, hidden = tokens // batch, width // 3
    warps, stages = LAUNCH.attention_backward
    slope = torch.empty_like(projected)
    kernels.attention_backward[(min(batch, max(1, len(partial) // heads)), heads)](
        projected, is_real, seed, upstream, slope, partial,
        batch, seq, partial.stride(0), (hidden // heads) ** -0.5, *Drop.of(share),
        **attention_sizes(seq, hidden, heads, is_real, share), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return slope


def attention_sizes(
    seq: int, hidden: int, heads: int, is_real: Tensor | None, share: float
) -> dict[str, Any]:
    return {
        "HEADS": heads,
        "SIZE": hidden // heads,
        "SEQ": max(16, triton.next_power_of_2(seq)),
        "MASKED": is_real is not None,
        "DROPS": share > 0,
    }


def cast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """All in one kernel."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def weight_gradient(upstream: Tensor, given: Tensor) -> Tensor:
    """Half-precision products, summed and returned in float32."""
    if upstream.is_cuda:
        return torch.mm(upstream.t(), given, out_dtype=torch.float32)
    return upstream.t().float() @ given.float()


def forward(
    x: Tensor, is_real: Tensor | None, seed: Tensor | None, parameters: list[Tensor], heads: int, dropout: float,
    attention_dropout: float, eps: float, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """The result, and behind it what the backward pass needs. `parameters`: weight and bias of query-key-value, attention
    output, expand and contract; then gamma and beta of the norm after attention and of the last norm."""
    batch = len(x)
    halves, norms = cast(parameters[:8], dtype), parameters[8:]
    into_qkv, qkv_bias, into_output, output_bias, into_wide, wide_bias, into_narrow, narrow_bias = halves
    rows = x.to(dtype).reshape(-1, x.shape[2])
    projected = torch.addmm(qkv_bias, rows, into_qkv.t())
    mixed = attention(projected, is_real, seed, batch, heads, attention_dropout)
    product = torch.addmm(output_bias, mixed, into_output.t())
    first, middle = add_norm(product, rows, norms[0], norms[1], seed, 1, dropout, eps)
    wide = torch.addmm(wide_bias, middle, into_wide.t())
    product = torch.addmm(narrow_bias, gelu(wide), into_narrow.t())
    second, result = add_norm(product, middle, norms[2], norms[3], seed, 2, dropout, eps)
    return [result.view(x.shape), projected, mixed, first, middle, wide, second, *halves[::2]]


def backward(
    upstream: Tensor, x: Tensor, is_real: Tensor | None, seed: Tensor | None, kept: list[Tensor], norms: list[Tensor],
    heads: int, dropout: float, attention_dropout: float, eps: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, of the four weights, and of all vectors end to end: norm after attention and output bias, last norm
    and narrow bias, wide bias, query-key-value bias."""
    projected, mixed, first, middle, wide, second, into_qkv, into_output, into_wide, into_narrow = kept
    batch, hidden, dtype = len(x), x.shape[2], projected.dtype
    rows = x.to(dtype).reshape(-1, hidden)
    lengths = [3 * hidden, 3 * hidden, wide.shape[1], 3 * hidden]
    partial = torch.zeros(PROGRAMS * processors(x.device), sum(lengths), device=x.device)
    of_first, of_second, of_wide, of_qkv = partial.split(lengths, dim=1)

    upstream = upstream.to(dtype).reshape(-1, hidden)
    residual, product = add_norm_backward(upstream, second, norms[2], seed, 2, dropout, eps, of_second)
    slope, activated = gelu_backward(product @ into_narrow, wide, of_wide)
    narrow_gradient = weight_gradient(product, activated)
    wide_gradient = weight_gradient(slope, middle)
    residual.addmm_(slope, into_wide)
    residual, product = add_norm_backward(residual, first, norms[0], seed, 1, dropout, eps, of_first)
    output_gradient = weight_gradient(product, mixed)
    slope = attention_backward(
        projected, is_real, seed, product @ into_output, batch, heads, attention_dropout, of_qkv
    )
    qkv_gradient = weight_gradient(slope, rows)
    residual.addmm_(slope, into_qkv)
    weights = qkv_gradient, output_gradient, wide_gradient, narrow_gradient
    return [residual.view(x.shape), *weights, partial.sum(0)]


def forward_shapes(
    x: Tensor, is_real: Tensor | None, seed: Tensor | None, parameters: list[Tensor], heads: int, dropout: float,
    attention_dropout: float, eps: float, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    tokens, hidden = x.shape[0] * x.shape[1], x.shape[2]
    intermediate = len(parameters[5])
    widths = 3 * hidden, hidden, hidden, hidden, intermediate, hidden
    kept = [x.new_empty(tokens, width, dtype=dtype) for width in widths]
    halves = [torch.empty_like(weight, dtype=dtype) for weight in parameters[:8:2]]
    return [x.new_empty(x.shape, dtype=dtype), *kept, *halves]


def backward_shapes(
    upstream: Tensor, x: Tensor, is_real: Tensor | None, seed: Tensor | None, kept: list[Tensor], norms: list[Tensor],
    heads: int, dropout: float, attention_dropout: float, eps: float,
) -> list[Tensor]:  # fmt: skip
    weights = [torch.empty_like(weight, dtype=torch.float32) for weight in kept[6:]]
    vectors = 9 * x.shape[2] + kept[4].shape[1]
    first = x.new_empty(x.shape, dtype=kept[0].dtype)
    return [first, *weights, x.new_empty(vectors, dtype=torch.float32)]


def remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, is_real, seed, parameters, heads, dropout, attention_dropout, eps, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, is_real, seed, *output[1:], *parameters[8:])
    ctx.settings = heads, dropout, attention_dropout, eps


def differentiate(ctx: Any, upstream: list[Tensor | None]) -> tuple[Any, ...]:
    x, is_real, seed, *saved = ctx.saved_tensors
    found = _backward_op(upstream[0], x, is_real, seed, saved[:10], saved[10:], *ctx.settings)
    of_x, of_qkv, of_output, of_wide, of_narrow, vectors = found
    hidden = x.shape[2]
    lengths = [*[hidden] * 6, len(of_wide), 3 * hidden]
    gamma1, beta1, output_bias, gamma2, beta2, narrow_bias, wide_bias, qkv_bias = vectors.split(lengths)
    weights = of_qkv, qkv_bias, of_output, output_bias, of_wide, wide_bias, of_narrow, narrow_bias
    gradients = [*weights, gamma1, beta1, gamma2, beta2]
    return of_x.to(x.dtype), None, None, gradients, None, None, None, None, None


_forward_op = torch.library.custom_op("electra::layer", forward, mutates_args=())
_forward_op.register_fake(forward_shapes)
_forward_op.register_autograd(differentiate, setup_context=remember)
_backward_op = torch.library.custom_op("electra::layer_backward", backward, mutates_args=())
_backward_op.register_fake(backward_shapes)


def fused_layer(
    x: Tensor, is_real: Tensor | None, seed: Tensor | None, parameters: list[Tensor], heads: int, dropout: float,
    attention_dropout: float, eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Products are of `dtype`, and so is the result; gradients of parameters are float32."""
    return _forward_op(x, is_real, seed, parameters, heads, dropout, attention_dropout, eps, dtype)[0]
