"""One update: forward and backward for each part of the batch, clip, optimizer. Nothing in it reads a value from the device.

In pre-training on a GPU the objective is compiled, and the whole update, optimizer included, is one CUDA graph; fine-tuning,
whose batches have many shapes, is captured but not compiled. A machine that cannot do one of these trains without it, and one
message says so.
"""

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim

from electra.base.batch import Batch
from electra.base.errors import ElectraError, MachineError, first_line
from electra.base.randomness import mix
from electra.base.ranks import ALONE, Ranks
from electra.objectives import Trainable
from electra.objectives.losses import Loss, Sums
from electra.train import optimizers
from electra.train.cuda_graph import CapturedFunction
from electra.train.device import (
    Fast,
    Precision,
    autocast,
    choose_backend,
    is_out_of_memory,
    keep_freed_memory,
    kernels,
    sound_attention,
)
from electra.train.distributed import add_up_at, add_up_gradients, add_up_scalars, is_sharded, with_others
from electra.train.settings import TrainSettings

log = logging.getLogger(__name__)
Backend = str | Callable[..., Any]


@dataclass(frozen=True)
class Execution:
    """How an update is computed; up to rounding, none of it changes what is learned. `backend` is torch.compile's, None
    to leave the objective uncompiled; `capture`: as a CUDA graph; `fast`: "off" without our kernels, "on" without falling
    back on anything slower; `ranks`: the processes that compute it together, with gradients added up in `reduce`."""

    device: torch.device
    precision: Precision = "auto"
    accumulate: int = 1
    fast: Fast = "auto"
    backend: Backend | None = None
    capture: bool = False
    ranks: Ranks = ALONE
    reduce: torch.dtype = torch.float32

    @staticmethod
    def of(settings: TrainSettings, device: torch.device, ranks: Ranks = ALONE) -> "Execution":
        """The fastest execution that `settings.fast` allows and the machine can do. An error if the machine cannot do what is set."""
        in_pieces = settings.parallel == "fsdp"
        backend = None if in_pieces else choose_backend(settings.fast, device)
        capture = settings.fast != "off" and device.type == "cuda" and not in_pieces
        reduce = torch.bfloat16 if settings.reduce == "bfloat16" else torch.float32
        return Execution(
            device, settings.precision, settings.accumulate, settings.fast, backend, capture, ranks, reduce
        )


class Step:
    """`step(batch, number, fraction, share)` is update `number` of the run at a fraction of the peak learning rates, and at a `share`
    of the total decay if the optimizer's weight decay is not a number. It returns the objective's sums over the parts with
    "total" (the loss), "parts" and "tokens" (real ones), and the gradient's norm before clipping. The next call overwrites both.

    Dropout is a function of `dropout_seed(number)`. The parts of a batch draw from one random stream, so a run with another
    `accumulate` has other dropout.

    `paused`: the seconds of the last call if it compiled or captured, else 0."""

    def __init__(
        self,
        objective: Trainable,
        optimizer: optim.Optimizer,
        groups: Sequence[optimizers.ParameterGroup],
        execution: Execution,
        dropout_seed: Callable[[int], int],
    ):
        self.objective, self.optimizer, self.groups = objective, optimizer, groups
        self.execution, self.dropout_seed = execution, dropout_seed
        self.rates = optimizers.Rates(optimizer, execution.device)
        self.compiled: Callable[[Batch], Loss] | None = None
        if execution.backend is not None:
            torch.compiler.reset()  # torch compiles a class for eight seeds at most; other objectives in use compile again
            self.compiled = torch.compile(objective, fullgraph=True, dynamic=False, backend=execution.backend)
        self.with_kernels = execution.fast != "off"
        self.captured: CapturedFunction[tuple[Sums, Tensor]] = CapturedFunction(
            execution.device, execution.capture, optimizer.zero_grad
        )
        self.paused = 0.0

    def __call__(self, batch: Batch, number: int, fraction: float, share: float = 0.0) -> tuple[Sums, Tensor]:
        started = time.monotonic()
        self.paused = 0.0
        self.rates.set(fraction, share)
        torch.manual_seed(self.dropout_seed(number))
        if self.compiled is None and not self.captured.enabled:
            return self.apply(self.gradients_or_fallback(batch.to(self.execution.device), number))

        # replay a graph, or run uncaptured if the shape is new or nothing can be captured
        batch = self.staged(batch)
        is_new, is_settled = self.captured.is_new(batch), self.captured.is_settled(batch)
        result = self.captured(lambda inputs: self.apply(self.gradients(inputs)), batch)
        if result is None:
            result = self.apply(self.gradients_or_fallback(batch.to(self.execution.device), number))

        # the time that a new shape takes is left out of the speed
        if not is_settled:
            if self.execution.device.type == "cuda":
                torch.cuda.synchronize()
            self.paused = time.monotonic() - started
            if self.compiled is not None and is_new:
                log.info("compiled the step in %.0f s (cached for the next start)", self.paused)
        sums, norm = result
        return dict(sums), norm

    def staged(self, batch: Batch) -> Batch:
        """The batch with progress as a tensor, because a number would be frozen into compiled code and graphs, and in pinned
        memory, from which copies to a GPU are asynchronous."""
        if self.execution.device.type == "cuda" and not batch.ids.is_cuda:
            batch = batch.pinned()
        if isinstance(batch.progress, Tensor):
            return batch
        progress = torch.full((), batch.progress, dtype=torch.float64, device=self.execution.device)
        return replace(batch, progress=progress)

    def gradients(self, batch: Batch) -> Sums:
        """Put the gradient of the parts' mean loss into `grad`, with several processes over the rows of all. Returns the sums:
        scalars are then those of all processes, histograms those of this one."""
        objective, parts = self.objective if self.compiled is None else self.compiled, self.execution.accumulate
        ranks = self.execution.ranks
        sums: Sums = {}
        for number, part in enumerate(batch.split(parts), 1):
            add_up_at(self.objective, number == parts)
            with kernels(self.with_kernels), sound_attention(part):
                with autocast(self.execution.precision, self.execution.device), with_others(ranks, part.ids.device):
                    loss = objective(part)
                (loss.total / parts).backward()  # type: ignore[no-untyped-call]
            tokens = part.is_real.sum()
            counted = {"total": loss.total.detach(), "parts": torch.ones_like(tokens), "tokens": tokens}
            for name, value in {**loss.sums, **counted}.items():
                sums[name] = sums[name] + value if name in sums else value
        if ranks.together:
            if not is_sharded(self.objective):
                add_up_gradients(self.objective.parameters(), self.execution.reduce)
            sums = add_up_scalars(sums) | {"parts": sums["parts"]}
        return sums

    def apply(self, sums: Sums) -> tuple[Sums, Tensor]:
        """Update the parameters with the gradients that they have."""
        norm = optimizers.clip_gradients(self.groups)
        self.rates.decay()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sums, norm

    def gradients_or_fallback(self, batch: Batch, number: int) -> Sums:
        """Compute the gradients, again without the compiler or the kernels if they fail. A failed attempt has updated nothing, so
        dropping its gradients undoes it."""
        while True:
            try:
                return self.gradients(batch)
            except Exception as error:
                if not self.falls_back(error):
                    raise
            # out here the error no longer keeps alive what the attempt had computed
            self.optimizer.zero_grad()
            self.captured.forget()
            torch.manual_seed(self.dropout_seed(number))

    def falls_back(self, error: Exception) -> bool:
        """Whether another attempt is worthwhile; if so, what failed is switched off. Compilers fail in many ways, some with
        errors of no class of their own. If the fault is ours and not the compiler's, the uncompiled step raises the real error."""
        if is_out_of_memory(error):  # graphs may hold the memory that a new shape needs
            return bool(self.captured.graphs) and self.execution.ranks.world == 1  # other processes would not try again
        if isinstance(error, ElectraError | torch.AcceleratorError):
            return False
        if self.compiled is not None:
            self.compiled = None
            problem, result = "the step cannot be compiled", "it is slower"
        elif self.with_kernels and is_raised_in("triton", error):
            self.with_kernels = False
            problem, result = "custom kernels failed", "the step continues in plain torch and is slower"
        else:
            return False
        inner = getattr(error, "inner_exception", error)
        reason = f"{type(inner).__name__}: {first_line(str(inner).strip())}"
        if self.execution.fast == "on":
            raise MachineError(f"train.fast=on, but {problem}: {reason}. Use train.fast=auto.")
        log.info("%s, so %s: %s", problem, result, reason)
        return True


def build_step(objective: Trainable, settings: optimizers.OptimizerSettings, execution: Execution, seed: int) -> Step:
    """Build pre-training's step; the objective is on its device already. Rows have one length, so what a step frees fits the next."""
    if execution.device.type == "cpu":
        keep_freed_memory()
    groups = optimizers.split_parameters(objective, settings)
    optimizer = optimizers.build_optimizer(objective, groups, settings)
    stream = execution.ranks.rank if execution.device.type == "cuda" else 0
    return Step(objective, optimizer, groups, execution, lambda number: mix(seed, "dropout", number, stream))


def is_raised_in(package: str, error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(package in Path(frame.f_code.co_filename).parts for frame, _ in frames)
