"""A layer of the encoder, all in one, where it pays: a CUDA device with Triton, half precision. `available` decides; the
reference is model.encoder.Layer itself."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from electra.kernels.choice import wanted
from electra.kernels.masked_head import product_dtype

HEAD_SIZES = (16, 32, 64, 128)
SHORT = 128


def available(x: Float[Tensor, "batch seq hidden"], heads: int) -> bool:
    """Rows that one tile of attention holds, heads of a size that tensor cores take."""
    return (
        wanted()
        and x.is_cuda
        and product_dtype(x) in (torch.bfloat16, torch.float16)
        and x.shape[1] <= SHORT
        and x.shape[2] // heads in HEAD_SIZES
        and torch.cuda.get_device_properties(x.device).major >= 8
    )


def fused_layer(
    x: Float[Tensor, "batch seq hidden"],
    is_real: Bool[Tensor, "batch seq"] | None,
    seed: Int[Tensor, ""] | None,
    parameters: list[Tensor],
    heads: int,
    dropout: float,
    attention_dropout: float,
    eps: float,
) -> Float[Tensor, "batch seq hidden"]:
    """`seed` is for dropout, and None without. `parameters` in the order of layer_fused.forward."""
    from electra.kernels.layer_fused import fused_layer

    return fused_layer(x, is_real, seed, parameters, heads, dropout, attention_dropout, eps, product_dtype(x))
