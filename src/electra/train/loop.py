"""The loop. It moves batches to an objective and gradients to an optimizer, and knows neither tokenizers nor
generators: what it trains and what it trains on arrive as arguments."""

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from electra.base.batch import Batch
from electra.base.errors import DivergedError
from electra.base.jobs import Signals
from electra.base.progress import Progress, metrics_text
from electra.objectives import Trainable
from electra.objectives.metrics import alarms, summarise
from electra.train import checkpoint
from electra.train import device as guard
from electra.train.device import autocast, choose_device, kernels
from electra.train.log import RunLog
from electra.train.optimizers import OptimizerSettings, build_optimizer, optimizer_tensors, split_parameters
from electra.train.settings import ScheduleSettings, TrainSettings, learning_rate
from electra.train.step import Step

logger = logging.getLogger(__name__)


class Batches(Protocol):
    def batches(self, first_step: int) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Run:
    """Where a run lives, what must not change under it, and how to go on with it."""

    folder: Path
    fingerprint: dict[str, str]
    resume_command: str

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def train(
    objective: Trainable,
    data: Batches,
    heldout: Iterable[Batch],
    settings: TrainSettings,
    optimizer_settings: OptimizerSettings,
    schedule: ScheduleSettings,
    seed: int,
    run: Run,
    signals: Signals,
    flops_per_token: float = 0.0,
    peak_flops: float = 0.0,
) -> dict[str, float]:
    """Train from the newest checkpoint, or from the beginning, to the last step. Returns the last held-out metrics.
    The caller holds the lock on the run folder and listens for signals.

    Where the model's cost and the device's peak are known (not 0), metrics say which share of the peak is used."""
    device = choose_device(settings)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)
    objective.to(device).train()
    optimizer = build_optimizer(optimizer_settings, objective)
    parts = split_parameters(optimizer_settings, objective)
    update = Step(objective, optimizer, parts, settings, seed, device, logger.info)

    groups = checkpoint_groups(objective, optimizer)
    checkpoint.clean(run.checkpoints)
    found = checkpoint.newest_checkpoint(run.checkpoints, logger.warning)
    step, seconds_before = 0, 0.0
    sums: dict[str, Tensor] = {}
    if found:
        checkpoint.set_aside(run.checkpoints, found.step)
        checkpoint.restore(found, groups)
        step, seconds_before = found.step, found.state["seconds"]
        sums = {name: tensor.to(device) for name, tensor in found.tensors("sums").items()}
        logger.info(f"resuming at step {step} from {found.folder}")
    guard.check_space(run.folder, sum(t.nbytes for tensors in groups.values() for t in tensors.values()))

    log = RunLog(run.folder, step)
    log.state("running", step, resume=run.resume_command)
    history = log.history()
    alarmed = {record.get("alarm") for record in log.records if record["kind"] == "alarm"}
    started = saved = logged = time.monotonic()
    first_step, preparing = step, 0.0
    tokens = torch.zeros((), dtype=torch.long, device=device)

    def save(at: int) -> None:
        nonlocal saved
        require_finite(objective, at, run)
        seconds = seconds_before + time.monotonic() - started
        state = {"seconds": seconds, **run.fingerprint}
        checkpoint.save_checkpoint(run.checkpoints, at, groups | {"sums": sums}, state)
        checkpoint.prune(run.checkpoints, settings.keep, settings.keep_every)
        saved = time.monotonic()

    def evaluate_if_due() -> None:
        """Also asked on resuming: a signal during an evaluation puts it off to the next start."""
        due = step and (step % settings.evaluate_every == 0 or step == settings.steps)
        if due and log.last("heldout").get("step") != step:
            with kernels(update.fast):
                held = evaluate(objective, heldout, settings, device, signals)
            if held and signals.received is None:
                logger.info(f"{progress.place} held-out: {metrics_text(held, shown)}")
                log.write("heldout", step, held)

    shown = (*objective.headline, "tokens_per_second", "mfu")
    progress = Progress("step", settings.steps, step)
    try:
        progress.__enter__()
        evaluate_if_due()
        for batch in data.batches(step):
            share = learning_rate(schedule, 1.0, step, settings.steps)
            found_sums, norm = update(batch, step, share)
            real = found_sums.pop("tokens")
            add_sums(sums, found_sums)
            if update.paused:  # compiling is no part of the speed
                logged, preparing = logged + update.paused, preparing + update.paused
            else:
                tokens += real
            step += 1
            progress.advance(step)

            if step % settings.log_every == 0 or step == settings.steps:
                now = time.monotonic()
                count = tokens.item()
                speed = count / (now - logged) if count else math.nan
                metrics = summarise(sums, objective.extra_metrics) | {
                    "loss": (sums["total"] / sums["parts"]).item(),
                    "lr": share * optimizer_settings.lr,
                    "gradient_norm": norm.item(),
                    "tokens_per_second": speed,
                    "seconds": seconds_before + now - started,
                }
                if flops_per_token and peak_flops:
                    metrics["mfu"] = speed * flops_per_token / peak_flops
                if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"])):
                    raise diverged(step, run)
                eta = (settings.steps - step) * (now - started - preparing) / max(1, step - first_step)
                progress.report(metrics_text(metrics, shown), eta)
                log.write("train", step, metrics)
                history.append(metrics)
                warnings = alarms(history, step / settings.steps, step, objective.muted_alarms)
                for alarm, text in warnings.items():
                    if alarm not in alarmed:
                        alarmed.add(alarm)
                        logger.warning(text)
                        log.write("alarm", step, {"alarm": alarm, "text": text})
                sums, logged = {}, now
                tokens.zero_()

            paused = time.monotonic()
            evaluate_if_due()
            logged += time.monotonic() - paused

            stop = signals.received is not None
            due = step % settings.save_every == 0 or time.monotonic() - saved > settings.save_minutes * 60
            if stop or due or step == settings.steps:
                save(step)
            if stop:
                raise signals.stop(f"stopped at step {step} of {settings.steps}; everything is saved.")
        if signals.received is not None:
            raise signals.stop("stopped during the last evaluation; everything is saved.")
        log.state("finished", step)
        return log.last("heldout")
    except BaseException as error:
        states = {75: "preempted", 130: "interrupted", 6: "diverged"}
        state = states.get(getattr(error, "exit_code", 1), "failed")
        with suppress(OSError):
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            log.state(state, step, reason=reason, resume=run.resume_command)
        raise
    finally:
        progress.__exit__()
        with suppress(OSError):
            log.close()


def checkpoint_groups(objective: Trainable, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The live tensors that a checkpoint holds, by file."""
    return {"model": dict(objective.named_parameters()), "optimizer": optimizer_tensors(optimizer, objective)}


def evaluate(
    objective: Trainable,
    heldout: Iterable[Batch],
    settings: TrainSettings,
    device: torch.device,
    signals: Signals | None = None,
) -> dict[str, float]:
    """Metrics over the held-out rows, without dropout. A signal cuts it short: the checkpoint comes first."""
    sums: dict[str, Tensor] = {}
    objective.eval()
    with torch.no_grad(), autocast(settings, device):
        for batch in heldout:
            add_sums(sums, sums_of(objective, batch.to(device)))
            if signals is not None and signals.received is not None:
                break
    objective.train()
    return summarise(sums, objective.extra_metrics) if sums else {}


def sums_of(objective: Trainable, batch: Batch) -> dict[str, Tensor]:
    """In halves where memory is short: what a recorded step holds is not free for evaluation."""
    try:
        return objective(batch).sums
    except RuntimeError as error:
        if len(batch.ids) == 1 or not guard.is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    sums: dict[str, Tensor] = {}
    for half in batch.split(2):
        add_sums(sums, sums_of(objective, half))
    return sums


def add_sums(totals: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """What is added may be overwritten afterwards."""
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value.clone()


def require_finite(objective: Trainable, step: int, run: Run) -> None:
    """Never save weights that are not finite: the checkpoints before them are the way back."""
    if not all(torch.isfinite(parameter).all() for parameter in objective.parameters()):
        raise diverged(step, run)


def diverged(step: int, run: Run) -> DivergedError:
    last = checkpoint.checkpoint_folders(run.checkpoints)
    return DivergedError(
        f"the loss is not finite at step {step}. Nothing after {last[-1].name if last else 'the start'} was saved. "
        "Start a new run with a lower optimizer.lr or a longer schedule.warmup."
    )
