"""AdamW with and without bias correction, no decay on LayerNorm and bias, global clipping."""

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn, optim

from electra.config import Settings

# Adam without bias correction is Adam whose first step is so late that the corrections 1 - beta^t are 1.
FAR_STEP = 1e9


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """The paper's Adam. `bias_correction = false` is what the original does."""

    lr: float = Field(5e-4, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-6, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    bias_correction: bool = False
    clip: float = Field(1.0, gt=0)


def build_optimizer(settings: OptimizerSettings, model: nn.Module) -> optim.AdamW:
    """Weights and embeddings are decayed; LayerNorm and biases, which are vectors, are not. The decay is decoupled:
    p <- p - lr (m / (sqrt(v) + eps) + decay * p)."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
    start_state(optimizer, settings.bias_correction)
    return optimizer


def start_state(optimizer: optim.Optimizer, bias_correction: bool) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": parameter.new_full((), 0.0 if bias_correction else FAR_STEP),
                "exp_avg": parameter.detach().clone().zero_(),
                "exp_avg_sq": parameter.detach().clone().zero_(),
            }


def set_rate(optimizer: optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state by parameter name. The dictionary holds the live tensors: copying into them restores."""
    return {
        f"{name}.{part}": tensor
        for name, parameter in model.named_parameters()
        for part, tensor in optimizer.state[parameter].items()
    }
