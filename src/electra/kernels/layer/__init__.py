"""Layers of ELECTRA's encoder on the GPU, equal to model.electra.ElectraLayer: library matrix products, our kernels between
them, and one operator that autograd and torch.compile see.

One operator for the layer, not one for each kernel, because the backward pass then says itself what is added to what: the
gradients that meet at a residual connection are added inside a matrix product instead of by a kernel of their own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from electra.kernels import product_dtype
from electra.kernels.layer.launch import (
    SHORT,
    ColumnSums,
    add_norm,
    add_norm_backward,
    attention,
    attention_backward,
    gelu,
    gelu_backward,
)

HEAD_SIZES = (16, 32, 64)  # of 128 are more than a processor holds


def fused_layers(
    x: Float[Tensor, "batch seq hidden"],
    is_real: Bool[Tensor, "batch seq"] | None,
    layers: list[list[Tensor]],
    heads: int,
    dropout: float,
    attention_dropout: float,
    eps: float,
) -> Float[Tensor, "batch seq hidden"]:
    """`layers`: the parameters of each, in the order of `layer`. What is dropped follows torch's generator. Our attention
    takes short rows and heads of a size that tensor cores like; for others it is torch's, and only the rest of the layer
    is fused."""
    if not layers:
        return x
    dtype = product_dtype(x)
    halves = halve([tensor.detach() for parameters in layers for tensor in parameters[:8]], dtype)
    drops = dropout > 0 or attention_dropout > 0
    seeds = torch.randint(2**62, (len(layers),), device=x.device) if drops else None
    has_our_attention = x.shape[1] <= SHORT and x.shape[2] // heads in HEAD_SIZES
    for number, parameters in enumerate(layers):
        seed = None if seeds is None else seeds[number]
        half_weights = halves[8 * number : 8 * number + 8]
        if has_our_attention:
            x = fused_layer(x, is_real, seed, parameters, half_weights, heads, dropout, attention_dropout, eps)[0]
        else:
            weight, bias = (tensor.to(dtype) for tensor in parameters[:2])
            projected = F.linear(x.to(dtype), weight, bias)
            attention_out = long_attention(projected, is_real, heads, attention_dropout)
            x = fused_end(attention_out, x, seed, parameters[2:], half_weights[2:], dropout, eps)[0]
    return x


def long_attention(
    projected: Float[Tensor, "batch seq three_hidden"],
    is_real: Bool[Tensor, "batch seq"] | None,
    heads: int,
    dropout: float,
) -> Float[Tensor, "batch seq hidden"]:
    batch, seq, width = projected.shape
    query, key, value = projected.view(batch, seq, 3, heads, width // 3 // heads).permute(2, 0, 3, 1, 4)
    mask = None if is_real is None else is_real[:, None, None, :]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    return out.transpose(1, 2).reshape(batch, seq, width // 3)


def cast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """All in one kernel."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def cast_shapes(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]


def rows_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One token per row, one row behind the other: kernels count on it."""
    return x.to(dtype).reshape(-1, x.shape[2]).contiguous()


def weight_gradient(grad_output: Tensor, inputs: Tensor) -> Tensor:
    """Half-precision products, summed and returned in float32."""
    if grad_output.is_cuda:
        return torch.mm(grad_output.t(), inputs, out_dtype=torch.float32)
    return grad_output.t().float() @ inputs.float()


def end_forward(
    attention_out: Tensor, rows: Tensor, seed: Tensor | None, half_weights: list[Tensor], norms: list[Tensor], dropout: float,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    """From the attention's output to the result, and what the backward pass needs."""
    into_output, output_bias, into_wide, wide_bias, into_narrow, narrow_bias = half_weights
    product = torch.addmm(output_bias, attention_out, into_output.t())
    first, middle = add_norm(product, rows, norms[0], norms[1], seed, 1, dropout, eps)
    wide = torch.addmm(wide_bias, middle, into_wide.t())
    product = torch.addmm(narrow_bias, gelu(wide), into_narrow.t())
    second, result = add_norm(product, middle, norms[2], norms[3], seed, 2, dropout, eps)
    return [result, first, middle, wide, second]


def end_backward(
    grad_output: Tensor, attention_out: Tensor, seed: Tensor | None, kept: list[Tensor], half_weights: list[Tensor],
    norms: list[Tensor], dropout: float, eps: float, sums: ColumnSums,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Gradients of the residual rows (through this part alone), of the attention's output, and of the three weights.
    `sums` takes those of the norm after attention and the output bias, of the last norm and the narrow bias, and of the wide bias."""
    first, middle, wide, second = kept
    into_output, _, into_wide, _, into_narrow, _ = half_weights
    first_sums, second_sums, wide_sums, *_ = sums.parts
    # through the last norm and the feed-forward part
    residual, product = add_norm_backward(grad_output, second, norms[2], seed, 2, dropout, eps, second_sums)
    grad_wide, activated = gelu_backward(product @ into_narrow, wide, wide_sums)
    narrow_gradient = weight_gradient(product, activated)
    wide_gradient = weight_gradient(grad_wide, middle)
    # both ways into the middle meet inside a product; then through the norm after attention
    residual.addmm_(grad_wide, into_wide)
    residual, product = add_norm_backward(residual, first, norms[0], seed, 1, dropout, eps, first_sums)
    output_gradient = weight_gradient(product, attention_out)
    return residual, product @ into_output, [output_gradient, wide_gradient, narrow_gradient]


def layer(
    x: Tensor, is_real: Tensor | None, seed: Tensor | None, parameters: list[Tensor], half_weights: list[Tensor], heads: int,
    dropout: float, attention_dropout: float, eps: float,
) -> list[Tensor]:  # fmt: skip
    """The result, and behind it what the backward pass needs. `parameters`: weight and bias of query-key-value, attention
    output, expand and contract; then gamma and beta of the norm after attention and of the last norm. `half_weights`: the first
    eight in the precision of products."""
    rows = rows_of(x, half_weights[0].dtype)
    is_real = None if is_real is None else is_real.contiguous()
    projected = torch.addmm(half_weights[1], rows, half_weights[0].t())
    attention_out = attention(projected, is_real, seed, len(x), heads, attention_dropout)
    result, *kept = end_forward(attention_out, rows, seed, half_weights[2:], parameters[8:], dropout, eps)
    return [result.view(x.shape), projected, attention_out, *kept]


def layer_backward(
    grad_output: Tensor, x: Tensor, is_real: Tensor | None, seed: Tensor | None, kept: list[Tensor], half_weights: list[Tensor],
    norms: list[Tensor], heads: int, dropout: float, attention_dropout: float, eps: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, of the four weights, and of all vectors end to end, in the order of end_backward, then that of the
    query-key-value bias."""
    projected, attention_out, *rest = kept
    batch, hidden, dtype = len(x), x.shape[2], projected.dtype
    rows = rows_of(x, dtype)
    is_real = None if is_real is None else is_real.contiguous()
    sums = ColumnSums(x.device, 3 * hidden, 3 * hidden, len(half_weights[5]), 3 * hidden)
    grad_output = rows_of(grad_output, dtype)
    residual, grad_attention, weights = end_backward(
        grad_output, attention_out, seed, rest, half_weights[2:], norms, dropout, eps, sums
    )
    grad_projected = attention_backward(
        projected, is_real, seed, grad_attention, batch, heads, attention_dropout, sums.parts[3]
    )
    qkv_gradient = weight_gradient(grad_projected, rows)
    residual.addmm_(grad_projected, half_weights[0])
    return [residual.view(x.shape), qkv_gradient, *weights, sums.total()]


def forward_shapes(
    x: Tensor, second: Any, seed: Any, parameters: Any, half_weights: list[Tensor], *_: Any
) -> list[Tensor]:
    """Of `layer` and, which has six weights, of `end`, where the attention's output is of x's shape."""
    tokens, hidden = x.shape[0] * x.shape[1], x.shape[2]
    widths = [3 * hidden, hidden] if len(half_weights) == 8 else []
    kept = [half_weights[0].new_empty(tokens, w) for w in (*widths, hidden, hidden, len(half_weights[-3]), hidden)]
    return [half_weights[0].new_empty(x.shape), *kept]


def layer_backward_shapes(
    grad_output: Any, x: Tensor, is_real: Any, seed: Any, kept: Any, half_weights: list[Tensor], *_: Any
) -> list[Tensor]:
    weights = [torch.empty_like(weight, dtype=torch.float32) for weight in half_weights[::2]]
    vectors = 9 * x.shape[2] + len(half_weights[5])
    return [half_weights[0].new_empty(x.shape), *weights, x.new_empty(vectors, dtype=torch.float32)]


def remember_layer(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, is_real, seed, parameters, half_weights, *settings = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, is_real, seed, *output[1:], *half_weights, *parameters[8:])
    ctx.settings = settings


def differentiate_layer(ctx: Any, grad_output: list[Tensor | None]) -> tuple[Any, ...]:
    x, is_real, seed, *saved = ctx.saved_tensors
    inputs = x, is_real, seed, saved[:6], saved[6:14], saved[14:]
    grad_x, grad_qkv, *weights, vectors = _layer_backward(grad_output[0], *inputs, *ctx.settings)
    hidden = x.shape[2]
    ends, qkv_bias = vectors.split([len(vectors) - 3 * hidden, 3 * hidden])
    gradients = [grad_qkv, qkv_bias, *in_order(weights, ends, hidden)]
    return grad_x.to(x.dtype), None, None, gradients, [None] * 8, None, None, None, None


def in_order(weights: list[Tensor], vectors: Tensor, hidden: int) -> list[Tensor]:
    """Gradients of the end's parameters, from what its backward pass gives."""
    lengths = [*[hidden] * 6, len(vectors) - 6 * hidden]
    gamma1, beta1, output_bias, gamma2, beta2, narrow_bias, wide_bias = vectors.split(lengths)
    output, wide, narrow = weights
    return [output, output_bias, wide, wide_bias, narrow, narrow_bias, gamma1, beta1, gamma2, beta2]


def end(
    attention_out: Tensor, x: Tensor, seed: Tensor | None, parameters: list[Tensor], half_weights: list[Tensor], dropout: float,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    """A layer without its attention, for rows that our attention does not hold: all arguments as there, less the first two
    parameters and half weights."""
    rows, values = (rows_of(tensor, half_weights[0].dtype) for tensor in (x, attention_out))
    result, *kept = end_forward(values, rows, seed, half_weights, parameters[6:], dropout, eps)
    return [result.view(x.shape), *kept]


def end_op_backward(
    grad_output: Tensor, attention_out: Tensor, seed: Tensor | None, kept: list[Tensor], half_weights: list[Tensor],
    norms: list[Tensor], dropout: float, eps: float,
) -> list[Tensor]:  # fmt: skip
    hidden, dtype = attention_out.shape[2], half_weights[0].dtype
    inputs = rows_of(grad_output, dtype), rows_of(attention_out, dtype)
    sums = ColumnSums(attention_out.device, 3 * hidden, 3 * hidden, len(half_weights[3]))
    residual, grad_attention, weights = end_backward(*inputs, seed, kept, half_weights, norms, dropout, eps, sums)
    return [residual.view(attention_out.shape), grad_attention.view(attention_out.shape), *weights, sums.total()]


def end_backward_shapes(
    grad_output: Any, attention_out: Tensor, seed: Any, kept: Any, half_weights: list[Tensor], *_: Any
) -> list[Tensor]:
    rows = [half_weights[0].new_empty(attention_out.shape) for _ in range(2)]
    weights = [torch.empty_like(weight, dtype=torch.float32) for weight in half_weights[::2]]
    vectors = 6 * attention_out.shape[2] + len(half_weights[3])
    return [*rows, *weights, attention_out.new_empty(vectors, dtype=torch.float32)]


def remember_end(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    attention_out, x, seed, parameters, half_weights, *settings = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(attention_out, seed, *output[1:], *half_weights, *parameters[6:])
    ctx.settings, ctx.dtype = settings, x.dtype


def differentiate_end(ctx: Any, grad_output: list[Tensor | None]) -> tuple[Any, ...]:
    attention_out, seed, *saved = ctx.saved_tensors
    inputs = attention_out, seed, saved[:4], saved[4:10], saved[10:]
    grad_x, grad_attention, *weights, vectors = _end_backward(grad_output[0], *inputs, *ctx.settings)
    gradients = in_order(weights, vectors, attention_out.shape[2])
    return (grad_attention.to(attention_out.dtype), grad_x.to(ctx.dtype), None, gradients, [None] * 6, None, None)


# Operators of torch's own kind: torch.compile takes them as they are and does not look inside.
halve = torch.library.custom_op("electra::cast", cast, mutates_args=())
halve.register_fake(cast_shapes)
fused_layer = torch.library.custom_op("electra::layer", layer, mutates_args=())
fused_layer.register_fake(forward_shapes)
fused_layer.register_autograd(differentiate_layer, setup_context=remember_layer)
_layer_backward = torch.library.custom_op("electra::layer_backward", layer_backward, mutates_args=())
_layer_backward.register_fake(layer_backward_shapes)
fused_end = torch.library.custom_op("electra::layer_end", end, mutates_args=())
fused_end.register_fake(forward_shapes)
fused_end.register_autograd(differentiate_end, setup_context=remember_end)
_end_backward = torch.library.custom_op("electra::layer_end_backward", end_op_backward, mutates_args=())
_end_backward.register_fake(end_backward_shapes)
