"""A function of a batch, captured once for each shape as a CUDA graph and then replayed.

A small model's step is a thousand kernels of microseconds, and launching them from Python takes ten times as long as
computing them. A graph is one launch: same kernels, same random numbers, same result. The graphs that torch.compile makes
by itself ("reduce-overhead") would leave gradient clipping and the optimizer outside.
"""

import gc
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from electra.base.batch import Batch
from electra.base.errors import first_line
from electra.train.device import free_memory

log = logging.getLogger(__name__)
Key = tuple[Hashable, ...]
Result = TypeVar("Result")


class Graph(NamedTuple, Generic[Result]):
    """A captured call: it reads `inputs`, and overwrites `result` at each replay."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    result: Result


class CapturedFunction(Generic[Result]):
    """`captured(function, batch)` is `function(batch)` by a graph, or None where the caller has to run it uncaptured: at the
    first batch of a shape (which compiles what is compiled at first use), and where nothing can be captured. The second
    batch of a shape is captured. All graphs share their memory, because no two run at a time.

    What cannot be captured (it asks the host for a number, or memory is short) is given up for good, and that is logged
    once. Capturing computes nothing, so one that failed had no effect but on what hangs on Python objects: `undo` takes
    that back. The function is not kept: its owner holds this object, and what is freed by the garbage collector, at any
    time, might be freed while another graph is captured, which CUDA does not forgive."""

    def __init__(self, device: torch.device, enabled: bool, undo: Callable[[], None]):
        self.device, self.enabled, self.undo = device, enabled, undo
        self.graphs: dict[Key, Graph[Result]] = {}
        self.seen: set[Key] = set()
        self.pool: Any = None  # torch has no public type for it

    def __call__(self, function: Callable[[Batch], Result], batch: Batch) -> Result | None:
        key = key_of(batch)
        if self.enabled and key in self.seen and key not in self.graphs:
            self.capture(function, key, batch)
        self.seen.add(key)
        if key not in self.graphs:
            return None
        graph, inputs, result = self.graphs[key]
        for fixed, tensor in zip(inputs, inputs_of(batch), strict=True):
            fixed.copy_(tensor, non_blocking=True)
        graph.replay()
        return result

    def is_new(self, batch: Batch) -> bool:
        return key_of(batch) not in self.seen

    def is_settled(self, batch: Batch) -> bool:
        """Whether a call with such a batch takes the time of a step and no more."""
        return key_of(batch) in (self.graphs if self.enabled else self.seen)

    def capture(self, function: Callable[[Batch], Result], key: Key, batch: Batch) -> None:
        inputs = [tensor.to(self.device, copy=True) for tensor in inputs_of(batch)]
        fixed = replace(batch.with_tensors(inputs[:-1]), progress=inputs[-1])
        graph = torch.cuda.CUDAGraph()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        random = torch.cuda.default_generators[torch.cuda.current_device()]
        random_before = random.clone_state()
        gc.freeze()  # capturing collects garbage, and would look at everything each time
        try:
            torch.cuda.synchronize()
            # other threads may use the device meanwhile: they prepare batches
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                result = function(fixed)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a capture that ends badly may leave us on its own stream,
            random.graphsafe_set_state(random_before)  # and the random numbers still waiting for it
            self.undo()
            self.enabled = False
            reason = first_line(error.__context__ or error)  # what ended the capture, not that it ended
            log.info("the step cannot be captured as a CUDA graph, so it is slower: %s", reason)
        else:
            self.graphs[key] = Graph(graph, inputs, result)
        finally:
            gc.unfreeze()
        if not self.enabled:
            self.forget()

    def forget(self) -> None:
        """Free the memory of all graphs, and begin again with every shape."""
        self.graphs.clear()
        self.seen.clear()
        self.pool = None
        free_memory()


def inputs_of(batch: Batch) -> list[Tensor]:
    """What changes from step to step. Progress must be a tensor: a graph would freeze a number."""
    assert isinstance(batch.progress, Tensor)
    return [*batch.tensors(), batch.progress]


def key_of(batch: Batch) -> Key:
    return batch.seed, batch.task, batch.padded, *((tuple(tensor.shape), tensor.dtype) for tensor in batch.tensors())
