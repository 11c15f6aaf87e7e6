"""AdamW with and without bias correction, alone or beside Muon; no decay on LayerNorm and bias; clipping by network.

Muon (Jordan et al., 2024) is momentum whose singular values are all made one, for the matrices inside the layers:

    m <- β m + (1 - β) g        u = β m + (1 - β) g  (Nesterov)
    W <- W - lr (0.2 sqrt(max(rows, columns)) UVᵀ + decay * W)        with u = U S Vᵀ

The factor gives the update the size that AdamW's has (root mean square 0.2; Liu et al., 2025), so that the same rate and
decay serve both. UVᵀ comes from five rounds of X <- aX + bXXᵀX + c(XXᵀ)²X. Where we differ from the original: (a, b, c)
change from round to round, each the best for what the rounds before left over (as Amsel et al., 2025); matrices of
equal sizes, wide or tall, go through the rounds as one batch; matrices stacked in one parameter (queries, keys and
values) are made orthogonal one by one.

Why not torch.optim.Muon: it reads the rate from the device at every step, so that no step could be captured as a CUDA graph;
it updates one matrix at a time; and it does not know stacked matrices.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn, optim

from electra.base.config import Settings, auto_or
from electra.model.linear import Linear
from electra.objectives import Trainable
from electra.train.distributed import is_piece, own, piece_like, whole

# Adam without bias correction is Adam whose first step is so late that the corrections 1 - beta^t are 1.
FAR_STEP = 1e9
MOMENTUM = 0.95

# Each line is the odd polynomial of degree five that brings [low, high] closest to 1. The first interval is [0.001, 1], every
# other one is where the line before maps its own. All but the last are stretched by 1.02, so that singular values which
# rounding pushes out of their interval come back. Together they map [0.001, 1] into [0.83, 1.12].
ROUNDS = (
    (8.304244590, -23.659903264, 16.873111784),
    (4.100817890, -2.929398634, 0.525873398),
    (3.884173019, -2.783679715, 0.509904759),
    (3.222141373, -2.322559475, 0.459529362),
    (2.273748231, -1.644658774, 0.416190757),
)
UPDATE_SIZE = 0.2
TINY = 1e-30
MOST_DECAY = 0.1  # of a weight, in one step, so that a run of a few dozen steps stays below its total

Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamSettings(Settings):
    """The paper's Adam. `bias_correction = false` is what the original code does.

    `total_decay` is what rate x weight decay adds up to over a run, whatever its steps, rate and schedule: a weight without a
    gradient ends at e^-total_decay of its initial value. AdamW's weights are an average over updates, and 1 / total_decay is
    its timescale, in runs (Wang and Aitchison, 2024). It is only used with `weight_decay = "auto"`."""

    lr: float = Field(5e-4, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-6, gt=0)
    weight_decay: Annotated[float | Literal["auto"], auto_or("a number of at least 0", lambda it: it >= 0)] = 0.01
    total_decay: float = Field(0.0, ge=0)
    bias_correction: bool = False
    clip: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def auto_needs_a_total(self) -> "AdamSettings":
        if self.weight_decay == "auto" and not self.total_decay:
            raise ValueError("weight_decay=auto needs a total for the whole run: set optimizer.total_decay")
        return self

    def decay_over(self, steps_at_peak: float) -> float:
        """The weight decay, as a number, of a run whose rates add up to those of `steps_at_peak` steps at the peak rate."""
        if self.weight_decay != "auto":
            return self.weight_decay
        return min(self.total_decay / (self.lr * steps_at_peak), MOST_DECAY / self.lr)


class OptimizerSettings(AdamSettings):
    """With `decoupled` the generator has an Adam of its own (`optimizer.generator`) and each network's gradient is clipped
    by itself: Adam divides by the size of the gradient, so the weights of the losses cannot balance the two (Dong et al.,
    2023). Shared embeddings belong to the discriminator, disentangled ones to the generator.

    `kind = "muon"` updates the matrices inside the layers by Muon (only `momentum` is its own; rate, decay and clipping are
    those of the network) and everything else by Adam as usual."""

    kind: Literal["adamw", "muon"] = "adamw"
    momentum: Beta = MOMENTUM
    decoupled: bool = False
    generator: AdamSettings = AdamSettings()

    @model_validator(mode="after")
    def momentum_is_muons(self) -> "OptimizerSettings":
        if self.kind != "muon" and self.momentum != MOMENTUM:
            raise ValueError(
                f'momentum ({self.momentum}) is for kind = "muon" alone; AdamW has betas. '
                "Add optimizer.kind=muon, or set optimizer.betas"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def generator_as_discriminator(cls, tree: Any) -> Any:
        """What is not set for the generator's Adam is taken from the discriminator's."""
        if not isinstance(tree, dict) or not isinstance(tree.get("generator", {}), dict):
            return tree
        same = {key: tree[key] for key in AdamSettings.model_fields.keys() & tree.keys()}
        return tree | {"generator": same | tree.get("generator", {})}

    def updated(self, main: Mapping[str, Any], generator: Mapping[str, Any]) -> "OptimizerSettings":
        """A copy with other values for the discriminator's Adam and the generator's."""
        return self.model_copy(update={**main, "generator": self.generator.model_copy(update=generator)})

    def over(self, steps_at_peak: float) -> "OptimizerSettings":
        """A copy in which "auto" weight decays are numbers."""
        return self.updated(*({"weight_decay": it.decay_over(steps_at_peak)} for it in (self, self.generator)))


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters, by name, that share Adam's settings and are clipped together. `factors` multiply the rate of some of
    them: the layer-wise rates of fine-tuning."""

    adam: AdamSettings
    parameters: Mapping[str, nn.Parameter]
    factors: Mapping[str, float] = field(default_factory=dict)


def split_parameters(objective: Trainable, settings: OptimizerSettings) -> list[ParameterGroup]:
    """The trainable parameters: one group, or with `decoupled` a second one for the generator, without what it shares."""
    learning = {name: p for name, p in objective.named_parameters() if p.requires_grad}
    if not settings.decoupled:
        return [ParameterGroup(settings, learning)]
    others = (child for child in objective.children() if child is not objective.corruptor)
    of_others = {id(parameter) for child in others for parameter in child.parameters()}
    main = {name: p for name, p in learning.items() if id(p) in of_others}
    generator = {name: p for name, p in learning.items() if id(p) not in of_others}
    return [ParameterGroup(settings, main), ParameterGroup(settings.generator, generator)]


def build_optimizer(model: Trainable, groups: Sequence[ParameterGroup], settings: OptimizerSettings) -> optim.Optimizer:
    """Build AdamW, or Muon beside it. Weights and embeddings are decayed; LayerNorm and biases, which are vectors, are not. The
    decay is decoupled: p <- p - lr (m / (sqrt(v) + eps) + decay * p). One that is still "auto" is left to `Rates`."""
    for_muon = {id(m.parameter): m for m in matrices_in_layers(model)} if settings.kind == "muon" else {}
    adamw: list[dict[str, Any]] = []
    muon: list[tuple[list[Matrix], dict[str, Any]]] = []
    for group in groups:
        adam = group.adam
        shared = {"betas": adam.betas, "eps": adam.eps, "bias_correction": adam.bias_correction}
        decay, total = (0.0, adam.total_decay) if adam.weight_decay == "auto" else (adam.weight_decay, 0.0)
        alike: dict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)
        for name, parameter in group.parameters.items():
            alike[group.factors.get(name, 1.0), parameter.ndim > 1].append(parameter)
        for (factor, is_decayed), parameters in alike.items():
            peak = adam.lr * factor
            rate = {"lr": peak, "peak": peak, "weight_decay": decay * is_decayed, "total_decay": total * is_decayed}
            if rest := [p for p in parameters if id(p) not in for_muon]:
                adamw.append(shared | rate | {"params": rest})
            if matrices := [for_muon[id(p)] for p in parameters if id(p) in for_muon]:
                muon.append((matrices, rate | {"momentum": settings.momentum}))
    optimizer = optim.AdamW(adamw, fused=True)
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            step = 0.0 if options["bias_correction"] else FAR_STEP
            first = torch.full((), step, dtype=parameter.dtype, device=parameter.device)
            averages = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": first, **averages}
    # torch warns when a capturable optimizer steps uncaptured; ours does at every new shape.
    optimizer._warned_capturable_if_run_uncaptured = True
    return Muon(muon, optimizer) if muon else optimizer


def clip_gradients(groups: Sequence[ParameterGroup]) -> Tensor:
    """Clip each group by its global norm. Returns the norm of the first group before clipping: the discriminator's, or that
    of all parameters."""
    norm, *_ = [nn.utils.clip_grad_norm_(group.parameters.values(), group.adam.clip) for group in groups]
    return whole(norm)


class Rates:
    """Sets the learning rate of every group to a fraction of its peak. On a GPU the rates are tensors that a captured step reads,
    and one number per step is sent there. Groups with a `total_decay` decay by a part of it at every step, by a tensor too: the
    optimizer's own weight decay would be frozen into the graph."""

    def __init__(self, optimizer: optim.Optimizer, device: torch.device):
        self.groups = optimizer.param_groups
        self.kept = [(group, torch.ones((), device=device)) for group in self.groups if group.get("total_decay")]
        in_pieces = any(map(is_piece, self.groups[0]["params"]))
        self.on_device = device.type == "cuda" and not in_pieces
        if self.on_device:
            self.peaks = torch.tensor([group["peak"] for group in self.groups], device=device)
            self.fraction, self.rates = torch.zeros((), device=device), torch.zeros_like(self.peaks)
            for group, lr in zip(self.groups, self.rates.unbind(), strict=True):
                group["lr"], group["capturable"] = lr, True

    def set(self, fraction: float, share: float = 0.0) -> None:
        for group, kept in self.kept:
            kept.fill_(1 - min(share * group["total_decay"], MOST_DECAY))
        if self.on_device:
            torch.mul(self.peaks, self.fraction.fill_(fraction), out=self.rates)
        else:
            for group in self.groups:
                group["lr"] = fraction * group["peak"]

    @torch.no_grad()
    def decay(self) -> None:
        """Decay what has a gradient, before the update, as AdamW does."""
        for group, kept in self.kept:
            if parameters := [own(parameter) for parameter in group["params"] if parameter.grad is not None]:
                torch._foreach_mul_(parameters, kept)


def optimizer_tensors(optimizer: optim.Optimizer, model: Trainable) -> dict[str, Tensor]:
    """The optimizer's state by parameter name. The dictionary holds the live tensors: copying into them restores."""
    return {
        f"{name}.{part}": tensor
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for part, tensor in optimizer.state[parameter].items()
    }


@dataclass(frozen=True)
class Matrix:
    """A parameter for Muon: `parts` matrices of equal height, stacked."""

    parameter: Tensor
    parts: int = 1

    @property
    def is_standing(self) -> bool:
        rows, columns = self.parameter.shape
        return rows > self.parts * columns

    @property
    def sides(self) -> tuple[int, int]:
        """The short and the long side; matrices with equal sides go through the rounds together."""
        rows, columns = self.parameter.shape
        height = rows // self.parts
        return min(height, columns), max(height, columns)

    def lying(self, tensor: Tensor) -> Float[Tensor, "parts short long"]:
        parts = tensor.view(self.parts, -1, tensor.shape[1])
        return parts.mT if self.is_standing else parts

    def standing(self, parts: Float[Tensor, "parts short long"]) -> Tensor:
        """The inverse of `lying`."""
        return (parts.mT if self.is_standing else parts).reshape(self.parameter.shape)


def matrices_in_layers(model: Trainable) -> list[Matrix]:
    """The weights of linear maps inside the layers. Everything else (embeddings and their projection, heads, norms,
    biases) is left to AdamW."""
    return [
        Matrix(part.weight, part.stacked if isinstance(part, Linear) else 1)
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and re.search(r"(^|\.)layers\.\d+\.", name)
    ]


def orthogonalise(x: Float[Tensor, "batch short long"]) -> Float[Tensor, "batch short long"]:
    """UVᵀ for each U S Vᵀ, with singular values in the interval that ROUNDS ends with; those under a thousandth of the
    matrix's norm stay smaller. Zero stays zero. Computed in bfloat16 on CUDA, in the tensor's own precision elsewhere."""
    norms: Tensor = torch.linalg.matrix_norm(x, keepdim=True)
    dtype = torch.bfloat16 if x.is_cuda else x.dtype
    result = (x / norms.clamp(min=TINY)).to(dtype)
    for a, b, c in ROUNDS:
        gram = torch.bmm(result, result.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        result = torch.baddbmm(result, polynomial, result, beta=a)
    return result.to(x.dtype)


class Muon(optim.Optimizer):
    """Muon for groups of matrices, each with its `lr`, `weight_decay` and `momentum`, and in the same step `others`, an
    AdamW over the other parameters whose state exists already: one optimizer from outside. `param_groups` and `state` hold
    the live groups and state of both, so that setting rates, saving and restoring need not know that there are
    two. A step can be captured as a CUDA graph: nothing in it reads a value from the device."""

    def __init__(self, groups: list[tuple[list[Matrix], dict[str, Any]]], others: optim.Optimizer):
        super().__init__([{"params": [m.parameter for m in matrices], **options} for matrices, options in groups], {})
        self.batches: list[tuple[dict[str, Any], list[Matrix]]] = []
        for (matrices, _), group in zip(groups, self.param_groups, strict=True):
            by_sides: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
            for matrix in matrices:
                by_sides[matrix.sides].append(matrix)
                self.state[matrix.parameter] = {"momentum": torch.zeros_like(matrix.parameter)}
            self.batches.extend((group, same) for same in by_sides.values())
        self.others = others
        self.param_groups.extend(others.param_groups)
        self.state.update(others.state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        self.others.step()
        for group, matrices in self.batches:
            if learning := [matrix for matrix in matrices if matrix.parameter.grad is not None]:
                self.update(learning, group)

    def update(self, matrices: list[Matrix], group: dict[str, Any]) -> None:
        """Update matrices of equal sides. `lr` may be a tensor on the device. For sharded matrices, every process makes the
        whole direction orthogonal and takes its piece."""
        beta, lr, decay = group["momentum"], group["lr"], group["weight_decay"]
        parameters: list[Tensor] = [own(matrix.parameter) for matrix in matrices]
        gradients = [whole(matrix.parameter.grad) for matrix in matrices if matrix.parameter.grad is not None]
        momenta = [self.state[matrix.parameter]["momentum"] for matrix in matrices]
        pieces = [piece_like(gradient, momentum) for gradient, momentum in zip(gradients, momenta, strict=True)]
        torch._foreach_lerp_([own(momentum) for momentum in momenta], pieces, 1 - beta)
        ahead = torch._foreach_lerp(gradients, [whole(momentum) for momentum in momenta], beta)

        lying = torch.cat([matrix.lying(direction) for matrix, direction in zip(matrices, ahead, strict=True)])
        updates = orthogonalise(lying) * (-lr * (UPDATE_SIZE * math.sqrt(lying.shape[2])))
        stacked = zip(matrices, updates.split([matrix.parts for matrix in matrices]), strict=True)
        changes = [piece_like(matrix.standing(update), matrix.parameter) for matrix, update in stacked]
        torch._foreach_mul_(parameters, 1 - lr * decay)
        torch._foreach_add_(parameters, changes)
