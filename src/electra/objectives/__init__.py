"""Objectives: what pre-training minimises. Each is one file, with its settings, its forward pass and its equation.

A new one adds its file, its settings to `ObjectiveSettings` and its arm to `build`; nothing else has to change.
"""

from collections.abc import Iterator
from typing import Annotated, Protocol, TypeVar, runtime_checkable

import torch
from pydantic import Field
from torch import nn

from electra.base.batch import Batch
from electra.objectives.adversarial import Adversarial, AdversarialSettings
from electra.objectives.corruption import Corrupted, Corruptor, Network, ObjectiveInputs
from electra.objectives.electra import Electra, ElectraSettings
from electra.objectives.electric import Electric, ElectricSettings
from electra.objectives.losses import Loss
from electra.objectives.masked_lm import MaskedLM, MaskedLMSettings
from electra.objectives.metrics import Ratio
from electra.objectives.replaced_span import ReplacedSpan, ReplacedSpanSettings
from electra.objectives.selection import Selection, SelectionSettings
from electra.objectives.token_recovery import TokenRecovery, TokenRecoverySettings

ObjectiveSettings = Annotated[
    ElectraSettings
    | MaskedLMSettings
    | TokenRecoverySettings
    | ElectricSettings
    | AdversarialSettings
    | ReplacedSpanSettings
    | SelectionSettings,
    Field(discriminator="kind"),
]

Same = TypeVar("Same")


@runtime_checkable
class Trainable(Protocol):
    """What the training loop trains: an nn.Module whose forward maps a Batch to a Loss. Fine-tuning's models are Trainable too.

    `headline` names the metrics to show while training. `metrics.summarise` computes metrics from the summed `Loss.sums`;
    `extra_metrics` are those that only this objective has, each a sum divided by a count. `muted_alarms` are alarms (see
    metrics) that mean nothing for this objective. `corruptor` holds the generator; it is None if nothing is generated."""

    @property
    def headline(self) -> tuple[str, ...]: ...
    @property
    def extra_metrics(self) -> tuple[Ratio, ...]: ...
    @property
    def muted_alarms(self) -> tuple[str, ...]: ...
    @property
    def corruptor(self) -> nn.Module | None: ...

    def __call__(self, batch: Batch) -> Loss: ...

    # the methods of nn.Module that the loop uses
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def children(self) -> Iterator[nn.Module]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def train(self: Same, mode: bool = True) -> Same: ...
    def eval(self: Same) -> Same: ...
    def to(self: Same, device: torch.device) -> Same: ...


@runtime_checkable
class Objective(Trainable, Protocol):
    """A way of pre-training."""

    @property
    def corruptor(self) -> Corruptor | None: ...

    def __call__(self, batch: Batch, corrupted: Corrupted | None = None) -> Loss:
        """The loss of one batch. `corrupted`, if passed, is used instead of the output of the objective's own corruptor."""
        ...

    def networks(self) -> dict[str, Network]:
        """The networks that can be exported and reused, by name, the main one first."""
        ...


def build(settings: ObjectiveSettings, inputs: ObjectiveInputs) -> Objective:
    """The objective with its networks, initialised as a function of the seed."""
    match settings:
        case ElectraSettings():
            return Electra(settings, inputs)
        case MaskedLMSettings():
            return MaskedLM(settings, inputs)
        case TokenRecoverySettings():
            return TokenRecovery(settings, inputs)
        case ElectricSettings():
            return Electric(settings, inputs)
        case AdversarialSettings():
            return Adversarial(settings, inputs)
        case ReplacedSpanSettings():
            return ReplacedSpan(settings, inputs)
        case SelectionSettings():
            return Selection(settings, inputs)
