"""Layers of the encoder as operators of our own, where it pays: a CUDA device with Triton, half precision. `available`
decides; the reference is model.encoder.Layer itself."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from electra.kernels.masked_head import product_dtype
from electra.kernels.switch import wanted

HEAD_SIZES = (16, 32, 64)  # of 128 are more than a processor holds
SHORT = 128  # rows up to this length are one tile of attention


def available(x: Float[Tensor, "batch seq hidden"]) -> bool:
    return (
        wanted(x.device)
        and product_dtype(x) in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_properties(x.device).major >= 8
    )


def fused_layers(
    x: Float[Tensor, "batch seq hidden"],
    is_real: Bool[Tensor, "batch seq"] | None,
    layers: list[list[Tensor]],
    heads: int,
    dropout: float,
    attention_dropout: float,
    eps: float,
) -> Float[Tensor, "batch seq hidden"]:
    """`layers`: the parameters of each, in the order of layer_fused.layer. What is dropped follows torch's generator. Our
    attention takes short rows and heads of a size that tensor cores like; for others it is torch's, and only the rest of
    the layer is fused."""
    from electra.kernels.layer_fused import fused_end, fused_layer, halves_of

    if not layers:
        return x
    dtype = product_dtype(x)
    products = [parameters[:8] for parameters in layers]
    halves = halves_of([tensor.detach() for part in products for tensor in part], dtype)
    drops = dropout > 0 or attention_dropout > 0
    seeds = torch.randint(2**62, (len(layers),), device=x.device) if drops else None
    ours = x.shape[1] <= SHORT and x.shape[2] // heads in HEAD_SIZES
    for number, parameters in enumerate(layers):
        seed = None if seeds is None else seeds[number]
        mine = halves[8 * number : 8 * number + 8]
        if ours:
            rest = heads, dropout, attention_dropout, eps
            x = fused_layer(x, is_real, seed, parameters, mine, *rest)[0]
        else:
            weight, bias = (tensor.to(dtype) for tensor in parameters[:2])
            projected = F.linear(x.to(dtype), weight, bias)
            mixed = long_attention(projected, is_real, heads, attention_dropout)
            x = fused_end(mixed, x, seed, parameters[2:], mine[2:], dropout, eps)[0]
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
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    return mixed.transpose(1, 2).reshape(batch, seq, width // 3)
