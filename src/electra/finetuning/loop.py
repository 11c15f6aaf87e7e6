"""One (task, seed): train, score, predict. It knows examples and a `Task`, and neither tables nor folders."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.errors import DivergedError
from electra.base.progress import Progress, metrics_text
from electra.base.randomness import mix
from electra.data.tables import Row
from electra.finetuning import Example, Outputs, Task
from electra.finetuning.features import collate, lengths_of, sorted_order, to_device, training_batches
from electra.finetuning.method import MethodSettings
from electra.finetuning.optimise import build_layerwise
from electra.finetuning.step import Step
from electra.model import Encoder
from electra.train.device import autocast, choose_device, kernel_remark
from electra.train.optimizers import Rates
from electra.train.settings import ScheduleSettings, learning_rate

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class Finetuned(nn.Module):
    """An encoder with a task's head."""

    def __init__(self, encoder: Encoder, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head
        self.first_only = bool(getattr(head, "reads_first_only", False))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        is_real = batch.is_real if batch.padded else None
        hidden = self.encoder(batch.ids, batch.segments, is_real, self.first_only)
        return self.head(hidden, batch)


@dataclass(frozen=True)
class Dev:
    """Rows whose answers are known, and their examples."""

    rows: Sequence[Row]
    examples: Sequence[Example]


@dataclass
class History:
    """What one run leaves: a score for each evaluation, and how long it took with and without those."""

    steps: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    best_step: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    stopped_early: bool = False


def total_steps(examples: int, batch: int, epochs: int) -> int:
    return math.ceil(examples / batch) * epochs


def train_task(
    task: Task,
    model: Finetuned,
    examples: Sequence[Example],
    dev: Dev,
    method: MethodSettings,
    epochs: int,
    seed: int,
    pad: int,
    title: str,
    should_stop: Callable[[], Exception | None] = lambda: None,
) -> History:
    """Trains `model` in place. Nothing in the inner loop asks the device for a number; the loss is read when a line is due."""
    device = choose_device(method)
    model.to(device).train()
    optimizer = build_layerwise(
        model,
        model.encoder.settings.layers,
        method.lr,
        method.layer_decay,
        method.layer_decay_kind,
        method.betas,
        method.eps,
        method.weight_decay,
        method.bias_correction,
    )
    steps = total_steps(len(examples), method.batch, epochs)
    schedule = ScheduleSettings(kind=method.schedule, warmup=int(method.warmup * steps))
    score_at = {math.ceil(steps * part / method.evaluations) for part in range(1, method.evaluations + 1)}
    history = History(steps=steps)
    best: tuple[float, dict[str, Tensor]] | None = None
    since_best, seen, tokens = 0, 0, 0
    loss_sum = torch.zeros((), device=device)
    started = line_at = time.monotonic()
    paused = 0.0

    rates = Rates(optimizer, device)
    record = method.record and device.type == "cuda"
    update = Step(model, task, optimizer, method.clip, lambda: autocast(method, device), record, log.info)
    if remark := kernel_remark(device):
        log.info(remark)
    progress = Progress(title, steps)
    with progress:
        batches = training_batches(task, examples, pad, method.batch, epochs, seed, device)
        for step, batch in enumerate(batches):
            rates.set(learning_rate(schedule, 1.0, step, steps))
            torch.manual_seed(mix(seed, "dropout", step))
            loss_sum += update(batch)
            seen += 1
            tokens += batch.ids.numel()
            done = step + 1
            progress.advance(done)

            now = time.monotonic()
            if now - line_at >= SECONDS_BETWEEN_LINES or done in score_at:
                mean = loss_sum.item() / seen
                if not math.isfinite(mean):
                    raise diverged(done)
                working = now - started - paused
                figures = {"loss": mean, "tokens_per_second": tokens / max(1e-9, working)}
                progress.report(metrics_text(figures, figures), working / done * (steps - done))
                history.losses.append((done, mean))
                loss_sum.zero_()
                seen, line_at = 0, now
            if done in score_at:
                before = time.monotonic()
                scores = score(task, model, dev, method, pad)
                history.curve.append({"step": done, **scores})
                headline, value = next(iter(scores.items()))
                log.info(f"{progress.place} dev {headline} {value:.4f}")
                if best is None or value > best[0]:
                    weights = model.state_dict() if method.keep == "best" else {}
                    best = (value, {name: tensor.detach().cpu().clone() for name, tensor in weights.items()})
                    history.best_step, since_best = done, 0
                else:
                    since_best += 1
                paused += time.monotonic() - before
                if method.patience and since_best >= method.patience:
                    history.stopped_early = done < steps
                    break
            if error := should_stop():
                raise error
    if method.keep == "best" and best is not None:
        model.load_state_dict(best[1])
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        raise diverged(steps)
    history.seconds = time.monotonic() - started
    history.training_seconds = history.seconds - paused
    model.eval()
    return history


def diverged(step: int) -> DivergedError:
    return DivergedError(f"the loss is not finite at step {step}. Use a lower lr, or a longer warmup.")


def infer(
    model: Finetuned,
    task: Task,
    examples: Sequence[Example],
    method: MethodSettings,
    pad: int,
    batch: int = 0,
) -> list[Outputs]:
    """What the head says of every example, in their order. The answers come from the device once a group of batches."""
    device = choose_device(method)
    model.to(device).eval()
    found: list[Outputs] = [{} for _ in examples]
    waiting: list[tuple[np.ndarray, dict[str, Tensor]]] = []

    def collect() -> None:
        for chosen, outputs in waiting:
            arrays = {name: tensor.float().cpu().numpy() for name, tensor in outputs.items()}
            for place, index in enumerate(chosen):
                found[index] = {name: array[place] for name, array in arrays.items()}
        waiting.clear()

    with torch.inference_mode(), autocast(method, device):
        for chosen in sorted_order(lengths_of(examples), batch or 2 * method.batch):
            rows = collate(task, [examples[index] for index in chosen], pad, with_targets=False)
            waiting.append((chosen, model(to_device(rows, device))))
            if len(waiting) == 64:
                collect()
        collect()
    return found


def score(task: Task, model: Finetuned, dev: Dev, method: MethodSettings, pad: int) -> dict[str, float]:
    outputs = infer(model, task, dev.examples, method, pad)
    model.train()
    return task.scores(dev.rows, task.predict(dev.rows, dev.examples, outputs))
