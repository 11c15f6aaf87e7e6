"""The learning rate as a function of the step."""

import math
from typing import Literal

from pydantic import Field

from electra.base.config import Settings


class ScheduleSettings(Settings):
    """`kind`: "original" multiplies warm-up and linear decay, so that the peak is a little below `lr`; the others warm
    up first and then decay from `lr` to zero ("linear", "cosine") or stay ("constant")."""

    kind: Literal["original", "linear", "cosine", "constant"] = "original"
    warmup: int = Field(10_000, ge=0)
    power: float = Field(1.0, gt=0)


def learning_rate(settings: ScheduleSettings, peak: float, step: int, steps: int) -> float:
    """The rate of update number `step`, counted from 0. Never zero: an update at rate zero would be wasted."""
    warm = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    after = max(0, step - settings.warmup) / max(1, steps - settings.warmup)
    match settings.kind:
        case "original":
            return peak * warm * (1 - step / steps) ** settings.power
        case "linear":
            return peak * warm * (1 - after) ** settings.power
        case "cosine":
            return peak * warm * (1 + math.cos(math.pi * after)) / 2
        case "constant":
            return peak * warm
