"""The training loop of pre-training and fine-tuning. It feeds batches to updates and knows neither tokenizers, generators nor
tasks: the step, the data and the evaluation are arguments."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from electra.base.batch import Batch
from electra.base.errors import DivergedError, PeerError, common, first_line, is_said
from electra.base.jobs import Signals
from electra.base.progress import Progress, metrics_text
from electra.base.ranks import explain_peers
from electra.objectives import Trainable
from electra.objectives.corruption import Corruptor
from electra.objectives.losses import Sums
from electra.objectives.metrics import Watch, alarms, by_heart, summarise
from electra.train import checkpoint
from electra.train.device import Precision, check_space, deterministic, inference, is_out_of_memory
from electra.train.distributed import Groups, gathered, is_piece, is_sharded, own, spread, whole_groups
from electra.train.log import Record, RunLog
from electra.train.optimizers import optimizer_tensors
from electra.train.settings import Horizon, ScheduleSettings, TrainSettings, schedule_warning
from electra.train.step import Step
from electra.train.trackers import Tracked, wanted_trackers

log = logging.getLogger(__name__)
SURE = 0.02  # fraction of a time budget after which the number of steps that fit is known
LINES_OF_BUDGET = 50  # log lines in a time budget, at least
STATES = {75: "preempted", 130: "interrupted", 141: "interrupted", 6: "diverged"}


class Batches(Protocol):
    def batches(self, first_step: int) -> Iterator[Batch]: ...


class Evaluation(Protocol):
    """How a run is evaluated during training. Its metrics are logged under `kind`; `kept` are tensors that go into every
    checkpoint beside the weights, and are restored from it."""

    @property
    def kind(self) -> str: ...

    kept: dict[str, Tensor]

    def is_due(self, step: int, is_last: bool) -> bool: ...

    def measure(self, step: int, earlier: Sequence[Record]) -> dict[str, float]:
        """The metrics; empty if there is nothing to measure, or a signal cut it short, because the checkpoint comes first."""
        ...

    def describe(self, metrics: Mapping[str, float]) -> str: ...

    def is_enough(self, records: Sequence[Record]) -> bool:
        """Whether to stop before the last step."""
        ...


@dataclass(frozen=True)
class Run:
    """Where a run lives, what must not change when it resumes, and what to tell people about it. `name` tells it from others of
    the same command; `keeps_last`: whether the last step is saved too; `peak_speed`: tokens per second at the device's peak,
    0 if unknown; `settings` are for trackers."""

    folder: Path
    fingerprint: Mapping[str, str]
    resume_command: str = ""
    name: str = ""
    when_diverged: str = "Start a new run with a lower optimizer.lr or a longer schedule.warmup."
    keeps_last: bool = True
    peak_speed: float = 0.0
    seconds_between_lines: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)

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
    horizon = state.horizon
    progress = Progress(run.name or "step", state.planned_steps, state.step, seconds_between_lines=pause)
    with deterministic(settings.deterministic), state.told_to_outsiders(), explain_peers(state.ranks), progress:
        state.evaluate_if_due(progress)  # a signal during an evaluation puts it off to the next start
        for batch in data.batches(state.step):
            if state.is_enough or state.is_last:
                break

            # one update
            fraction = horizon.fraction(schedule, state.step)
            if horizon.budget or horizon.stages:
                batch = replace(batch, progress=horizon.progress(state.step))
            sums, norm = update(batch, state.step, fraction, horizon.decay_share(schedule, state.step))
            state.count(sums, update.paused)
            state.read_clock(signals)
            progress.advance(state.step, state.planned_steps)

            # once in a while: read the sums, which waits for the device
            if state.is_log_due():
                metrics = state.log_metrics(norm, fraction, schedule)
                shown = (*update.objective.headline, "tokens_per_second", "mfu")
                progress.report(metrics_text(metrics, shown), state.seconds_left())
            state.evaluate_if_due(progress)

            # once in a while, and before stopping: save
            if signals.agreed or state.is_save_due():
                state.save()
            if signals.agreed:
                where = f"step {state.step} of {state.planned_steps}" + (f" of {run.name}" if run.name else "")
                raise common(signals.stop(f"stopped at {where}; everything is saved."))
        state.ranks.hear(signals)
        if signals.agreed:
            raise common(signals.stop("stopped during the last evaluation; everything is saved."))
        state.require_finite()
    return state


class RunState:
    """Everything that changes during a run beside weights and optimizer, restored from the newest checkpoint. Summing,
    saving and logging happen here and nowhere else."""

    def __init__(self, update: Step, evaluation: Evaluation, settings: TrainSettings, run: Run):
        self.update, self.evaluation, self.settings, self.run = update, evaluation, settings, run
        self.ranks = update.execution.ranks
        self.tensors = checkpoint_groups(update.objective, update.optimizer)
        self.step, self.sums, self.seconds_before, device = 0, Sums(), 0.0, update.execution.device
        self.horizon, self.tokens_before = Horizon(settings), 0
        self.pauses = {"compile": 0.0, "evaluate": 0.0, "save": 0.0}
        self.restored, self.log = self.tensors, RunLog(self.tracked(0), (), writes=False)
        self.step, state, sums, evaluation.kept, records = self.ranks.first(self.open)
        if state or not is_sharded(update.objective):
            spread(self.tensors, self.restored, self.ranks)
        if state:
            self.seconds_before = state["seconds"]
            self.pauses |= state.get("pauses", {})
            self.tokens_before = state.get("tokens", 0)
            self.sums = self.own_sums({name: tensor.to(device) for name, tensor in sums.items()})
        self.log.records = records
        self.log.writer = self.ranks.first(lambda: self.log.writer)
        self.watch = Watch()
        for record in self.log.of_kind("train"):
            self.watch.add(record["step"], record)
        self.is_enough = evaluation.is_enough(self.log.of_kind(evaluation.kind))
        self.alarmed = {record["alarm"] for record in self.log.of_kind("alarm")}
        self.tokens = torch.zeros((), dtype=torch.long, device=device)
        self.first_step, self.compiling, self.unlogged, self.unsaved = self.step, 0.0, 0.0, 0.0
        self.started = self.saved = self.logged = time.monotonic()
        if state and self.horizon.budget:
            _, (seconds,) = self.ranks.agree(None, self.training_seconds)
            self.horizon.restore(self.step, seconds, state["planned_steps"])

    def open(self) -> tuple[int, dict[str, Any], Sums, dict[str, Tensor], list[Record]]:
        """Copy the newest checkpoint into the live tensors. Returns the step, state, sums, the evaluation's kept tensors and the
        records of earlier processes. Only process 0, which alone reads and writes the run folder, calls this."""
        root, folder = self.run.checkpoints, self.run.folder
        checkpoint.clean(root)
        newest = checkpoint.newest_checkpoint(root)
        if newest:
            checkpoint.set_aside(root, newest.step)
            self.restored = {  # for sharded tensors, the whole one on the host
                group: {
                    name: torch.empty(tensor.shape, dtype=tensor.dtype) if is_piece(tensor) else tensor
                    for name, tensor in tensors.items()
                }
                for group, tensors in self.tensors.items()
            }
            checkpoint.restore(newest, self.restored)
            log.info("resuming at step %d from %s", newest.step, newest.folder)
        check_space(folder, sum(tensor.nbytes for group in self.tensors.values() for tensor in group.values()))
        self.log = RunLog(self.tracked(newest.step if newest else 0), wanted_trackers(self.settings.track))
        if newest is None:
            return 0, {}, {}, {}, self.log.records
        return newest.step, newest.state, newest.tensors("sums"), newest.tensors("kept"), self.log.records

    def tracked(self, step: int) -> Tracked:
        return Tracked(self.run.folder, self.run.name, self.run.settings, step)

    def own_sums(self, totals: Sums) -> Sums:
        """The totals as this process keeps them: histograms are left to process 0, scalars are the same in every process."""
        return {
            name: total if total.ndim == 0 or self.ranks.is_first else torch.zeros_like(total)
            for name, total in totals.items()
        }

    def total_sums(self) -> Sums:
        return self.sums | self.ranks.total({name: value for name, value in self.sums.items() if value.ndim})

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of this run so far, over all processes that have resumed it."""
        return self.seconds_before + time.monotonic() - self.started

    @property
    def training_seconds(self) -> float:
        """`seconds` without compiling, evaluating and saving."""
        return self.seconds - sum(self.pauses.values())

    @property
    def planned_steps(self) -> int:
        """The planned number of steps. With a time budget, that of the steps done until the speed is known."""
        return self.step if math.isinf(self.horizon.steps) else int(self.horizon.steps)

    @property
    def is_last(self) -> bool:
        return self.step >= self.horizon.steps

    def read_clock(self, signals: Signals) -> None:
        """Read the clock of process 0, and signals to any process. With a time budget, plan the end again: after every step on a
        CPU, where the host is never ahead of the device, and once in a while on a GPU."""
        device, horizon = self.update.execution.device, self.horizon
        is_read = horizon.budget and (device.type == "cpu" or horizon.is_reading_due(self.step))
        if is_read and not self.update.paused and device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        times = self.training_seconds, now - self.logged, now - self.saved, self.update.paused
        seconds, self.unlogged, self.unsaved, paused = self.ranks.hear(signals, *times)
        if horizon.budget and paused:
            horizon.begin(self.step, seconds)
        elif is_read:
            horizon.read(self.step, seconds)

    @contextmanager
    def paused_for(self, purpose: str) -> Iterator[None]:
        """A context whose time counts neither as training nor for the speed. It first waits for the device, whose work is training."""
        if self.update.execution.device.type == "cuda":
            torch.cuda.synchronize()
        before = time.monotonic()
        yield
        seconds = time.monotonic() - before
        self.pauses[purpose] += seconds
        self.logged += seconds

    def seconds_left(self) -> float:
        if self.horizon.budget:
            return max(0.0, self.horizon.budget - self.training_seconds)
        per_step = (time.monotonic() - self.started - self.compiling) / max(1, self.step - self.first_step)
        return (self.planned_steps - self.step) * per_step

    def count(self, sums: Sums, paused: float) -> None:
        """Count a finished step. One with `paused` seconds of compiling is left out of the speed."""
        tokens = sums.pop("tokens")
        add_sums(self.sums, sums)
        if paused:
            self.logged += paused
            self.compiling += paused
            self.pauses["compile"] += paused
            self.tokens_before += int(tokens.item())
        else:
            self.tokens += tokens
        self.step += 1

    def is_log_due(self) -> bool:
        """Every `log_every` steps; with a time budget more often if steps are slow for it."""
        is_late = LINES_OF_BUDGET * self.unlogged > self.horizon.budget > 0
        return self.step % self.settings.log_every == 0 or self.is_last or is_late

    def log_metrics(self, norm: Tensor, fraction: float, schedule: ScheduleSettings) -> dict[str, float]:
        """Log and return the metrics since the last call, and warn about them if needed."""
        objective, now = self.update.objective, time.monotonic()
        count, self.sums = self.tokens.item(), self.total_sums()
        speed = count / (now - self.logged) if count else math.nan
        self.tokens_before += int(count)
        metrics = summarise(self.sums, objective.extra_metrics) | {
            "loss": (self.sums["total"] / self.sums["parts"]).item(),
            "lr": fraction * self.update.groups[0].adam.lr,
            "gradient_norm": norm.item(),
            "tokens_per_second": speed,
            "tokens": float(self.tokens_before),
            "seconds": self.seconds,
            "training_seconds": self.training_seconds,
        }
        corruptor = objective.corruptor
        if isinstance(corruptor, Corruptor) and corruptor.sampling.start_temperature != corruptor.sampling.temperature:
            metrics["temperature"] = float(corruptor.sampling.temperature_at(self.horizon.progress(self.step - 1)))
        if self.run.peak_speed:
            metrics["mfu"] = speed / self.run.peak_speed
        if self.tokens.device.type == "cuda":
            metrics["gpu_memory"] = float(torch.cuda.max_memory_allocated())
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"])):
            raise common(self.diverged())
        self.log.write("train", self.step, metrics)
        self.watch.add(self.step, metrics)
        progress = self.horizon.progress(self.step)
        warnings = alarms(self.watch, progress, objective.muted_alarms, self.alarmed)
        if self.horizon.budget and progress > SURE and (warning := schedule_warning(schedule, self.planned_steps)):
            warnings["warm-up"] = warning
        self.warn(warnings)
        self.sums, self.logged = {}, now
        self.tokens.zero_()
        return metrics

    def warn(self, warnings: Mapping[str, str]) -> None:
        """Log each alarm, once in a run."""
        for alarm, text in warnings.items():
            if alarm not in self.alarmed:
                self.alarmed.add(alarm)
                log.warning(text)
                self.log.write("alarm", self.step, {"alarm": alarm, "text": text})

    def evaluate_if_due(self, progress: Progress) -> None:
        kind = self.evaluation.kind
        if not self.evaluation.is_due(self.step, self.is_last) or self.log.last(kind).get("step") == self.step:
            return
        with self.paused_for("evaluate"):
            try:
                metrics = self.evaluation.measure(self.step, self.log.of_kind(kind))
            except RuntimeError as error:  # graphs may hold the memory that evaluation needs
                is_alone = self.ranks.world == 1  # other processes would not measure again
                if not (is_alone and self.update.captured.graphs and is_out_of_memory(error)):
                    raise
                self.update.captured.forget()
                metrics = self.evaluation.measure(self.step, self.log.of_kind(kind))
            if metrics:
                log.info("%s %s", progress.place, self.evaluation.describe(metrics))
                self.log.write(kind, self.step, metrics)
                self.warn(by_heart(self.watch.parts[-1][1], metrics))
                self.is_enough = self.evaluation.is_enough(self.log.of_kind(kind))
            self.update.objective.train()

    def is_save_due(self) -> bool:
        if self.is_last:
            return self.run.keeps_last
        is_late = self.unsaved > self.settings.save_minutes * 60
        is_kept = self.settings.keep_every > 0 and self.step % self.settings.keep_every == 0
        return is_late or is_kept or self.step % self.settings.save_every == 0

    def save(self) -> None:
        """Save a checkpoint, but never weights that are not finite: earlier checkpoints are the way back."""
        with self.paused_for("save"):
            self.require_finite()
            totals, groups = self.total_sums(), whole_groups(self.tensors, self.ranks)
            self.ranks.first(lambda: self.write(groups | {"sums": totals}))
            self.sums = self.own_sums(totals)
        self.saved = time.monotonic()

    def write(self, groups: Groups) -> None:
        if self.evaluation.kept:
            groups["kept"] = self.evaluation.kept
        planned = self.planned_steps if math.isfinite(self.horizon.steps) else 0
        clock = {"seconds": self.seconds, "pauses": self.pauses, "planned_steps": planned}
        state = {**clock, "tokens": self.tokens_before + int(self.tokens.item()), **self.run.fingerprint}
        checkpoint.save_checkpoint(self.run.checkpoints, self.step, groups, state)
        checkpoint.prune(self.run.checkpoints, self.settings.keep, self.settings.keep_every)
        self.log.state("running", self.step, resume=self.run.resume_command)

    def require_finite(self) -> None:
        is_finite = all(torch.isfinite(own(parameter)).all() for parameter in self.update.objective.parameters())
        if not all(self.ranks.gather(is_finite)):
            raise common(self.diverged())

    def diverged(self) -> DivergedError:
        last = checkpoint.checkpoint_folders(self.run.checkpoints)
        return DivergedError(
            f"the loss is not finite at step {self.step}. Nothing after {last[-1].name if last else 'the start'} was "
            f"saved. {self.run.when_diverged}"
        )

    @contextmanager
    def told_to_outsiders(self) -> Iterator[None]:
        """Keep run_state.json up to date: that the run is running, the step it resumes at, and how it ended."""
        self.log.state("running", self.step, resume=self.run.resume_command)
        try:
            yield
            seconds = {"train": self.log.last("train").get("training_seconds", 0.0), **self.pauses}
            self.log.state("finished", self.step, tokens=self.tokens_before, seconds=seconds)
        except BaseException as error:
            state = STATES.get(getattr(error, "exit_code", 1), "failed")
            reason = first_line(error) or type(error).__name__
            with suppress(OSError):
                self.log.state(state, self.step, reason=reason, resume=self.run.resume_command)
            if isinstance(error, PeerError) and not is_said(error):
                self.log.fail_for_writer(reason)
            raise
        finally:
            with suppress(OSError):
                self.log.close()


@dataclass
class HeldOutEvaluation:
    """Pre-training's evaluation: the objective's metrics over held-out rows, without dropout. `from_start`: also before the first
    step, for weights that are not random. `keep_samples`: process 0 calls it with the step after each evaluation."""

    update: Step
    rows: Iterable[Batch]
    settings: TrainSettings
    signals: Signals
    keep_samples: Callable[[int], None]
    from_start: bool = False
    kind: str = "heldout"
    kept: dict[str, Tensor] = field(default_factory=dict)

    def is_due(self, step: int, is_last: bool) -> bool:
        return self.from_start if step == 0 else step % self.settings.evaluate_every == 0 or is_last

    def measure(self, step: int, earlier: Sequence[Record]) -> dict[str, float]:
        objective, execution = self.update.objective, self.update.execution
        objective.eval()
        ranks = execution.ranks
        own = islice(self.rows, ranks.rank, None, ranks.world)
        rows = takewhile(lambda batch: self.signals.received is None, own)
        how = execution.device, execution.precision, self.update.with_kernels
        with gathered(objective):
            sums = sums_over(rows, lambda batch: objective(batch).sums, *how)

        # over all processes: some may have had no rows, and one may have received a signal
        ranks.hear(self.signals)
        totals = Sums()
        for part in ranks.gather({name: value.cpu() for name, value in sums.items()}):
            add_sums(totals, part)
        if not totals or self.signals.agreed:
            return {}
        if ranks.is_first:
            self.keep_samples(step)
        return summarise(totals, objective.extra_metrics)

    def describe(self, metrics: Mapping[str, float]) -> str:
        return f"held-out: {metrics_text(metrics, self.update.objective.headline)}"

    def is_enough(self, records: Sequence[Record]) -> bool:
        return False


def checkpoint_groups(objective: Trainable, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The live tensors that a checkpoint saves, by file."""
    return {"model": dict(objective.named_parameters()), "optimizer": optimizer_tensors(optimizer, objective)}


def sums_over(
    batches: Iterable[Batch],
    score: Callable[[Batch], Sums],
    device: torch.device,
    precision: Precision,
    with_kernels: bool,
) -> Sums:
    """The sums of `score` over all batches."""
    sums: Sums = {}
    with inference(precision, device, with_kernels):
        for batch in batches:
            add_sums(sums, score(batch.to(device)))
    return sums


def add_sums(totals: Sums, more: Mapping[str, Tensor]) -> None:
    """Add `more` to `totals`. The tensors of `more` are copied, so they may be overwritten afterwards."""
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value.clone()
