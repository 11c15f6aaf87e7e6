"""One update: forward, backward, clip, step. On a GPU it is recorded once for each shape of batch and then replayed.

A small model's step is a thousand kernels of microseconds, and launching them from Python takes ten times as long as
computing them. A recorded step (a CUDA graph) is one launch. Batches are grouped by length, so there are a few dozen
shapes: the first batch of a shape runs as it is, the second is recorded, all later ones are replayed. Same kernels, same
random numbers, same result.
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from electra.finetune.task import Inputs, Task
from electra.train.optim import set_rate

Key = tuple[Any, ...]


class Rates:
    """The learning rate of every group: a share of its peak. On the GPU they are tensors that a recorded step reads, and one
    number a step goes there."""

    def __init__(self, optimizer: optim.Optimizer, device: torch.device):
        self.optimizer = optimizer
        self.share: Tensor | None = None
        if device.type == "cuda":
            self.peaks = torch.tensor([group["peak"] for group in optimizer.param_groups], device=device)
            self.share, self.rates = torch.zeros((), device=device), torch.zeros_like(self.peaks)
            for group, lr in zip(optimizer.param_groups, self.rates.unbind(), strict=True):
                group["lr"], group["capturable"] = lr, True
            # torch warns when such an optimizer steps outside of a recording; ours does at every new shape.
            optimizer._warned_capturable_if_run_uncaptured = True

    def set(self, share: float) -> None:
        if self.share is None:
            set_rate(self.optimizer, share)
        else:
            torch.mul(self.peaks, self.share.fill_(share), out=self.rates)


@dataclass
class Recording:
    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    loss: Tensor


class Step:
    """`step(inputs)` trains on a batch and returns its loss, detached."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: optim.Optimizer,
        clip: float,
        precision: Callable[[], AbstractContextManager[Any]],
        record: bool,
        say: Callable[[str], None],
    ):
        self.model, self.task, self.optimizer = model, task, optimizer
        self.clip, self.precision, self.record, self.say = clip, precision, record, say
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.recordings: dict[Key, Recording | None] = {}
        self.pool: Any = None

    def __call__(self, inputs: Inputs) -> Tensor:
        if not self.record:
            return self.plain(inputs)
        key = shape_key(inputs)
        if key not in self.recordings:
            self.recordings[key] = None
            return self.plain(inputs)
        recording = self.recordings[key] or self.try_to_record(key, inputs)
        if recording is None:
            return self.plain(inputs)
        for fixed, new in zip(tensors_of(recording.inputs), tensors_of(inputs), strict=True):
            fixed.copy_(new, non_blocking=True)
        recording.graph.replay()
        return recording.loss

    def plain(self, inputs: Inputs) -> Tensor:
        with self.precision():
            loss = self.task.loss(self.model(inputs), inputs.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def try_to_record(self, key: Key, inputs: Inputs) -> Recording | None:
        """What cannot be recorded (a head that asks the host for a number) is trained without, and said once."""
        fixed = Inputs(
            inputs.ids.clone(),
            inputs.segments.clone(),
            None if inputs.is_real is None else inputs.is_real.clone(),
            {name: tensor.clone() for name, tensor in inputs.targets.items()},
        )
        graph = torch.cuda.CUDAGraph()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
            gc.freeze()  # recording collects garbage, and would look at every example each time
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self.pool):
                loss = self.plain(fixed)
        except RuntimeError as error:
            self.record = False
            self.say(f"the step cannot be recorded, so it is slower: {str(error).splitlines()[0]}")
            return None
        self.recordings[key] = Recording(graph, fixed, loss)
        return self.recordings[key]


def tensors_of(inputs: Inputs) -> list[Tensor]:
    first = [inputs.ids, inputs.segments, *([] if inputs.is_real is None else [inputs.is_real])]
    return first + list(inputs.targets.values())


def shape_key(inputs: Inputs) -> Key:
    targets = tuple((name, tuple(tensor.shape)) for name, tensor in inputs.targets.items())
    return tuple(inputs.ids.shape), inputs.is_real is None, targets
