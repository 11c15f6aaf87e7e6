"""Layers of ELECTRA's encoder on the GPU, equal to model.electra.ElectraLayer: library matrix products, our kernels between
them, and one operator that autograd and torch.compile see.

One operator for the layer, not one for each kernel, because its backward pass then decides how gradients are added: those
that meet at a residual connection are added inside a matrix product instead of by a kernel of their own.
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

HEAD_SIZES = (16, 32, 64)  # a head of 128 does not fit into a multiprocessor


def fused_layers(
    x: Float[Tensor, "batch seq hidden"],
    is_real: Bool[Tensor, "batch seq"] | None,
    layers: list[list[Tensor]],
    heads: int,
    dropout: float,
    attention_dropout: float,
    eps: float,
) -> Float[Tensor, "batch seq hidden"]:
    """`layers`: the parameters of each, in the order of `layer`. Dropout is seeded by torch's generator. Our attention takes
    short rows and heads of HEAD_SIZES; for others attention is torch's, and only the rest of the layer is fused."""
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
        attention_out = None
        if not has_our_attention:
            weight, bias = (tensor.to(dtype) for tensor in parameters[:2])
            projected = F.linear(x.to(dtype), weight, bias)
            attention_out = long_attention(projected, is_real, heads, attention_dropout)
        settings = heads, dropout, attention_dropout, eps
        x = fused_layer(x, is_real, seed, parameters, half_weights, *settings, attention_out)[0]
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
    """Copies of all tensors in `dtype`, made by one kernel."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def cast_shapes(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]


def rows_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` with one token per row, contiguous: the kernels rely on it."""
    return x.to(dtype).reshape(-1, x.shape[2]).contiguous()


def weight_gradient(grad_output: Tensor, inputs: Tensor) -> Tensor:
    """The gradient of a weight: half-precision products, summed and returned in float32."""
    if grad_output.is_cuda:
        return torch.mm(grad_output.t(), inputs, out_dtype=torch.float32)
    return grad_output.t().float() @ inputs.float()


def layer(
    x: Tensor, is_real: Tensor | None, seed: Tensor | None, parameters: list[Tensor], half_weights: list[Tensor], heads: int,
    dropout: float, attention_dropout: float, eps: float, attention_out: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """The result, followed by what the backward pass needs. `parameters`: weight and bias of query-key-value, attention
    output, expand and contract; then gamma and beta of the norm after attention and of the last norm. `half_weights`: the first
    eight in the precision of products. `attention_out`: torch's attention, where ours does not fit; the first two parameters
    then have no gradient here."""
    into_three, three_bias, into_output, output_bias, into_wide, wide_bias, into_narrow, narrow_bias = half_weights
    gamma1, beta1, gamma2, beta2 = parameters[8:]
    rows = rows_of(x, into_three.dtype)
    of_attention: list[Tensor] = []
    if attention_out is None:
        is_real = None if is_real is None else is_real.contiguous()
        projected = torch.addmm(three_bias, rows, into_three.t())
        values = attention(projected, is_real, seed, len(x), heads, attention_dropout)
        of_attention = [projected, values]
    else:
        values = rows_of(attention_out, rows.dtype)
    product = torch.addmm(output_bias, values, into_output.t())
    first, middle = add_norm(product, rows, gamma1, beta1, seed, 1, dropout, eps)
    wide = torch.addmm(wide_bias, middle, into_wide.t())
    product = torch.addmm(narrow_bias, gelu(wide), into_narrow.t())
    second, result = add_norm(product, middle, gamma2, beta2, seed, 2, dropout, eps)
    return [result.view(x.shape), first, middle, wide, second, *of_attention]


def layer_backward(
    grad_output: Tensor, x: Tensor, is_real: Tensor | None, seed: Tensor | None, kept: list[Tensor], half_weights: list[Tensor],
    norms: list[Tensor], heads: int, dropout: float, attention_dropout: float, eps: float, attention_out: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x; of the query-key-value weight, or else of `attention_out`; of the other three weights; and of all vectors,
    concatenated: both norms, each with the bias of the product before it, the wide bias and, without `attention_out`, the
    query-key-value bias."""
    first, middle, wide, second, *of_attention = kept
    into_three, _, into_output, _, into_wide, wide_bias, into_narrow, _ = half_weights
    hidden, dtype = x.shape[2], into_three.dtype
    lengths = [3 * hidden, 3 * hidden, len(wide_bias), *([3 * hidden] if attention_out is None else [])]
    sums = ColumnSums(x.device, *lengths)
    first_sums, second_sums, wide_sums, *three_sums = sums.parts
    # through the last norm and the feed-forward part
    grad_output = rows_of(grad_output, dtype)
    residual, product = add_norm_backward(grad_output, second, norms[2], seed, 2, dropout, eps, second_sums)
    grad_wide, activated = gelu_backward(product @ into_narrow, wide, wide_sums)
    narrow_gradient = weight_gradient(product, activated)
    wide_gradient = weight_gradient(grad_wide, middle)
    # both gradients of `middle` are added inside a product; then through the norm after attention
    residual.addmm_(grad_wide, into_wide)
    residual, product = add_norm_backward(residual, first, norms[0], seed, 1, dropout, eps, first_sums)
    values = of_attention[1] if attention_out is None else rows_of(attention_out, dtype)
    output_gradient, grad_attention = weight_gradient(product, values), product @ into_output
    # through our attention; both gradients of x are added inside a product (only now: without dropout `product` is `residual`)
    if attention_out is None:
        is_real, projected = None if is_real is None else is_real.contiguous(), of_attention[0]
        grad_projected = attention_backward(
            projected, is_real, seed, grad_attention, len(x), heads, attention_dropout, three_sums[0]
        )
        qkv_or_attention = weight_gradient(grad_projected, rows_of(x, dtype))
        residual.addmm_(grad_projected, into_three)
    else:
        qkv_or_attention = grad_attention.view(x.shape)
    return [residual.view(x.shape), qkv_or_attention, output_gradient, wide_gradient, narrow_gradient, sums.total()]


def layer_shapes(
    x: Tensor, is_real: Any, seed: Any, parameters: Any, half_weights: list[Tensor], heads: Any, dropout: Any,
    attention_dropout: Any, eps: Any, attention_out: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    tokens, hidden, half = x.shape[0] * x.shape[1], x.shape[2], half_weights[0]
    widths = [hidden, hidden, len(half_weights[5]), hidden, *([3 * hidden, hidden] if attention_out is None else [])]
    return [half.new_empty(x.shape), *(half.new_empty(tokens, width) for width in widths)]


def layer_backward_shapes(
    grad_output: Any, x: Tensor, is_real: Any, seed: Any, kept: Any, half_weights: list[Tensor], norms: Any, heads: Any,
    dropout: Any, attention_dropout: Any, eps: Any, attention_out: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    grad_x = half_weights[0].new_empty(x.shape)
    three, *weights = (torch.empty_like(weight, dtype=torch.float32) for weight in half_weights[::2])
    qkv_or_attention = three if attention_out is None else torch.empty_like(grad_x)
    vectors = (9 if attention_out is None else 6) * x.shape[2] + len(half_weights[5])
    return [grad_x, qkv_or_attention, *weights, x.new_empty(vectors, dtype=torch.float32)]


def remember_layer(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, is_real, seed, parameters, half_weights, *settings, attention_out = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, is_real, seed, attention_out, *output[1:], *half_weights, *parameters[8:])
    ctx.settings = settings


def differentiate_layer(ctx: Any, grad_output: list[Tensor | None]) -> tuple[Any, ...]:
    x, is_real, seed, attention_out, *saved = ctx.saved_tensors
    inputs = x, is_real, seed, saved[:-12], saved[-12:-4], saved[-4:]
    grad_x, qkv_or_attention, output, wide, narrow, vectors = _layer_backward(
        grad_output[0], *inputs, *ctx.settings, attention_out
    )
    six, wide_bias, three_bias = vectors.tensor_split([6 * x.shape[2], 6 * x.shape[2] + len(wide)])
    gamma1, beta1, output_bias, gamma2, beta2, narrow_bias = six.chunk(6)
    ends = [output, output_bias, wide, wide_bias, narrow, narrow_bias, gamma1, beta1, gamma2, beta2]
    three: list[Tensor | None] = [qkv_or_attention, three_bias] if attention_out is None else [None, None]
    grad_attention = None if attention_out is None else qkv_or_attention.to(attention_out.dtype)
    return grad_x.to(x.dtype), None, None, [*three, *ends], [None] * 8, None, None, None, None, grad_attention


# Custom operators: torch.compile takes them as they are and does not trace into them.
halve = torch.library.custom_op("electra::cast", cast, mutates_args=())
halve.register_fake(cast_shapes)
fused_layer = torch.library.custom_op("electra::layer", layer, mutates_args=())
fused_layer.register_fake(layer_shapes)
fused_layer.register_autograd(differentiate_layer, setup_context=remember_layer)
_layer_backward = torch.library.custom_op("electra::layer_backward", layer_backward, mutates_args=())
_layer_backward.register_fake(layer_backward_shapes)
