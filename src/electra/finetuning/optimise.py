"""Layer-wise learning rates.

With n layers and decay d the head learns at lr, the top layer at lr d, the layer below at lr d², … and the embeddings with
their projection at lr d^(n+1): what pre-training has learned changes the less the deeper it lies. "original" is the code
behind the paper's results, whose exponents are all larger by one below the head (top layer d², embeddings d^(n+2)): the
rest of a pooling layer that was taken out. ModernBERT's last norm learns with its top layer.
"""

import re
from typing import Literal

from torch import nn, optim

from electra.train.optimizers import start_state

DecayKind = Literal["exact", "original"]


def depth_factor(name: str, layers: int, decay: float, kind: DecayKind) -> float:
    """What multiplies the learning rate of a parameter of `Finetuned`, by its name."""
    extra = 1 if kind == "original" else 0
    if not name.startswith("encoder."):
        return 1.0
    if match := re.match(r"encoder\.layers\.(\d+)\.", name):
        return decay ** (layers - int(match[1]) + extra)
    if name.startswith("encoder.final_norm."):
        return decay ** (1 + extra)
    return decay ** (layers + 1 + extra)


def build_layerwise(
    model: nn.Module,
    layers: int,
    lr: float,
    decay: float,
    kind: DecayKind,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
) -> optim.AdamW:
    """One group for each (factor, decayed or not): as in pre-training, LayerNorm and biases are not decayed."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        factor = depth_factor(name, layers, decay, kind)
        groups.setdefault((factor, weight_decay if parameter.ndim > 1 else 0.0), []).append(parameter)
    optimizer = optim.AdamW(
        [
            {
                "params": parameters,
                "lr": lr * factor,
                "peak": lr * factor,
                "weight_decay": decayed,
                "bias_correction": bias_correction,
            }
            for (factor, decayed), parameters in groups.items()
        ],
        betas=betas,
        eps=eps,
        fused=True,
    )
    start_state(optimizer)
    return optimizer
