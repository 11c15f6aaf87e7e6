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
    """`captured(function, batch)` computes `function(batch)` by a graph, or returns None if the caller has to run it uncaptured:
    at the first batch of a shape (which compiles what is compiled at first use), and where nothing can be captured. The second
    batch of a shape is captured. All graphs share one memory pool, because no two run at a time.

    If a capture fails (the function reads a value from the device, or memory is short), capturing is given up for good, which is
    logged once. Capturing computes nothing, so a failed one can only have changed Python objects; `undo` restores them. The
    function is not kept: its owner holds this object, and the garbage collector, which frees such a cycle at any time, might
    free it while another graph is captured. CUDA does not allow that."""

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
        """Whether a call with such a batch takes only the time of a step, without compiling or capturing."""
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
        gc.freeze()  # torch collects garbage before a capture, and would go through all objects each time
        try:
            torch.cuda.synchronize()
            # other threads, which prepare batches, may use the device meanwhile
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                result = function(fixed)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a failed capture may leave its own stream current,
            random.graphsafe_set_state(random_before)  # and the random generator in its capture mode
            self.undo()
            self.enabled = False
            reason = first_line(error.__context__ or error)  # the cause, not the error that the capture ended
            log.info("the step cannot be captured as a CUDA graph, so it is slower: %s", reason)
        else:
            self.graphs[key] = Graph(graph, inputs, result)
        finally:
            gc.unfreeze()
        if not self.enabled:
            self.forget()

    def forget(self) -> None:
        """Free the memory of all graphs. Every shape starts again as a new one."""
        self.graphs.clear()
        self.seen.clear()
        self.pool = None
        free_memory()


def inputs_of(batch: Batch) -> list[Tensor]:
    """The tensors that change from step to step. Progress must be one of them: a graph would freeze a number."""
    assert isinstance(batch.progress, Tensor)
    return [*batch.tensors(), batch.progress]


def key_of(batch: Batch) -> Key:
    return batch.seed, batch.task, batch.padded, *((tuple(tensor.shape), tensor.dtype) for tensor in batch.tensors())
