"""The loop of pre-training and of fine-tuning. It moves batches to an update and knows neither tokenizers, generators nor
tasks: what is trained, on what, and how that is judged on the way arrive as arguments."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from electra.base.batch import Batch
from electra.base.errors import DivergedError
from electra.base.jobs import Signals
from electra.base.progress import Progress, metrics_text
from electra.objectives import Trainable
from electra.objectives.losses import Sums
from electra.objectives.metrics import alarms, summarise
from electra.train import checkpoint
from electra.train.device import Precision, autocast, check_space, deterministic, is_out_of_memory, kernels
from electra.train.log import Record, RunLog
from electra.train.optimizers import optimizer_tensors
from electra.train.settings import ScheduleSettings, TrainSettings, learning_rate
from electra.train.step import Step

log = logging.getLogger(__name__)
STATES = {75: "preempted", 130: "interrupted", 6: "diverged"}


class Batches(Protocol):
    def batches(self, first_step: int) -> Iterator[Batch]: ...


class Evaluation(Protocol):
    """How a run is judged on the way. What it measures is logged under `kind`; `kept` are tensors that go into every
    checkpoint beside the weights, and come back from it."""

    @property
    def kind(self) -> str: ...

    kept: dict[str, Tensor]

    def is_due(self, step: int) -> bool: ...

    def measure(self, earlier: Sequence[Record]) -> dict[str, float]:
        """Empty where there is nothing to measure, or where a signal cut it short: the checkpoint comes first."""
        ...

    def describe(self, metrics: Mapping[str, float]) -> str: ...

    def is_enough(self, records: Sequence[Record]) -> bool:
        """Whether to stop before the last step."""
        ...


@dataclass(frozen=True)
class Run:
    """Where a run lives, what must not change under it, and what to tell people about it. `name` tells it from others of
    the same command; `keeps_last`: whether the last step is saved too; `peak_speed`: the tokens per second of a device
    that computes without pause, 0 where nobody knows."""

    folder: Path
    fingerprint: Mapping[str, str]
    resume_command: str = ""
    name: str = ""
    when_diverged: str = "Start a new run with a lower optimizer.lr or a longer schedule.warmup."
    keeps_last: bool = True
    peak_speed: float = 0.0
    seconds_between_lines: float = 0.0

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def train(
    update: Step,
    data: Batches,
    evaluation: Evaluation,
    schedule: ScheduleSettings,
    settings: TrainSettings,
    run: Run,
    signals: Signals,
) -> "RunState":
    """Train from the newest checkpoint, or from the beginning, to the last step. The caller holds the lock on the run folder
    and listens for signals."""
    update.objective.train()
    state, pause = RunState(update, evaluation, settings, run), run.seconds_between_lines
    progress = Progress(run.name or "step", settings.steps, state.step, seconds_between_lines=pause)
    with deterministic(settings.deterministic), state.told_to_outsiders(), progress:
        state.evaluate_if_due(progress)  # a signal during an evaluation puts it off to the next start
        for batch in data.batches(state.step):
            if state.is_enough:
                break

            # one update
            fraction = learning_rate(schedule, 1.0, state.step, settings.steps)
            sums, norm = update(batch, state.step, fraction)
            state.count(sums, update.paused)
            progress.advance(state.step)

            # once in a while: read the sums, which waits for the device
            if state.step % settings.log_every == 0 or state.step == settings.steps:
                metrics = state.log_metrics(norm, fraction)
                shown = (*update.objective.headline, "tokens_per_second", "mfu")
                progress.report(metrics_text(metrics, shown), state.seconds_left())
            state.evaluate_if_due(progress)

            # once in a while, and before stopping: save
            if signals.received is not None or state.is_save_due():
                state.save()
            if signals.received is not None:
                where = f"step {state.step} of {settings.steps}" + (f" of {run.name}" if run.name else "")
                raise signals.stop(f"stopped at {where}; everything is saved.")
        if signals.received is not None:
            raise signals.stop("stopped during the last evaluation; everything is saved.")
        state.require_finite()
    return state


class RunState:
    """All that changes while a run goes on, beside weights and optimizer: restored from the newest checkpoint. What is
    summed, saved and logged is so here and nowhere else."""

    def __init__(self, update: Step, evaluation: Evaluation, settings: TrainSettings, run: Run):
        self.update, self.evaluation, self.settings, self.run = update, evaluation, settings, run
        self.tensors = checkpoint_groups(update.objective, update.optimizer)
        self.step, self.sums, self.seconds_before, device = 0, Sums(), 0.0, update.execution.device
        checkpoint.clean(run.checkpoints)
        if newest := checkpoint.newest_checkpoint(run.checkpoints):
            checkpoint.set_aside(run.checkpoints, newest.step)
            checkpoint.restore(newest, self.tensors)
            self.step, self.seconds_before = newest.step, newest.state["seconds"]
            self.sums = {name: tensor.to(device) for name, tensor in newest.tensors("sums").items()}
            evaluation.kept = newest.tensors("kept")
            log.info("resuming at step %d from %s", self.step, newest.folder)
        check_space(run.folder, sum(t.nbytes for group in self.tensors.values() for t in group.values()))
        self.log = RunLog(run.folder, self.step)
        self.history = self.log.of_kind("train")
        self.is_enough = evaluation.is_enough(self.log.of_kind(evaluation.kind))
        self.alarmed = {record["alarm"] for record in self.log.of_kind("alarm")}
        self.tokens = torch.zeros((), dtype=torch.long, device=device)
        self.first_step, self.compiling = self.step, 0.0
        self.started = self.saved = self.logged = time.monotonic()

    @property
    def seconds(self) -> float:
        """Of all processes that worked on this run."""
        return self.seconds_before + time.monotonic() - self.started

    def seconds_left(self) -> float:
        per_step = (time.monotonic() - self.started - self.compiling) / max(1, self.step - self.first_step)
        return (self.settings.steps - self.step) * per_step

    def count(self, sums: Sums, paused: float) -> None:
        """A step is done; of it, so many seconds were compiling, which is no part of the speed."""
        tokens = sums.pop("tokens")
        add_sums(self.sums, sums)
        if paused:
            self.logged += paused
            self.compiling += paused
        else:
            self.tokens += tokens
        self.step += 1

    def log_metrics(self, norm: Tensor, fraction: float) -> dict[str, float]:
        """Metrics since the last time, and whatever must be said aloud about them."""
        objective, now, count = self.update.objective, time.monotonic(), self.tokens.item()
        speed = count / (now - self.logged) if count else math.nan
        metrics = summarise(self.sums, objective.extra_metrics) | {
            "loss": (self.sums["total"] / self.sums["parts"]).item(),
            "lr": fraction * self.update.groups[0].adam.lr,
            "gradient_norm": norm.item(),
            "tokens_per_second": speed,
            "seconds": self.seconds,
        }
        if self.run.peak_speed:
            metrics["mfu"] = speed / self.run.peak_speed
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"])):
            raise self.diverged()
        self.log.write("train", self.step, metrics)
        self.history.append(metrics)
        progress = self.step / self.settings.steps
        for alarm, text in alarms(self.history, progress, self.step, objective.muted_alarms).items():
            if alarm not in self.alarmed:
                self.alarmed.add(alarm)
                log.warning(text)
                self.log.write("alarm", self.step, {"alarm": alarm, "text": text})
        self.sums, self.logged = {}, now
        self.tokens.zero_()
        return metrics

    def evaluate_if_due(self, progress: Progress) -> None:
        kind, before = self.evaluation.kind, time.monotonic()
        if not self.evaluation.is_due(self.step) or self.log.last(kind).get("step") == self.step:
            return
        try:
            metrics = self.evaluation.measure(self.log.of_kind(kind))
        except RuntimeError as error:  # what graphs hold is not free for evaluation
            if not (self.update.captured.graphs and is_out_of_memory(error)):
                raise
            self.update.captured.forget()
            metrics = self.evaluation.measure(self.log.of_kind(kind))
        if metrics:
            log.info("%s %s", progress.place, self.evaluation.describe(metrics))
            self.log.write(kind, self.step, metrics)
            self.is_enough = self.evaluation.is_enough(self.log.of_kind(kind))
        self.update.objective.train()
        self.logged += time.monotonic() - before

    def is_save_due(self) -> bool:
        if self.step == self.settings.steps:
            return self.run.keeps_last
        is_late = time.monotonic() - self.saved > self.settings.save_minutes * 60
        return is_late or self.step % self.settings.save_every == 0

    def save(self) -> None:
        """Never weights that are not finite: the checkpoints before them are the way back."""
        self.require_finite()
        groups = self.tensors | {"sums": self.sums}
        if self.evaluation.kept:
            groups["kept"] = self.evaluation.kept
        state = {"seconds": self.seconds, **self.run.fingerprint}
        checkpoint.save_checkpoint(self.run.checkpoints, self.step, groups, state)
        checkpoint.prune(self.run.checkpoints, self.settings.keep, self.settings.keep_every)
        self.saved = time.monotonic()

    def require_finite(self) -> None:
        if not all(torch.isfinite(parameter).all() for parameter in self.update.objective.parameters()):
            raise self.diverged()

    def diverged(self) -> DivergedError:
        last = checkpoint.checkpoint_folders(self.run.checkpoints)
        return DivergedError(
            f"the loss is not finite at step {self.step}. Nothing after {last[-1].name if last else 'the start'} was "
            f"saved. {self.run.when_diverged}"
        )

    @contextmanager
    def told_to_outsiders(self) -> Iterator[None]:
        """run_state.json: that the run goes on, and how it ended."""
        self.log.state("running", self.step, resume=self.run.resume_command)
        try:
            yield
            self.log.state("finished", self.step)
        except BaseException as error:
            state = STATES.get(getattr(error, "exit_code", 1), "failed")
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            with suppress(OSError):
                self.log.state(state, self.step, reason=reason, resume=self.run.resume_command)
            raise
        finally:
            with suppress(OSError):
                self.log.close()


@dataclass
class HeldOutEvaluation:
    """Pre-training's: the objective's metrics over held-out rows, without dropout."""

    update: Step
    rows: Iterable[Batch]
    settings: TrainSettings
    signals: Signals
    kind: str = "heldout"
    kept: dict[str, Tensor] = field(default_factory=dict)

    def is_due(self, step: int) -> bool:
        return step > 0 and (step % self.settings.evaluate_every == 0 or step == self.settings.steps)

    def measure(self, earlier: Sequence[Record]) -> dict[str, float]:
        objective, execution = self.update.objective, self.update.execution
        objective.eval()
        rows = takewhile(lambda batch: self.signals.received is None, self.rows)
        how = execution.device, execution.precision, self.update.with_kernels
        sums = sums_over(rows, lambda batch: objective(batch).sums, *how)
        return summarise(sums, objective.extra_metrics) if sums and self.signals.received is None else {}

    def describe(self, metrics: Mapping[str, float]) -> str:
        return f"held-out: {metrics_text(metrics, self.update.objective.headline)}"

    def is_enough(self, records: Sequence[Record]) -> bool:
        return False


def checkpoint_groups(objective: Trainable, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The live tensors that a checkpoint holds, by file."""
    return {"model": dict(objective.named_parameters()), "optimizer": optimizer_tensors(optimizer, objective)}


def sums_over(
    batches: Iterable[Batch],
    score: Callable[[Batch], Sums],
    device: torch.device,
    precision: Precision,
    with_kernels: bool,
) -> Sums:
    """What `score` gives for each batch, added up: without gradients, but as an update computes it."""
    sums: Sums = {}
    with torch.no_grad(), autocast(precision, device), kernels(with_kernels):
        for batch in batches:
            add_sums(sums, score(batch.to(device)))
    return sums


def add_sums(totals: Sums, more: Mapping[str, Tensor]) -> None:
    """What is added may be overwritten afterwards."""
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value.clone()
