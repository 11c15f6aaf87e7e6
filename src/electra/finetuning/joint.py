"""Several tasks learned by one encoder, with a head each: mnli+rte+mrpc.

Every batch is of one task. Its loss trains the encoder and the head of that task; the others stand still. With mix=size a task
has the batches that it would have alone, its own epochs over its own rows; with mix=even all have the same number of batches, and
small tables are gone through more often. Their order is a function of the seed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import nn

from electra.base.batch import Batch
from electra.base.jobs import Signals
from electra.base.randomness import mix, permute
from electra.finetuning import merit
from electra.finetuning.plan import MethodSettings
from electra.finetuning.training import (
    DevScores,
    ExampleBatches,
    Finetuned,
    History,
    Prepared,
    best_of,
    dev_scores,
    headline,
    train_by,
)
from electra.objectives.losses import Loss
from electra.objectives.metrics import Ratio
from electra.train.loop import Run


@dataclass(frozen=True)
class JointTask:
    """One of the tasks; the models of all share their encoder."""

    name: str
    model: Finetuned
    prepared: Prepared
    method: MethodSettings
    epochs: int


class JointObjective(nn.Module):
    headline = ("loss",)
    muted_alarms: tuple[str, ...] = ()
    corruptor = None

    def __init__(self, parts: Sequence[JointTask]):
        super().__init__()
        self.encoder, self.heads = parts[0].model.encoder, nn.ModuleList(part.model.head for part in parts)
        self.parts = tuple(parts)
        self.extra_metrics = tuple(Ratio(loss_of(it), loss_of(it), batches_of(it)) for it in parts)

    def forward(self, batch: Batch) -> Loss:
        part = self.parts[batch.task]
        total = part.prepared.task.loss(part.model(batch), batch.targets)
        return Loss(total, {loss_of(part): total.detach(), batches_of(part): torch.ones_like(total)})


def loss_of(part: JointTask) -> str:
    return f"{part.name}/loss"


def batches_of(part: JointTask) -> str:
    return f"{part.name}/batches"


class JointBatches:
    def __init__(self, parts: Sequence[JointTask], how: Literal["size", "even"], seed: int):
        alone = [batches_alone(part, seed) for part in parts]
        steps = [it.steps for it in alone]
        if how == "even":
            steps = [-(-sum(steps) // len(parts))] * len(parts)
            alone = [batches_alone(part, seed, at_least) for part, at_least in zip(parts, steps, strict=True)]
        self.alone, self.steps = alone, sum(steps)
        places = permute(np.arange(self.steps), self.steps, mix(seed, "tasks"))
        self.order = np.repeat(np.arange(len(parts)), steps)[places]

    def batches(self, first_step: int) -> Iterator[Batch]:
        done = np.bincount(self.order[:first_step], minlength=len(self.alone))
        sources = [it.batches(int(first)) for it, first in zip(self.alone, done, strict=True)]
        for task in self.order[first_step:]:
            yield replace(next(sources[task]), task=int(task))


def batches_alone(part: JointTask, seed: int, at_least: int = 0) -> ExampleBatches:
    least = max(part.method.min_steps, at_least)
    return ExampleBatches(part.prepared, part.method.batch, part.epochs, seed, least)


def train_jointly(parts: Sequence[JointTask], seed: int, run: Run, signals: Signals) -> list[History]:
    """Trains the models in place, from the run's newest checkpoint where there is one. The method is that of the first; its
    headline, by which the best weights would be kept, the mean of those of the tasks."""
    method = parts[0].method

    def all_scores() -> dict[str, float]:
        scores = [dev_scores(part.model, part.prepared, method) for part in parts]
        mean = sum(merit(*headline(it)) for it in scores) / len(parts)
        named = {f"{part.name}/{key}": it[key] for part, it in zip(parts, scores, strict=True) for key in it}
        return {"mean": mean, **named}

    objective, data = JointObjective(parts), JointBatches(parts, method.mix, seed)
    state = train_by(objective, data, DevScores(objective, method, data.steps, all_scores), seed, run, signals)
    records, logged = state.log.of_kind("dev"), state.log.of_kind("train")
    histories = []
    for part in parts:
        curve = []
        for record in records:
            split = {key.rpartition("/")[::2]: value for key, value in record.items()}
            own = {metric: value for (name, metric), value in split.items() if name == part.name}
            curve.append({"step": record["step"], **own})
        losses = [(it["step"], it[loss_of(part)]) for it in logged if it.get(loss_of(part)) is not None]
        best, is_early = best_of(records)[0], state.step < data.steps
        histories.append(History(data.steps, round(state.seconds, 3), curve, losses, best, is_early))
    return histories
