"""When a run ends: after so many steps, or after so many minutes of training.

How many steps a budget of time holds is known only when it is used up. So the end is planned again at every reading of the
clock: what is left, by the seconds per step of the last readings. Between readings, which on a GPU must wait for the device,
time is predicted. Progress is the time so far over the time at the planned end, so that it is 1, and the learning rate zero,
where the run ends, however the speed changed on the way.
"""

import math
from collections import deque

from electra.train.settings import ScheduleSettings, TrainSettings, learning_rate

READINGS = 20
"""The speed is that between the first and the last of so many."""
BUDGET_BETWEEN = 0.005
"""The most of the budget that is predicted, not read."""


class Horizon:
    """`steps`: where the run ends, as planned at the moment; infinite while a budget's speed is not known."""

    def __init__(self, settings: TrainSettings):
        self.budget = 60.0 * settings.minutes
        self.steps: float = math.inf if self.budget else settings.steps
        self.stages = settings.stages
        self.seconds_per_step = 0.0
        self.readings: deque[tuple[int, float]] = deque([(0, 0.0)], READINGS)

    def restore(self, step: int, seconds: float, planned: int) -> None:
        """As it was planned when `step` was saved, after `seconds` of training; a plan of 0 is none."""
        self.begin(step, seconds)
        if planned:
            self.steps, self.seconds_per_step = planned, (self.budget - seconds) / max(1, planned - step)

    def begin(self, step: int, seconds: float) -> None:
        """Measure from here: steps before were not timed."""
        self.readings = deque([(step, seconds)], READINGS)

    def is_reading_due(self, step: int) -> bool:
        since = (step - self.readings[-1][0]) * self.seconds_per_step
        return not self.seconds_per_step or since >= BUDGET_BETWEEN * self.budget

    def read(self, step: int, seconds: float) -> None:
        """`step` steps are done, and the device has finished them, after `seconds` of training in all."""
        self.readings.append((step, seconds))
        first, began = self.readings[0]
        if step > first:
            self.seconds_per_step = max(1e-9, (seconds - began) / (step - first))
            self.steps = step + max(0, round((self.budget - seconds) / self.seconds_per_step))

    def progress(self, step: int) -> float:
        """The share of the run that is done after `step` steps; a run that is made longer had been done."""
        if self.stages:
            return min(1.0, step / self.stages[0])
        if not self.budget or math.isinf(self.steps):
            return step / self.steps
        at, seconds = self.readings[-1]
        now, end = (seconds + (count - at) * self.seconds_per_step for count in (step, self.steps))
        return now / max(now, end)

    def place(self, step: int) -> float:
        """Where in `steps` the schedule is: at the step itself, or where a run of even speed would be."""
        return self.progress(step) * self.steps if self.budget and math.isfinite(self.steps) else step

    def fraction(self, schedule: ScheduleSettings, step: int) -> float:
        """Of the peak learning rate. Every stage has a schedule of its own, with the first one's share of warm-up."""
        ends = (*self.stages, self.steps)
        number = sum(step >= end for end in self.stages)
        if not number:
            return learning_rate(schedule, 1.0, self.place(step), ends[0])
        begin, end = ends[number - 1], ends[number]
        share = min(1.0, schedule.warmup_steps(ends[0]) / ends[0])
        warmed = schedule.model_copy(update={"warmup": round(share * (end - begin))})
        return learning_rate(warmed, 1.0, step - begin, end - begin)
