"""One update: forward, backward, clip, step. On a GPU it is recorded once for each shape of batch and then replayed: batches
are grouped by length, so there are a few dozen."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn, optim

from electra.base.batch import Batch
from electra.finetuning import Task
from electra.train.cuda_graph import Recorder, Tensors
from electra.train.device import is_out_of_memory


class Step:
    """`step(batch)` trains on a batch and returns its loss, detached, which the next step overwrites."""

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

    def __call__(self, batch: Batch) -> Tensor:
        self.like = batch
        tensors = batch.tensors()
        try:
            return self.recorder(tensors, batch.padded)
        except RuntimeError as error:
            if not (self.recorder.recording and is_out_of_memory(error)):
                raise
        self.recorder.give_up("out of memory")
        torch.cuda.empty_cache()
        return self.recorder(tensors, batch.padded)

    def update(self, tensors: Tensors, padded: bool) -> Tensor:
        batch = replace(self.like, padded=padded).with_tensors(tensors)
        with self.precision():
            loss = self.task.loss(self.model(batch), batch.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
