"""A whole layer of the encoder on the GPU: library matrix products, our kernels between them, and one operator that
autograd and torch.compile see.

One operator for the layer, not one for each kernel, because the backward pass then says itself what is added to what: the
gradients that meet at a residual connection are added inside a matrix product instead of by a kernel of their own.
"""

from typing import Any

import torch
from torch import Tensor

from electra.kernels.layer_launch import (
    Sums,
    add_norm,
    add_norm_backward,
    attention,
    attention_backward,
    gelu,
    gelu_backward,
    is_narrow,
    narrow_layer,
)


def cast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """All in one kernel."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def cast_shapes(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]


def rows_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One token a row, one row behind the other: kernels count on it."""
    return x.to(dtype).reshape(-1, x.shape[2]).contiguous()


def weight_gradient(upstream: Tensor, given: Tensor) -> Tensor:
    """Half-precision products, summed and returned in float32."""
    if upstream.is_cuda:
        return torch.mm(upstream.t(), given, out_dtype=torch.float32)
    return upstream.t().float() @ given.float()


def end_forward(
    mixed: Tensor, rows: Tensor, seed: Tensor | None, halves: list[Tensor], norms: list[Tensor], dropout: float,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    """From mixed values to the result, and what the way back needs."""
    into_output, output_bias, into_wide, wide_bias, into_narrow, narrow_bias = halves
    product = torch.addmm(output_bias, mixed, into_output.t())
    first, middle = add_norm(product, rows, norms[0], norms[1], seed, 1, dropout, eps)
    wide = torch.addmm(wide_bias, middle, into_wide.t())
    product = torch.addmm(narrow_bias, gelu(wide), into_narrow.t())
    second, result = add_norm(product, middle, norms[2], norms[3], seed, 2, dropout, eps)
    return [result, first, middle, wide, second]


def end_backward(
    upstream: Tensor, mixed: Tensor, seed: Tensor | None, kept: list[Tensor], halves: list[Tensor],
    norms: list[Tensor], dropout: float, eps: float, sums: Sums,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Gradients of the residual rows (through this part alone), of the mixed values, and of the three weights. `sums` takes
    those of the norm after attention and the output bias, of the last norm and the narrow bias, and of the wide bias."""
    first, middle, wide, second = kept
    into_output, _, into_wide, _, into_narrow, _ = halves
    of_first, of_second, of_wide, *_ = sums.parts
    residual, product = add_norm_backward(upstream, second, norms[2], seed, 2, dropout, eps, of_second)
    slope, activated = gelu_backward(product @ into_narrow, wide, of_wide)
    narrow_gradient = weight_gradient(product, activated)
    wide_gradient = weight_gradient(slope, middle)
    residual.addmm_(slope, into_wide)
    residual, product = add_norm_backward(residual, first, norms[0], seed, 1, dropout, eps, of_first)
    output_gradient = weight_gradient(product, mixed)
    return residual, product @ into_output, [output_gradient, wide_gradient, narrow_gradient]


def layer(
    x: Tensor, is_real: Tensor | None, seed: Tensor | None, parameters: list[Tensor], halves: list[Tensor], heads: int,
    dropout: float, attention_dropout: float, eps: float,
) -> list[Tensor]:  # fmt: skip
    """The result, and behind it what the backward pass needs. `parameters`: weight and bias of query-key-value, attention
    output, expand and contract; then gamma and beta of the norm after attention and of the last norm. `halves`: the first
    eight in the precision of products."""
    rows = rows_of(x, halves[0].dtype)
    is_real = None if is_real is None else is_real.contiguous()
    if is_narrow(x.shape[2], len(halves[5])):
        rest = len(x), heads, dropout, attention_dropout, eps
        result, *kept = narrow_layer(rows, is_real, seed, halves, parameters[8:], *rest)
        return [result.view(x.shape), *kept]
    projected = torch.addmm(halves[1], rows, halves[0].t())
    mixed = attention(projected, is_real, seed, len(x), heads, attention_dropout)
    result, *kept = end_forward(mixed, rows, seed, halves[2:], parameters[8:], dropout, eps)
    return [result.view(x.shape), projected, mixed, *kept]


def layer_backward(
    upstream: Tensor, x: Tensor, is_real: Tensor | None, seed: Tensor | None, kept: list[Tensor], halves: list[Tensor],
    norms: list[Tensor], heads: int, dropout: float, attention_dropout: float, eps: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, of the four weights, and of all vectors end to end, in the order of end_backward, then that of the
    query-key-value bias."""
    projected, mixed, *rest = kept
    batch, hidden, dtype = len(x), x.shape[2], projected.dtype
    rows = rows_of(x, dtype)
    is_real = None if is_real is None else is_real.contiguous()
    sums = Sums(x.device, 3 * hidden, 3 * hidden, len(halves[5]), 3 * hidden)
    upstream = rows_of(upstream, dtype)
    residual, of_mixed, weights = end_backward(
        upstream, mixed, seed, rest, halves[2:], norms, dropout, eps, sums
    )
    slope = attention_backward(
        projected, is_real, seed, of_mixed, batch, heads, attention_dropout, sums.parts[3]
    )
    qkv_gradient = weight_gradient(slope, rows)
    residual.addmm_(slope, halves[0])
    return [residual.view(x.shape), qkv_gradient, *weights, sums.add_up()]


def layer_shapes(
    x: Tensor, is_real: Tensor | None, seed: Tensor | None, parameters: list[Tensor], halves: list[Tensor], heads: int,
    dropout: float, attention_dropout: float, eps: float,
) -> list[Tensor]:  # fmt: skip
    tokens, hidden = x.shape[0] * x.shape[1], x.shape[2]
    widths = 3 * hidden, hidden, hidden, hidden, len(halves[5]), hidden
    kept = [halves[0].new_empty(tokens, width) for width in widths]
    return [halves[0].new_empty(x.shape), *kept]


def layer_backward_shapes(
    upstream: Tensor, x: Tensor, is_real: Tensor | None, seed: Tensor | None, kept: list[Tensor], halves: list[Tensor],
    norms: list[Tensor], heads: int, dropout: float, attention_dropout: float, eps: float,
) -> list[Tensor]:  # fmt: skip
    weights = [torch.empty_like(weight, dtype=torch.float32) for weight in halves[::2]]
    vectors = 9 * x.shape[2] + len(halves[5])
    return [halves[0].new_empty(x.shape), *weights, x.new_empty(vectors, dtype=torch.float32)]


def remember_layer(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, is_real, seed, parameters, halves, *settings = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, is_real, seed, *output[1:], *halves, *parameters[8:])
    ctx.settings = settings


def differentiate_layer(ctx: Any, upstream: list[Tensor | None]) -> tuple[Any, ...]:
    x, is_real, seed, *saved = ctx.saved_tensors
    given = x, is_real, seed, saved[:6], saved[6:14], saved[14:]
    of_x, of_qkv, *weights, vectors = _layer_backward(upstream[0], *given, *ctx.settings)
    hidden = x.shape[2]
    ends, qkv_bias = vectors.split([len(vectors) - 3 * hidden, 3 * hidden])
    gradients = [of_qkv, qkv_bias, *in_order(weights, ends, hidden)]
    return of_x.to(x.dtype), None, None, gradients, [None] * 8, None, None, None, None


def in_order(weights: list[Tensor], vectors: Tensor, hidden: int) -> list[Tensor]:
    """Gradients of the end's parameters, from what its backward pass gives."""
    lengths = [*[hidden] * 6, len(vectors) - 6 * hidden]
    gamma1, beta1, output_bias, gamma2, beta2, narrow_bias, wide_bias = vectors.split(lengths)
    of_output, of_wide, of_narrow = weights
    return [of_output, output_bias, of_wide, wide_bias, of_narrow, narrow_bias, gamma1, beta1, gamma2, beta2]


def end(
    mixed: Tensor, x: Tensor, seed: Tensor | None, parameters: list[Tensor], halves: list[Tensor], dropout: float,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    """A layer without its attention, for rows that our attention does not hold: all arguments as there, less the first two
    parameters and halves."""
    rows, values = (rows_of(tensor, halves[0].dtype) for tensor in (x, mixed))
    result, *kept = end_forward(values, rows, seed, halves, parameters[6:], dropout, eps)
    return [result.view(x.shape), *kept]


def end_op_backward(
    upstream: Tensor, mixed: Tensor, seed: Tensor | None, kept: list[Tensor], halves: list[Tensor],
    norms: list[Tensor], dropout: float, eps: float,
) -> list[Tensor]:  # fmt: skip
    hidden, dtype = mixed.shape[2], halves[0].dtype
    given = rows_of(upstream, dtype), rows_of(mixed, dtype)
    sums = Sums(mixed.device, 3 * hidden, 3 * hidden, len(halves[3]))
    residual, of_mixed, weights = end_backward(*given, seed, kept, halves, norms, dropout, eps, sums)
    return [residual.view(mixed.shape), of_mixed.view(mixed.shape), *weights, sums.add_up()]


def end_shapes(
    mixed: Tensor, x: Tensor, seed: Tensor | None, parameters: list[Tensor], halves: list[Tensor], dropout: float,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    tokens, hidden = x.shape[0] * x.shape[1], x.shape[2]
    kept = [halves[0].new_empty(tokens, width) for width in (hidden, hidden, len(halves[3]), hidden)]
    return [halves[0].new_empty(x.shape), *kept]


def end_backward_shapes(
    upstream: Tensor, mixed: Tensor, seed: Tensor | None, kept: list[Tensor], halves: list[Tensor],
    norms: list[Tensor], dropout: float, eps: float,
) -> list[Tensor]:  # fmt: skip
    rows = [halves[0].new_empty(mixed.shape) for _ in range(2)]
    weights = [torch.empty_like(weight, dtype=torch.float32) for weight in halves[::2]]
    vectors = 6 * mixed.shape[2] + len(halves[3])
    return [*rows, *weights, mixed.new_empty(vectors, dtype=torch.float32)]


def remember_end(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    mixed, x, seed, parameters, halves, *settings = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(mixed, seed, *output[1:], *halves, *parameters[6:])
    ctx.settings, ctx.dtype = settings, x.dtype


def differentiate_end(ctx: Any, upstream: list[Tensor | None]) -> tuple[Any, ...]:
    mixed, seed, *saved = ctx.saved_tensors
    given = mixed, seed, saved[:4], saved[4:10], saved[10:]
    of_x, of_mixed, *weights, vectors = _end_backward(upstream[0], *given, *ctx.settings)
    gradients = in_order(weights, vectors, mixed.shape[2])
    return of_mixed.to(mixed.dtype), of_x.to(ctx.dtype), None, gradients, [None] * 6, None, None


# Operators of torch's own kind: torch.compile takes them as they are and does not look inside.
halves_of = torch.library.custom_op("electra::cast", cast, mutates_args=())
halves_of.register_fake(cast_shapes)
fused_layer = torch.library.custom_op("electra::layer", layer, mutates_args=())
fused_layer.register_fake(layer_shapes)
fused_layer.register_autograd(differentiate_layer, setup_context=remember_layer)
_layer_backward = torch.library.custom_op("electra::layer_backward", layer_backward, mutates_args=())
_layer_backward.register_fake(layer_backward_shapes)
fused_end = torch.library.custom_op("electra::layer_end", end, mutates_args=())
fused_end.register_fake(end_shapes)
fused_end.register_autograd(differentiate_end, setup_context=remember_end)
_end_backward = torch.library.custom_op("electra::layer_end_backward", end_op_backward, mutates_args=())
_end_backward.register_fake(end_backward_shapes)
