"""Trains one (task, seed) with the common loop: batches of similar lengths, layer-wise learning rates, dev scores along the way.

Rows are padded only to the longest of their batch, and the examples of a batch have similar lengths: an epoch is
shuffled, cut into chunks of many batches, each chunk sorted by length and cut into batches, and the batches shuffled.
The order is a function of (seed, epoch) alone. On a GPU widths are multiples of eight, because every width is captured once, which
takes as long as a hundred steps, and RTE has a hundred widths.

Layer-wise rates: with n layers and decay d the head learns at lr, the top layer at lr d, the layer below at lr d², … and the
embeddings with their projection at lr d^(n+1): the nearer a pre-trained weight is to the input, the less it changes.
"original" is the code behind the paper's results, whose exponents are all larger by one below the head (top layer d²,
embeddings d^(n+2)), a leftover of a pooling layer that was removed. ModernBERT's last norm learns with its top layer.

Several tasks may share one encoder, with a head each (mnli+rte+mrpc). Every batch is of one task, whose loss trains the encoder and
the head of that task; the other heads do not change. With mix=size a task has the batches that it would have alone, its own epochs
over its own rows; with mix=even all have the same number of batches, and small tables are repeated more often. The order of the
tasks is a function of the seed.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.jobs import Signals
from electra.base.randomness import mix, permute
from electra.data.tables import Row
from electra.finetuning import Example, Outputs, Task, in_chunks, merit
from electra.finetuning.plan import DecayKind, MethodSettings, PlannedTask
from electra.model import Encoder, encode
from electra.objectives import Trainable
from electra.objectives.losses import Loss
from electra.objectives.metrics import Ratio
from electra.train.device import autocast, choose_device, log_shortcomings
from electra.train.log import Record, read_metrics
from electra.train.loop import Batches, Run, RunState, train
from electra.train.optimizers import ParameterGroup, build_optimizer
from electra.train.settings import ScheduleSettings, TrainSettings
from electra.train.step import Execution, Step

CHUNK_BATCHES = 64
GPU_WIDTHS = 8
LOG_LINES = 100
"""About how many training records the metrics of a run have; the terminal shows at most one in ten seconds."""


class Finetuned(nn.Module):
    """An encoder with a task's head."""

    def __init__(self, encoder: Encoder, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head
        self.first_only = bool(head.reads_first_only)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self.head(encode(self.encoder, batch, self.first_only), batch)
        return outputs


class TaskObjective(nn.Module):
    """The objective of one task: its network and its loss."""

    headline = ("loss",)
    extra_metrics: tuple[Ratio, ...] = ()
    muted_alarms: tuple[str, ...] = ()
    corruptor = None

    def __init__(self, model: Finetuned, task: Task):
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Batch) -> Loss:
        return Loss(self.task.loss(self.model(batch), batch.targets), {})


@dataclass(frozen=True)
class Encoded:
    """The rows of a split, their examples, and how many rows were cut to fit."""

    rows: Sequence[Row]
    examples: Sequence[Example]
    cut: int = 0

    @staticmethod
    def of(task: Task, rows: Sequence[Row]) -> "Encoded":
        return Encoded(rows, *task.encode(rows))

    @property
    def is_labelled(self) -> bool:
        return bool(self.examples) and all(example.target is not None for example in self.examples)

    @property
    def is_filled_in(self) -> bool:
        """Whether all targets are one number, or (multi-label) the same labels: placeholders in a test set that withholds its answers."""
        targets = [example.target for example in self.examples]
        is_number = np.asarray(targets[0]).dtype.kind == "f"  # quantities, or a number for each of several labels
        return is_number and len(self.rows) > 1 and all(it == targets[0] for it in targets)


@dataclass(frozen=True)
class Prepared:
    """A planned task with its rows as examples; `others` are the splits that are not trained on, dev first."""

    planned: PlannedTask
    train: Encoded
    others: Mapping[str, Encoded]

    @property
    def name(self) -> str:
        return self.planned.plan.name

    @property
    def task(self) -> Task:
        return self.planned.task

    @property
    def method(self) -> MethodSettings:
        return self.planned.plan.method


@dataclass(frozen=True)
class History:
    """What a run leaves besides its weights: the dev scores of each evaluation, mean losses, and how long it took."""

    steps: int
    seconds: float
    curve: list[Record]
    losses: list[tuple[int, float]]
    best_step: int
    stopped_early: bool


def train_task(model: Finetuned, prepared: Prepared, seed: int, run: Run, signals: Signals) -> History:
    """Trains `model` in place, from the run's newest checkpoint if there is one."""
    data = ExampleBatches(prepared, seed)
    evaluation = DevScores(model, prepared.method, data.steps, lambda: dev_scores(model, prepared))
    state = train_by(TaskObjective(model, prepared.task), data, evaluation, seed, run, signals)
    curve = state.log.of_kind("dev")
    losses = [(record["step"], record["loss"]) for record in read_metrics(run.folder, "train")]
    return History(data.steps, round(state.seconds, 3), curve, losses, best_of(curve)[0], state.step < data.steps)


def train_by(
    objective: Trainable, data: Batches, evaluation: "DevScores", seed: int, run: Run, signals: Signals
) -> RunState:
    """Runs the loop with layer-wise rates and leaves the model with the weights that `keep` asks for."""
    model, method, steps = evaluation.model, evaluation.method, evaluation.steps
    device = choose_device(method)
    log_shortcomings(method.precision, device)
    model.to(device)
    groups = [layerwise_group(model, method)]
    optimizer = build_optimizer(objective, groups, method.optimizer_settings())
    execution = Execution(device, method.precision, capture=method.record and device.type == "cuda")
    update = Step(objective, optimizer, groups, execution, lambda number: mix(seed, "dropout", number))

    schedule = ScheduleSettings(kind=method.schedule, warmup=int(method.warmup * steps))
    log_every = max(1, steps // LOG_LINES)
    often = {"log_every": log_every, "save_every": steps, "save_minutes": method.save_minutes}
    settings = TrainSettings(steps=steps, batch=method.batch, track=method.track, **often)
    state = train(update, data, evaluation, schedule, settings, run, signals)
    if method.keep == "best":
        model.load_state_dict(evaluation.kept)
    model.eval()
    return state


@dataclass
class DevScores:
    """Evaluates `scores` on dev, the headline first, `method.evaluations` times per run, and keeps the best weights of `model`
    if the method asks for them."""

    model: "Finetuned | JointObjective"
    method: MethodSettings
    steps: int
    scores: Callable[[], dict[str, float]]
    kind: str = "dev"
    kept: dict[str, Tensor] = field(default_factory=dict)

    def is_due(self, step: int, is_last: bool) -> bool:
        parts = range(1, self.method.evaluations + 1)
        return step in {math.ceil(self.steps * part / self.method.evaluations) for part in parts}

    def measure(self, step: int, earlier: Sequence[Record]) -> dict[str, float]:
        scores = self.scores()
        _, since_best = best_of([*earlier, {"step": -1, **scores}])
        if self.method.keep == "best" and since_best == 0:
            weights = self.model.state_dict()
            self.kept = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}
        return scores

    def describe(self, metrics: Mapping[str, float]) -> str:
        name, value = headline(metrics)
        return f"dev {name} {value:.4f}"

    def is_enough(self, records: Sequence[Record]) -> bool:
        """Whether there were `patience` evaluations without a better headline."""
        _, since_best = best_of(records)
        return 0 < self.method.patience <= since_best


def dev_scores(model: Finetuned, prepared: Prepared) -> dict[str, float]:
    task, dev = prepared.task, prepared.others["dev"]
    outputs = infer(model, task, dev.examples, prepared.method)
    return task.scores(dev.rows, task.predict(dev.rows, dev.examples, outputs))


def headline(metrics: Mapping[str, float]) -> tuple[str, float]:
    """The first metric: name and value."""
    return next((name, value) for name, value in metrics.items() if name != "step")


def best_of(records: Sequence[Record]) -> tuple[int, int]:
    """The step with the best headline, the first of a record's metrics, and how many evaluations came after it."""
    values = [merit(*headline(record)) for record in records]
    if not values:
        return 0, 0
    best = values.index(max(values))
    return records[best]["step"], len(values) - 1 - best


def depth_factor(name: str, layers: int, decay: float, kind: DecayKind) -> float:
    """The factor on the learning rate of a parameter of `Finetuned`, from its name."""
    if not name.startswith("encoder."):
        return 1.0
    depth = 1 if name.startswith("encoder.final_norm.") else layers + 1
    if match := re.match(r"encoder\.layers\.(\d+)\.", name):
        depth = layers - int(match[1])
    return decay ** (depth + (kind == "original"))


def layerwise_group(model: "Finetuned | JointObjective", method: MethodSettings) -> ParameterGroup:
    """All parameters in one group: clipped together, each depth at its own rate."""
    parameters = dict(model.named_parameters())
    layers = model.encoder.settings.layers
    factors = {name: depth_factor(name, layers, method.layer_decay, method.layer_decay_kind) for name in parameters}
    return ParameterGroup(method.optimizer_settings(), parameters, factors)


class ExampleBatches:
    """The batches of a seed, epoch by epoch: the epochs of the settings, or more if `min_steps` or `at_least` steps need them."""

    def __init__(self, prepared: Prepared, seed: int, at_least: int = 0):
        self.prepared, self.batch, self.seed = prepared, prepared.method.batch, seed
        self.examples = prepared.train.examples
        self.multiple_of = GPU_WIDTHS if choose_device(prepared.method).type == "cuda" else 1
        self.lengths = lengths_of(self.examples)
        self.steps_per_epoch = math.ceil(len(self.examples) / self.batch)
        needed = math.ceil(max(prepared.method.min_steps, at_least) / self.steps_per_epoch)
        self.epochs = max(prepared.task.settings.epochs, needed)
        self.steps = self.steps_per_epoch * self.epochs

    def batches(self, first_step: int) -> Iterator[Batch]:
        first_epoch, skipped = divmod(first_step, self.steps_per_epoch)
        for epoch in range(first_epoch, self.epochs):
            order = epoch_order(self.lengths, self.batch, self.seed, epoch)
            for chosen in order[skipped if epoch == first_epoch else 0 :]:
                examples = [self.examples[index] for index in chosen]
                yield collate(self.prepared.task, examples, with_targets=True, multiple_of=self.multiple_of)


def lengths_of(examples: Sequence[Example]) -> np.ndarray:
    return np.array([len(example.ids) for example in examples], np.int64)


def epoch_order(lengths: np.ndarray, batch: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The examples of each batch; every example is in exactly one. The very first batch is the largest: a run that does not fit
    into memory fails at once, not later."""
    size = len(lengths)
    shuffled = permute(np.arange(size), size, mix(seed, "examples", epoch))
    batches: list[np.ndarray] = []
    for start in range(0, size, batch * CHUNK_BATCHES):
        chunk = shuffled[start : start + batch * CHUNK_BATCHES]
        chunk = chunk[np.argsort(lengths[chunk], kind="stable")]
        batches += [chunk[first : first + batch] for first in range(0, len(chunk), batch)]
    order = permute(np.arange(len(batches)), len(batches), mix(seed, "batches", epoch))
    ordered = [batches[index] for index in order]
    if epoch == 0:
        widest = max(range(len(ordered)), key=lambda index: len(ordered[index]) * lengths[ordered[index]].max())
        ordered[0], ordered[widest] = ordered[widest], ordered[0]
    return ordered


def sorted_order(lengths: np.ndarray, batch: int) -> list[np.ndarray]:
    """Batches for evaluation, the longest first: what does not fit into memory fails at once."""
    order = np.argsort(-lengths, kind="stable")
    return [order[first : first + batch] for first in range(0, len(order), batch)]


def collate(task: Task, examples: Sequence[Example], with_targets: bool, multiple_of: int = 1) -> Batch:
    """A batch as wide as its longest row, rounded up to `multiple_of` within the task's length. A batch of rounded width counts as
    padded even if no row is: one shape, one capture."""
    lengths = lengths_of(examples)
    width = longest = int(lengths.max())
    if multiple_of > 1:
        width = max(longest, min(-(-longest // multiple_of) * multiple_of, task.length))
    ids = np.full((len(examples), width), task.special.pad, np.int64)
    segments = np.zeros((len(examples), width), np.int64)
    for index, example in enumerate(examples):
        ids[index, : lengths[index]] = example.ids
        segments[index, example.first : lengths[index]] = 1
    is_real = torch.from_numpy(np.arange(width) < lengths[:, None])
    targets = task.targets(examples, width) if with_targets else {}
    batch = Batch.of_rows(torch.from_numpy(ids), torch.from_numpy(segments), is_real, targets)
    return batch if multiple_of == 1 else replace(batch, padded=True)


def infer(model: nn.Module, task: Task, examples: Sequence[Example], method: MethodSettings) -> list[Outputs]:
    """The head's outputs for every example, in order. Batches go to a GPU through pinned memory, so that copies do not block, and
    the outputs come back once for a group of batches."""
    device = choose_device(method)
    model.to(device).eval()
    answers: list[Outputs] = [{} for _ in examples]
    with torch.inference_mode(), autocast(method.precision, device):
        for group in in_chunks(sorted_order(lengths_of(examples), 2 * method.batch), CHUNK_BATCHES):
            batches = (collate(task, [examples[index] for index in chosen], with_targets=False) for chosen in group)
            outputs = [model(it if device.type == "cpu" else it.pinned().to(device)) for it in batches]
            for chosen, tensors in zip(group, outputs, strict=True):
                arrays = {name: tensor.float().cpu().numpy() for name, tensor in tensors.items()}
                for place, index in enumerate(chosen):
                    answers[index] = {name: array[place] for name, array in arrays.items()}
    return answers


# Several tasks, one encoder


class JointObjective(nn.Module):
    """The objective of several tasks, whose models share their encoder."""

    headline = ("loss",)
    muted_alarms: tuple[str, ...] = ()
    corruptor = None

    def __init__(self, models: Sequence[Finetuned], parts: Sequence[Prepared]):
        super().__init__()
        self.encoder, self.heads = models[0].encoder, nn.ModuleList(model.head for model in models)
        self.models, self.parts = tuple(models), tuple(parts)
        self.extra_metrics = tuple(Ratio(f"{it.name}/loss", f"{it.name}/loss", f"{it.name}/batches") for it in parts)

    def forward(self, batch: Batch) -> Loss:
        model, part = self.models[batch.task], self.parts[batch.task]
        total = part.task.loss(model(batch), batch.targets)
        return Loss(total, {f"{part.name}/loss": total.detach(), f"{part.name}/batches": torch.ones_like(total)})


class JointBatches:
    def __init__(self, parts: Sequence[Prepared], how: Literal["size", "even"], seed: int):
        alone = [ExampleBatches(part, seed) for part in parts]
        steps = [it.steps for it in alone]
        if how == "even":
            steps = [-(-sum(steps) // len(parts))] * len(parts)
            alone = [ExampleBatches(part, seed, steps[0]) for part in parts]
        self.alone, self.steps = alone, sum(steps)
        places = permute(np.arange(self.steps), self.steps, mix(seed, "tasks"))
        self.order = np.repeat(np.arange(len(parts)), steps)[places]

    def batches(self, first_step: int) -> Iterator[Batch]:
        done = np.bincount(self.order[:first_step], minlength=len(self.alone))
        sources = [it.batches(int(first)) for it, first in zip(self.alone, done, strict=True)]
        for task in self.order[first_step:]:
            yield replace(next(sources[task]), task=int(task))


def train_jointly(
    models: Sequence[Finetuned], parts: Sequence[Prepared], seed: int, run: Run, signals: Signals
) -> list[History]:
    """Trains the models in place, from the run's newest checkpoint if there is one. The method is that of the first task; the
    headline, by which the best weights may be kept, is the mean of the tasks' headlines."""
    method = parts[0].method

    def all_scores() -> dict[str, float]:
        scores = list(map(dev_scores, models, parts))
        mean = sum(merit(*headline(it)) for it in scores) / len(parts)
        named = {f"{part.name}/{key}": it[key] for part, it in zip(parts, scores, strict=True) for key in it}
        return {"mean": mean, **named}

    objective, data = JointObjective(models, parts), JointBatches(parts, method.mix, seed)
    state = train_by(objective, data, DevScores(objective, method, data.steps, all_scores), seed, run, signals)
    records, logged = state.log.of_kind("dev"), read_metrics(run.folder, "train")
    histories = []
    for part in parts:
        curve, prefix = [], f"{part.name}/"
        for record in records:
            own = {key.removeprefix(prefix): value for key, value in record.items() if key.startswith(prefix)}
            curve.append({"step": record["step"], **own})
        losses = [(it["step"], it[f"{prefix}loss"]) for it in logged if it.get(f"{prefix}loss") is not None]
        best, is_early = best_of(records)[0], state.step < data.steps
        histories.append(History(data.steps, round(state.seconds, 3), curve, losses, best, is_early))
    return histories
