"""The layers of the modern encoder on the GPU, equal to model.modern.ModernLayer and the final norm: library matrix products,
our kernels between them, and one operator for the whole stack that autograd and torch.compile see.

One operator for all layers, because a pre-norm layer ends in a sum that the next one begins by normalising: one kernel does
both. The sum itself (the residual stream) stays in float32, as under autocast: it grows from layer to layer while what is
added does not. What the backward pass reads of it, and its gradient, are in half precision.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from electra.kernels import product_dtype
from electra.kernels.layer import halve, weight_gradient
from electra.kernels.layer.launch import (
    SHORT,
    ColumnSums,
    add_norm_backward,
    add_norm_in_place,
    geglu,
    geglu_backward,
    rotary_attention,
    rotary_attention_backward,
)

PER_LAYER = 8  # tensors that a layer keeps for the backward pass


def fused_modern_layers(
    x: Float[Tensor, "batch seq hidden"],
    is_real: Bool[Tensor, "batch seq"] | None,
    weights: list[Tensor],
    norms: list[Tensor],
    angles: Float[Tensor, "2 2 seq half"],
    heads: int,
    reaches: list[int],
    eps: float,
) -> Float[Tensor, "batch seq hidden"]:
    """`weights`: for each layer query-key-value, attention output, expand and contract. `norms`: the weights of all but the
    first layer's attention norm, in the order in which they are used; the last may be the final norm, without which the
    result is the residual stream. `angles`: cos and sin of global layers, then of local ones. `reaches`: how far a token
    of a layer sees, 0 for the whole row."""
    if not weights:
        return x
    halves = halve([weight.detach() for weight in weights], product_dtype(x))
    return fused_stack(x, is_real, weights, norms, halves, angles, heads, reaches, eps)[0]


def stack(
    x: Tensor, is_real: Tensor | None, weights: list[Tensor], norms: list[Tensor], half_weights: list[Tensor], angles: Tensor,
    heads: int, reaches: list[int], eps: float,
) -> list[Tensor]:  # fmt: skip
    """The result, followed by what the backward pass needs: PER_LAYER tensors of each layer, the last of them its result,
    which the last layer keeps only for a final norm."""
    hidden = x.shape[2]
    is_real = None if is_real is None else is_real.contiguous()
    stream = x.to(torch.float32, copy=True).reshape(-1, hidden)
    normal = stream.to(half_weights[0].dtype, copy=True)
    kept: list[Tensor] = []
    gammas, product = iter(norms), normal  # the first layer adds nothing to its input
    for number, reach in enumerate(reaches):
        into_three, into_output, into_wide, into_narrow = half_weights[4 * number : 4 * number + 4]
        if number:
            total, normal = add_norm_in_place(product, stream, next(gammas), eps)
            kept.append(total)
        kept.append(normal)
        projected = normal @ into_three.t()
        attention_out, log_sums = rotary_attention(projected, is_real, angles[int(reach > 0)], heads, reach)
        total, normal = add_norm_in_place(attention_out @ into_output.t(), stream, next(gammas), eps)
        wide = normal @ into_wide.t()
        product = geglu(wide) @ into_narrow.t()
        kept += [projected, attention_out, log_sums, total, normal, wide]
    if len(norms) < 2 * len(reaches):
        return [stream.add_(product).view(x.shape), *kept]
    total, result = add_norm_in_place(product, stream, next(gammas), eps)
    return [result.view(x.shape), *kept, total]


def stack_backward(
    grad_output: Tensor, is_real: Tensor | None, kept: list[Tensor], norms: list[Tensor], half_weights: list[Tensor],
    angles: Tensor, heads: int, reaches: list[int], eps: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, of the weights, and of all norms, concatenated."""
    hidden = grad_output.shape[2]
    dtype = half_weights[0].dtype
    is_real = None if is_real is None else is_real.contiguous()
    sums = ColumnSums(grad_output.device, *[hidden] * len(norms))
    waiting = list(zip(norms, sums.parts, strict=True))
    residual = grad_output.to(dtype).reshape(-1, hidden).contiguous()
    if len(norms) == 2 * len(reaches):
        residual = through_norm(residual, kept[-1], None, *waiting.pop(), eps)
    gradients: list[Tensor] = []
    for number, reach in reversed(list(enumerate(reaches))):
        into_three, into_output, into_wide, into_narrow = half_weights[4 * number : 4 * number + 4]
        own = kept[PER_LAYER * number : PER_LAYER * (number + 1)]
        normal, projected, attention_out, log_sums, middle, middle_normal, wide, *_ = own
        # the feed-forward part, and the norm before it
        grad_wide, activated = geglu_backward(residual @ into_narrow, wide)
        narrow = weight_gradient(residual, activated)
        expand = weight_gradient(grad_wide, middle_normal)
        residual = through_norm(grad_wide @ into_wide, middle, residual, *waiting.pop(), eps)
        # attention, and the norm before it, which the first layer does not have
        output = weight_gradient(residual, attention_out)
        grad_attention = residual @ into_output
        grad_projected = rotary_attention_backward(
            projected, is_real, angles[int(reach > 0)], attention_out, log_sums, grad_attention, heads, reach
        )
        three = weight_gradient(grad_projected, normal)
        if number:
            before = kept[PER_LAYER * number - 1]
            residual = through_norm(grad_projected @ into_three, before, residual, *waiting.pop(), eps)
        else:
            residual = torch.addmm(residual, grad_projected, into_three)
        gradients = [three, output, expand, narrow, *gradients]
    return [residual.view(grad_output.shape), *gradients, sums.total()]


def through_norm(
    grad_normal: Tensor, total: Tensor, residual: Tensor | None, gamma: Tensor, partial: Tensor, eps: float
) -> Tensor:
    """The gradient of a sum: the one through the norm that reads it, plus `residual`, the one past it."""
    return add_norm_backward(grad_normal, total, gamma, None, 0, 0.0, eps, partial, residual, has_biases=False)[0]


def stack_shapes(
    x: Tensor, is_real: Any, weights: Any, norms: list[Tensor], half_weights: list[Tensor], angles: Any, heads: int,
    reaches: list[int], eps: float,
) -> list[Tensor]:  # fmt: skip
    tokens, hidden, half = x.shape[0] * x.shape[1], x.shape[2], half_weights[0]
    kept: list[Tensor] = []
    for wide in half_weights[2::4]:
        before, after = (hidden, 3 * hidden, hidden), (hidden, hidden, len(wide), hidden)
        kept += [half.new_empty(tokens, width) for width in before]
        kept.append(half.new_empty(tokens * heads if x.shape[1] > SHORT else 0, dtype=torch.float32))
        kept += [half.new_empty(tokens, width) for width in after]
    if len(norms) < 2 * len(reaches):
        return [torch.empty_like(x, dtype=torch.float32), *kept[:-1]]
    return [half.new_empty(x.shape), *kept]


def stack_backward_shapes(
    grad_output: Tensor, is_real: Any, kept: Any, norms: list[Tensor], half_weights: list[Tensor], *_: Any
) -> list[Tensor]:
    weights = [torch.empty_like(weight, dtype=torch.float32) for weight in half_weights]
    vectors = grad_output.new_empty(len(norms) * grad_output.shape[2], dtype=torch.float32)
    return [half_weights[0].new_empty(grad_output.shape), *weights, vectors]


def remember_stack(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, is_real, _, norms, half_weights, angles, *settings = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(is_real, angles, *output[1:], *norms, *half_weights)
    ctx.counts = len(output) - 1, len(norms), len(half_weights)
    ctx.dtype, ctx.settings = x.dtype, settings


def differentiate_stack(ctx: Any, grad_output: list[Tensor | None]) -> tuple[Any, ...]:
    is_real, angles, *saved = ctx.saved_tensors
    kept, norms, halves = ctx.counts
    tensors = saved[:kept], saved[kept : kept + norms], saved[kept + norms :]
    grad_x, *weights, vectors = _stack_backward(grad_output[0], is_real, *tensors, angles, *ctx.settings)
    return grad_x.to(ctx.dtype), None, weights, list(vectors.chunk(norms)), [None] * halves, None, None, None, None


fused_stack = torch.library.custom_op("electra::modern_layers", stack, mutates_args=())
fused_stack.register_fake(stack_shapes)
fused_stack.register_autograd(differentiate_stack, setup_context=remember_stack)
_stack_backward = torch.library.custom_op("electra::modern_layers_backward", stack_backward, mutates_args=())
_stack_backward.register_fake(stack_backward_shapes)
