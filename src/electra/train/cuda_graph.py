"""A function of tensors that is recorded once for each shape and then replayed, where there is a GPU.

A small model's step is a thousand kernels of microseconds, and launching them from Python takes ten times as long as
computing them. A recorded step (a CUDA graph) is one launch. The first call of a shape runs as it is (and compiles what is
compiled at first use), the second is recorded, all later ones are replayed. Same kernels, same random numbers, same result.
"""

import gc
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from electra.train.device import is_out_of_memory

Tensors = dict[str, Tensor]
Key = tuple[Hashable, ...]
Result = TypeVar("Result")


@dataclass
class Recording(Generic[Result]):
    graph: torch.cuda.CUDAGraph
    inputs: Tensors
    result: Result


class Recorder(Generic[Result]):
    """`recorder(tensors, *constants)` is `function(tensors, *constants)` with the tensors on `device`. What it returns is
    overwritten by later calls. There is one recording for each set of shapes and constants; all share their memory, because
    no two run at a time.

    What cannot be recorded (something that asks the host for a number) runs plainly ever after, and is said once. Recording
    computes nothing, so a recording that failed had no effect but on what hangs on Python objects: `undo` takes that
    back. `recording`: whether the last call ended in the middle of one."""

    def __init__(
        self,
        function: Callable[..., Result],
        device: torch.device,
        record: bool,
        say: Callable[[str], None],
        undo: Callable[[], None],
    ):
        self.function, self.device, self.record, self.say, self.undo = function, device, record, say, undo
        self.recordings: dict[Key, Recording[Result]] = {}
        self.seen: set[Key] = set()
        self.recording = False
        self.pool: Any = None

    def __call__(self, tensors: Tensors, *constants: Hashable) -> Result:
        self.recording = False
        key = key_of(tensors, constants)
        if self.record and key in self.seen:
            recording = self.recordings.get(key) or self.try_to_record(key, tensors, constants)
            if recording is not None:
                for name, tensor in tensors.items():
                    recording.inputs[name].copy_(tensor, non_blocking=True)
                recording.graph.replay()
                return recording.result
        moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}
        result = self.function(moved, *constants)
        self.seen.add(key)
        return result

    def is_settled(self, tensors: Tensors, *constants: Hashable) -> bool:
        """Whether a call with these will take the time of a step and no more."""
        key = key_of(tensors, constants)
        return key in (self.recordings if self.record else self.seen)

    def has_seen(self, tensors: Tensors, *constants: Hashable) -> bool:
        return key_of(tensors, constants) in self.seen

    def try_to_record(self, key: Key, tensors: Tensors, constants: Key) -> Recording[Result] | None:
        """Out of memory is no reason to go on without: that is the caller's to decide."""
        fixed = {name: tensor.to(self.device, copy=True) for name, tensor in tensors.items()}
        graph = torch.cuda.CUDAGraph()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        self.recording = True
        stream = torch.cuda.current_stream()
        random = torch.cuda.default_generators[torch.cuda.current_device()]
        random_before = random.clone_state()
        gc.freeze()  # recording collects garbage, and would look at everything each time
        try:
            torch.cuda.synchronize()
            # other threads may use the device meanwhile: they prepare batches
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                result = self.function(fixed, *constants)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a recording that ends badly may leave us on its own,
            random.graphsafe_set_state(random_before)  # and the random numbers still waiting for it
            self.undo()
            if is_out_of_memory(error):
                raise
            self.recording = False
            self.give_up(str(error.__context__ or error))  # what ended the recording, not that it ended
            return None
        finally:
            gc.unfreeze()
        self.recording = False
        self.recordings[key] = Recording(graph, fixed, result)
        return self.recordings[key]

    def give_up(self, reason: str) -> None:
        self.drop()
        self.record = False
        self.say(f"the step cannot be recorded, so it is slower: {reason.splitlines()[0]}")

    def drop(self) -> None:
        """Free the memory of all recordings. What ran once need not run plainly again to be recorded."""
        self.recordings.clear()
        self.pool = None


def key_of(tensors: Tensors, constants: Key) -> Key:
    return *constants, *((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
