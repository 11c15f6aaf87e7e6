"""One update: forward, backward, clip, step. On a GPU it is recorded once for each shape of batch and then replayed: batches
are grouped by length, so there are a few dozen."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn, optim

from electra.finetuning.task import Inputs, Task
from electra.train.cuda_graph import Recorder, Tensors
from electra.train.signals import is_out_of_memory

TARGET = "target: "


class Step:
    """`step(inputs)` trains on a batch and returns its loss, detached, which the next step overwrites."""

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
        self.clip, self.precision = clip, precision
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        device = self.parameters[0].device
        self.recorder: Recorder[Tensor] = Recorder(self.update, device, record, say, optimizer.zero_grad)

    def __call__(self, inputs: Inputs) -> Tensor:
        tensors = tensors_of(inputs)
        try:
            return self.recorder(tensors)
        except RuntimeError as error:
            if not (self.recorder.recording and is_out_of_memory(error)):
                raise
        self.recorder.give_up("out of memory")
        torch.cuda.empty_cache()
        return self.recorder(tensors)

    def update(self, tensors: Tensors) -> Tensor:
        inputs = inputs_of(tensors)
        with self.precision():
            loss = self.task.loss(self.model(inputs), inputs.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def tensors_of(inputs: Inputs) -> Tensors:
    named = {"ids": inputs.ids, "segments": inputs.segments}
    if inputs.is_real is not None:
        named["is_real"] = inputs.is_real
    return named | {TARGET + name: tensor for name, tensor in inputs.targets.items()}


def inputs_of(tensors: Tensors) -> Inputs:
    targets = {
        name.removeprefix(TARGET): tensor for name, tensor in tensors.items() if name.startswith(TARGET)
    }
    return Inputs(tensors["ids"], tensors["segments"], tensors.get("is_real"), targets)
