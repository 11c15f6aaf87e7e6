"""The settings of the training loop, the learning rate as a function of the step, and when a run ends: after a number of steps, or
after minutes of training.

How many steps fit into a time budget is known only when it is used up. So the end is planned again at every reading of the
clock: the time left, divided by the seconds per step of the last readings. Between readings, which on a GPU must wait for the
device, time is predicted. Progress is the time so far over the time at the planned end, so that it is 1, and the learning rate
zero, where the run ends, however the speed changed on the way.
"""

import math
from collections import deque
from itertools import pairwise
from typing import Literal

from pydantic import Field, field_validator, model_validator

from electra.base.config import Settings
from electra.train.device import Fast, Precision
from electra.train.trackers import Track

# These change logging, checkpoints and speed, not what is learned (accumulate and fast: but for rounding, the random
# numbers of dropout and the weight of padded parts). A run may be resumed with other values.
_FREE = (
    "accumulate fast log_every evaluate_every evaluate_rows save_every save_minutes keep keep_every workers corpus track "
    "processes parallel reduce timeout restarts"
)
FREE_TO_CHANGE = tuple(f"train.{key}" for key in _FREE.split())
ENOUGH_OF_PEAK = 0.9
SHORT_WARMUP = 0.05
READINGS = 20
"""Readings of the clock, from the first to the last of which the speed is measured."""
BUDGET_BETWEEN = 0.005
"""The largest fraction of the budget between two readings, where time is predicted."""
CATCH_UP = 3
"""The most that one step may decay, as a multiple of the mean step so far."""


class TrainSettings(Settings):
    """`batch` is global; `accumulate` splits it into as many parts, computed one after the other. `fast`: compiled,
    captured and with our kernels; "auto" does what the machine can, "on" refuses to start otherwise, "off" is plain torch.
    The newest `keep` checkpoints are kept, and multiples of `keep_every` are never deleted (0: none). With `minutes` a run
    ends after that much training, however many steps that makes, and `steps` is ignored. Compiling, evaluating and saving
    are not training. `stages` are the steps at which a run had finished before it was extended: from each on, the schedule
    warms up and decays once more. `track`: where metrics are sent, beside metrics.jsonl.

    `processes` of this machine share every batch; under torchrun, its own number counts. `parallel`: "ddp" keeps weights and
    optimizer whole in each process, "fsdp" shards them. `reduce`: the precision in which gradients are added up. A process
    waits `timeout` seconds for the others; if one dies, all are started again, up to `restarts` times."""

    steps: int = Field(1_000_000, ge=1)
    minutes: float = Field(0.0, ge=0, allow_inf_nan=False)
    stages: tuple[int, ...] = ()
    batch: int = Field(128, ge=1, le=10_000_000)
    accumulate: int = Field(1, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision = "auto"
    fast: Fast = "auto"
    deterministic: bool = False
    log_every: int = Field(50, ge=1)
    evaluate_every: int = Field(1000, ge=1)
    evaluate_rows: int = Field(1024, ge=1)
    save_every: int = Field(1000, ge=1)
    save_minutes: float = Field(10.0, gt=0)
    keep: int = Field(2, ge=2)
    keep_every: int = Field(0, ge=0)
    workers: int = Field(1, ge=1, le=1024)
    corpus: Literal["auto", "device", "stream"] = "auto"
    track: Track = ("auto",)
    processes: int = Field(1, ge=1, le=4096)
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    reduce: Literal["float32", "bfloat16"] = "float32"
    timeout: float = Field(600.0, gt=0, allow_inf_nan=False)
    restarts: int = Field(0, ge=0)

    @model_validator(mode="after")
    def accumulate_divides_batch(self) -> "TrainSettings":
        if self.batch % self.accumulate:
            raise ValueError(f"batch ({self.batch}) must be a multiple of accumulate ({self.accumulate})")
        return self

    @model_validator(mode="after")
    def stages_are_in_order(self) -> "TrainSettings":
        ends = (0, *self.stages, self.steps)
        if self.stages and (self.minutes or any(end <= begin for begin, end in pairwise(ends))):
            raise ValueError(
                f"stages ({self.stages}) must be increasing steps below steps ({self.steps}), without minutes"
            )
        return self


def next_accumulate(batch: int, accumulate: int) -> int | None:
    """The next `accumulate` to try when memory is short: twice as many parts, or the fewest more that divide the batch evenly.
    None if a part is a single row already."""
    if batch % (2 * accumulate) == 0:
        return 2 * accumulate
    return next((parts for parts in range(accumulate + 1, batch + 1) if batch % parts == 0), None)


def memory_remedy(batch: int, accumulate: int) -> str:
    """What to do when memory is short: the same batch in smaller parts, if that is possible."""
    parts = next_accumulate(batch, accumulate)
    if parts is None:
        return "A single row does not fit: use a shorter rows.length or a smaller encoder."
    rows = batch // accumulate
    return f"{rows} rows at once do not fit: add train.accumulate={parts} (same batch, same data, less memory)."


class ScheduleSettings(Settings):
    """`kind`: "original" multiplies warm-up and linear decay, so that the peak is a little below `lr`; the others warm
    up first and then decay from `lr` to zero ("linear", "cosine") or stay ("constant"). `warmup` below 1 is a fraction of
    the run, from 1 on a number of steps."""

    kind: Literal["original", "linear", "cosine", "constant"] = "original"
    warmup: int | float = Field(10_000, ge=0, allow_inf_nan=False)
    power: float = Field(1.0, gt=0)

    @field_validator("warmup")
    @classmethod
    def share_or_steps(cls, warmup: float) -> int | float:
        if warmup > 1 and warmup != int(warmup):
            raise ValueError("must be a fraction of the run below 1, or a whole number of steps")
        return int(warmup) if warmup == int(warmup) else warmup

    def warmup_steps(self, steps: float) -> float:
        return self.warmup * steps if self.warmup < 1 else self.warmup


def rate_fraction(settings: ScheduleSettings, step: float, steps: float) -> float:
    """The learning rate of update `step`, counted from 0, over the peak. Never zero: such an update would be wasted."""
    warmup = settings.warmup_steps(steps)
    warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
    after = max(0, step - warmup) / max(1, steps - warmup)
    match settings.kind:
        case "original":
            return warm * math.pow(1 - step / steps, settings.power)
        case "linear":
            return warm * math.pow(1 - after, settings.power)
        case "cosine":
            return warm * (1 + math.cos(math.pi * after)) / 2
        case "constant":
            return warm


def mean_fraction(settings: ScheduleSettings, steps: float) -> float:
    """The mean of `rate_fraction` over a run, by an integral in place of the sum over steps."""
    warmup, power = settings.warmup if settings.warmup < 1 else settings.warmup / steps, settings.power
    rising = min(1.0, warmup)
    if settings.kind == "original":
        after, more = ((1 - math.pow(1 - rising, power + n)) / (power + n) for n in (1, 2))
        return 1 / (power + 1) - after + ((after - more) / warmup if warmup else 0.0)
    after = {"linear": 1 / (power + 1), "cosine": 0.5, "constant": 1.0}[settings.kind]
    return after + rising * (rising / warmup / 2 - after) if warmup else after


def highest_fraction(settings: ScheduleSettings, steps: int) -> float:
    """The highest fraction of its peak that the learning rate reaches in a run. Below 1 if the warm-up is long for the run: the
    "original" schedule already decays while it warms up."""
    # the product of warm-up and decay, (t + 1)(1 - t / steps)^p, is highest here
    top, warmup = round((steps - settings.power) / (1 + settings.power)), math.ceil(settings.warmup_steps(steps))
    candidates = {0, warmup - 2, warmup - 1, warmup, top - 1, top, top + 1, steps - 1}
    return max(rate_fraction(settings, step, steps) for step in candidates if 0 <= step < steps)


def schedule_warning(settings: ScheduleSettings, steps: int) -> str | None:
    """A warning if the learning rate never gets near its peak."""
    fraction = highest_fraction(settings, steps)
    if fraction >= ENOUGH_OF_PEAK:
        return None
    return (
        f"the learning rate never gets above {fraction:.0%} of optimizer.lr: warm-up takes "
        f"{settings.warmup_steps(steps):,.0f} of {steps:,} steps. Use schedule.warmup={SHORT_WARMUP}, a fraction of them."
    )


class Horizon:
    """How far a run is and where it ends. `steps` is the end as planned now, infinite while the speed that a budget needs is unknown."""

    def __init__(self, settings: TrainSettings):
        self.budget = 60.0 * settings.minutes
        self.steps: float = math.inf if self.budget else settings.steps
        self.stages = settings.stages
        self.seconds_per_step = 0.0
        self.readings: deque[tuple[int, float]] = deque([(0, 0.0)], READINGS)
        self.decayed = 0.0

    def restore(self, step: int, seconds: float, planned: int) -> None:
        """Restore the plan saved at `step`, after `seconds` of training; `planned` is 0 if there was none."""
        self.begin(step, seconds)
        if planned:
            self.steps, self.seconds_per_step = planned, (self.budget - seconds) / max(1, planned - step)
            self.decayed = self.progress(step)

    def begin(self, step: int, seconds: float) -> None:
        """Measure the speed from here on, because earlier steps were not timed."""
        self.readings = deque([(step, seconds)], READINGS)

    def is_reading_due(self, step: int) -> bool:
        since = (step - self.readings[-1][0]) * self.seconds_per_step
        return not self.seconds_per_step or since >= BUDGET_BETWEEN * self.budget

    def read(self, step: int, seconds: float) -> None:
        """Plan the end again: the device has finished `step` steps after `seconds` of training in all."""
        self.readings.append((step, seconds))
        first, began = self.readings[0]
        if step > first:
            self.seconds_per_step = max(1e-9, (seconds - began) / (step - first))
            self.steps = step + max(0, round((self.budget - seconds) / self.seconds_per_step))

    def progress(self, step: int) -> float:
        """The fraction of the run that is done after `step` steps. For an extended run it stays at 1 from its first end on."""
        if self.stages:
            return min(1.0, step / self.stages[0])
        if not self.budget or math.isinf(self.steps):
            return step / self.steps
        at, seconds = self.readings[-1]
        now, end = (seconds + (count - at) * self.seconds_per_step for count in (step, self.steps))
        return now / max(now, end)

    def place(self, step: int) -> float:
        """The place of the schedule in `steps`: the step itself or, with a budget, where a run of constant speed would be."""
        return self.progress(step) * self.steps if self.budget and math.isfinite(self.steps) else step

    def fraction(self, schedule: ScheduleSettings, step: int) -> float:
        """The learning rate of update `step`, as a fraction of the peak."""
        of_stage, begin, end = self.stage(schedule, step)
        return rate_fraction(of_stage, step - begin if begin else self.place(step), end - begin)

    def steps_at_peak(self, schedule: ScheduleSettings) -> float:
        """The learning rates of the run added up, in steps at the peak rate: what weight decay adds up over. An extended run
        keeps the value of its first part."""
        steps = self.stages[0] if self.stages else self.steps
        return mean_fraction(schedule, steps) * steps

    def decay_share(self, schedule: ScheduleSettings, step: int) -> float:
        """The fraction of the total decay for update `step`. It follows the update's progress, so that the sum follows time as the
        rate does; after a stall of the machine, many steps share what is to catch up. Must be called once for every step, because it
        keeps count. 0 without a budget, where weight decay is a number."""
        if not self.budget:
            return 0.0
        reached = self.progress(step + 1)
        part = max(0.0, min(reached - self.decayed, CATCH_UP * reached / (step + 1)))
        self.decayed += part
        return part * self.fraction(schedule, step) / mean_fraction(schedule, self.steps)

    def stage(self, schedule: ScheduleSettings, step: int) -> tuple[ScheduleSettings, int, float]:
        """The schedule at `step`, the step where it begins and the one where it ends. Every stage has its own, with the warm-up
        fraction of the first, or with as many warm-up steps if the first was nothing but warm-up."""
        ends = (0, *self.stages, self.steps)
        number = sum(step >= end for end in self.stages)
        begin, end = int(ends[number]), ends[number + 1]
        if not number:
            return schedule, begin, end
        warmup, first = schedule.warmup_steps(ends[1]), ends[1]
        steps = round(warmup / first * (end - begin)) if warmup < first else min(warmup, end - begin)
        return schedule.model_copy(update={"warmup": steps}), begin, end
