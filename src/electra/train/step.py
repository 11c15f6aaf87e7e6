"""One update of a pre-training run: forward and backward for each part of the batch, clip, optimizer. Nothing in it asks the
device for a number.

On a GPU the objective is compiled, and the whole update, optimizer included, is one recording (`recorded`). A machine that
cannot do one of these trains without it and is told so once. A batch that does not fit is computed in more parts.
"""

import gc
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from electra.base.batch import TENSORS, Batch
from electra.base.errors import ElectraError, MachineError, MemoryExhaustedError
from electra.base.randomness import mix
from electra.objectives import Trainable
from electra.objectives.losses import Loss, Sums
from electra.train.cuda_graph import Recorder, Tensors
from electra.train.device import autocast, choose_backend, is_out_of_memory, kernels, precision_remark
from electra.train.optimizers import AdamSettings, Rates, clip_gradients
from electra.train.settings import TrainSettings, memory_remedy, next_accumulate

Backend = str | Callable[..., Any] | None


class Step:
    """`step(batch, number, share)` is update `number` of the run at `share` of the peak learning rates. It returns the
    objective's sums over the parts with "total" (the loss), "parts" and "tokens" (real ones), and the gradient's norm
    before clipping. The next call overwrites both.

    Dropout is a function of the seed and `number`: parts go on in the stream that the first one began, so a run split into
    other parts has other dropout.

    `paused`: the seconds that the last call spent on compiling and recording, 0 for all but the first calls. `backend` is
    torch.compile's, by default what `settings.fast` and the machine make possible."""

    def __init__(
        self,
        objective: Trainable,
        optimizer: optim.Optimizer,
        parts: list[tuple[AdamSettings, list[nn.Parameter]]],
        settings: TrainSettings,
        seed: int,
        device: torch.device,
        say: Callable[[str], None],
        backend: Backend = None,
    ):
        self.objective, self.optimizer, self.parts = objective, optimizer, parts
        self.settings, self.seed, self.device, self.say = settings, seed, device, say
        if remark := precision_remark(settings, device):
            say(remark)
        self.fast = settings.fast
        self.accumulate = settings.accumulate
        self.rates = Rates(optimizer, device)
        self.compiled = self.compile(backend or choose_backend(settings.fast, device, say))
        record = settings.fast != "off" and device.type == "cuda"
        self.recorder: Recorder[tuple[Sums, Tensor]] = Recorder(
            self.update_from, device, record, say, self.drop_gradients
        )
        self.paused = 0.0
        self.changed = self.compiling = False

    def compile(self, backend: Backend) -> Callable[[Batch], Loss] | None:
        if backend is None:
            return None
        return torch.compile(self.objective, fullgraph=True, dynamic=False, backend=backend)

    def __call__(self, batch: Batch, number: int, share: float) -> tuple[Sums, Tensor]:
        self.rates.set(share)
        self.paused, started = 0.0, time.monotonic()
        while True:
            try:
                torch.manual_seed(mix(self.seed, "dropout", number, 0))
                with kernels(self.fast):
                    sums, norm = self.attempt(batch, started)
                return dict(sums), norm
            except Exception as error:
                prepare = self.remedy(error, len(batch.ids))
                if prepare is None:
                    raise
            prepare()  # here, where the error no longer holds on to what the attempt had computed

    def attempt(self, batch: Batch, started: float) -> tuple[Sums, Tensor]:
        self.changed = self.compiling = self.recorder.recording = False
        if self.compiled is None and not self.recorder.record:
            return self.update(batch.to(self.device), self.accumulate)
        tensors, constants = self.tensors_of(batch), (batch.seed, batch.padded, self.accumulate)
        if self.recorder.is_settled(tensors, *constants):
            return self.recorder(tensors, *constants)
        self.compiling = self.compiled is not None and not self.recorder.has_seen(tensors, *constants)
        before = time.monotonic()
        result = self.recorder(tensors, *constants)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.paused = time.monotonic() - started
        if self.compiling:
            self.say(f"compiled the step in {time.monotonic() - before:.0f} s (cached for the next start)")
        return result

    def tensors_of(self, batch: Batch) -> Tensors:
        """What changes from step to step. Copies from pinned memory do not wait for the device, nor it for them."""
        tensors = {name: getattr(batch, name) for name in TENSORS}
        if self.device.type == "cuda":
            tensors = {name: t if t.is_cuda else t.pin_memory() for name, t in tensors.items()}
        progress = batch.progress
        if not isinstance(progress, Tensor):
            progress = torch.full((), progress, dtype=torch.float64, device=self.device)
        return tensors | {"progress": progress}

    def update_from(self, tensors: Tensors, seed: int, padded: bool, accumulate: int) -> tuple[Sums, Tensor]:
        return self.update(Batch(**tensors, seed=seed, padded=padded), accumulate)  # type: ignore[arg-type]

    def update(self, batch: Batch, accumulate: int) -> tuple[Sums, Tensor]:
        objective = self.objective if self.compiled is None else self.compiled
        sums: Sums = {}
        for piece in batch.split(accumulate):
            with autocast(self.settings, self.device):
                loss = objective(piece)
            (loss.total / accumulate).backward()
            tokens = piece.is_real.sum()
            counted = {"total": loss.total.detach(), "parts": torch.ones_like(tokens), "tokens": tokens}
            for name, value in {**loss.sums, **counted}.items():
                sums[name] = sums[name] + value if name in sums else value
        norm = clip_gradients(self.parts)
        self.changed = True
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sums, norm

    def remedy(self, error: Exception, rows: int) -> Callable[[], None] | None:
        """What to do before the same batch is tried again. None: nothing helps, or it would be a second update. Compilers
        fail in many ways, some with errors of no class of their own; where the fault is ours and not the compiler's, the
        uncompiled step says so in its own words."""
        if self.changed and not self.recorder.recording:
            return None
        if is_out_of_memory(error):
            return lambda: self.use_less_memory(rows)
        if isinstance(error, ElectraError | torch.AcceleratorError):
            return None
        inner = getattr(error, "inner_exception", error)
        reason = f"{type(inner).__name__}: {next(iter(str(inner).strip().splitlines()), '')}"
        if self.compiling:
            return lambda: self.go_on_uncompiled(reason)
        if self.fast != "off" and is_raised_in("triton", error):
            return lambda: self.go_on_without_kernels(reason)
        return None

    def use_less_memory(self, rows: int) -> None:
        """Recordings keep their memory, so the first batch of a new shape, which is not recorded, may lack it: they are
        dropped and made again. In all other cases the parts of the batch get smaller."""
        self.drop_gradients()
        crowded = bool(self.recorder.recordings) and not self.recorder.recording
        self.recorder.drop()
        if not crowded:
            parts = next_accumulate(rows, self.accumulate)
            if parts is None:
                raise MemoryExhaustedError(f"out of memory. {memory_remedy(rows, self.accumulate)}")
            before, now = rows // self.accumulate, rows // parts
            self.say(f"out of memory with {before} rows at once: going on with {now} (same batch, same data)")
            self.accumulate = parts
            if self.compiled is not None:
                torch.compiler.reset()  # it counts shapes, and refuses after a few
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def go_on_uncompiled(self, reason: str) -> None:
        self.refuse_if_asked(f"the step cannot be compiled: {reason}")
        self.compiled = None
        self.start_over()
        self.say(f"the step cannot be compiled, so it is slower: {reason}")

    def go_on_without_kernels(self, reason: str) -> None:
        self.refuse_if_asked(f"a kernel cannot run: {reason}")
        self.fast = "off"
        self.start_over()
        self.say(f"a kernel cannot run, so the step does without and is slower: {reason}")

    def refuse_if_asked(self, problem: str) -> None:
        if self.settings.fast == "on":
            raise MachineError(f"train.fast=on, but {problem}. Use train.fast=auto.")

    def start_over(self) -> None:
        self.recorder.drop()
        self.recorder.seen.clear()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.changed = False
        self.optimizer.zero_grad()


def is_raised_in(package: str, error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(package in Path(frame.f_code.co_filename).parts for frame, _ in frames)
