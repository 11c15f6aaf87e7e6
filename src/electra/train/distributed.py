"""A step that several processes compute together: each has its rows of every part of the batch, and all make the same update.

N processes compute what one would: denominators are those of the whole part (`over_ranks` in the losses), gradients and the
sums of metrics are added up, and on a CPU dropout is drawn for the whole part and each process takes its rows. On a GPU every
process has its own stream of random numbers for dropout.

Gradients are added up in buckets after the last part, not during the backward pass: a compiled backward pass hands over
all of them at its end, and one plain sequence can be captured in a CUDA graph.
"""

import logging
import os
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from electra.base.errors import (
    ElectraError,
    InterruptedRunError,
    MachineError,
    PreemptedError,
    already_said,
    error_of,
    is_said,
)
from electra.base.jobs import cpu_count
from electra.base.ranks import Ranks
from electra.objectives import Trainable
from electra.objectives.losses import Sums
from electra.train.log import is_gone, say_failed
from electra.train.settings import TrainSettings

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

log = logging.getLogger(__name__)
KILLED = "the processes did not stop by themselves and were killed: what came after the newest checkpoint is lost."
BUCKET = 64 << 20  # bytes


class OwnRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws dropout's random numbers for the rows of all processes, as one process would, and keeps those of its own rows."""

    def __init__(self, ranks: Ranks):
        super().__init__()  # type: ignore[no-untyped-call]
        self.ranks = ranks

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.bernoulli_.float:
            own, share = args
            whole = own.new_empty((self.ranks.world * len(own), *own.shape[1:])).bernoulli_(share)
            return own.copy_(whole.chunk(self.ranks.world)[self.ranks.rank])
        return function(*args, **(kwargs or {}))


@contextmanager
def with_others(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """A context for a forward pass over this process's rows: counts, and on a CPU dropout, are those of all processes."""
    shares_dropout = ranks.world > 1 and device.type == "cpu"
    with ranks.adding_up(), OwnRows(ranks) if shares_dropout else nullcontext():
        yield


def add_up_gradients(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """All-reduce the gradients: every process then has their sum, bit for bit the same. They are copied once, into the message,
    and stay there."""
    for bucket in buckets(parameter for parameter in parameters if parameter.grad is not None):
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        message = torch.empty(sum(map(space_of, bucket)), dtype=dtype, device=bucket[0].device)
        torch._foreach_copy_(cut_like(message, bucket), gradients)
        dist.all_reduce(message)
        for parameter, total in zip(bucket, cut_like(message.to(gradients[0].dtype), bucket), strict=True):
            parameter.grad = total


def buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket


def space_of(tensor: Tensor) -> int:
    """The elements that a tensor takes in a message, rounded up to 8: kernels read 16 aligned bytes at a time."""
    return -(-tensor.numel() // 8) * 8


def cut_like(message: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    pieces = message.split([space_of(tensor) for tensor in tensors])  # type: ignore[no-untyped-call]
    return [piece[: own.numel()].view_as(own) for piece, own in zip(pieces, tensors, strict=True)]


def add_up_scalars(sums: Sums) -> Sums:
    """All-reduce the scalars in one message, exact for counts. Histograms, which are long, are added up when somebody reads them."""
    names: dict[torch.dtype, list[str]] = {}
    for name, value in sums.items():
        if value.ndim == 0:
            names.setdefault(value.dtype, []).append(name)
    packed = torch.cat([torch.stack([sums[name] for name in alike]).double() for alike in names.values()])
    dist.all_reduce(packed)
    parts = packed.split([len(alike) for alike in names.values()])  # type: ignore[no-untyped-call]
    totals = [total for dtype, part in zip(names, parts, strict=True) for total in part.to(dtype).unbind()]
    return sums | dict(zip(chain.from_iterable(names.values()), totals, strict=True))


# Sharded weights (FSDP2). Every process keeps its piece of each tensor and of the optimizer's state for it.


def shard(objective: Trainable, ranks: Ranks, device: torch.device, reduce: torch.dtype) -> None:
    """Shard an objective. All weights are gathered for a step and freed after it: encoders fit as a whole, so what is saved is the
    memory of weights, gradients and optimizer state between steps. Gradients are added up in `reduce`, also over the parts of a batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    assert isinstance(objective, nn.Module)
    mesh, precision = init_device_mesh(device.type, (ranks.world,)), MixedPrecisionPolicy(reduce_dtype=reduce)
    fully_shard(objective, mesh=mesh, reshard_after_forward=False, mp_policy=precision)
    assert is_sharded(objective)
    objective.set_gradient_divide_factor(1.0)  # gradients are added up; the losses have divided already
    objective.set_force_sum_reduction_for_comms(True)  # gloo has no other


def is_piece(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is sharded (a DTensor). Without importing that class, which takes a second: if it is not imported, none is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(objective: object) -> "TypeGuard[FSDPModule]":
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(objective, module.FSDPModule)


@contextmanager
def gathered(objective: Trainable) -> Iterator[None]:
    """A context in which every process has the whole weights."""
    if is_sharded(objective):
        objective.unshard()
    yield
    if is_sharded(objective):
        objective.reshard()


def add_up_at(objective: Trainable, is_last: bool) -> None:
    """For a sharded objective: add up gradients over the processes only in the backward pass of the last part."""
    if is_sharded(objective):
        objective.set_requires_gradient_sync(is_last)


def own(tensor: Tensor) -> Tensor:
    """This process's piece of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if is_piece(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, for which all processes must call this; any other tensor as it is."""
    return tensor.full_tensor() if is_piece(tensor) else tensor


def piece_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's piece of `tensor`, which every process has as a whole, cut as `like` is."""
    if not is_piece(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).to_local()


Groups = dict[str, dict[str, Tensor]]


def whole_groups(groups: Groups, ranks: Ranks) -> Groups:
    """The whole tensors for a checkpoint, in process 0; the others get empty groups."""
    wholes: Groups = {group: {} for group in groups}
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            value = whole(tensor.detach())
            if ranks.is_first:
                wholes[group][name] = value if value is tensor else value.cpu()
    return wholes


def spread(groups: Groups, wholes: Groups, ranks: Ranks) -> None:
    """Give every process what process 0 has in `wholes`: the whole tensor, or its piece of a sharded one."""
    for group, tensors in groups.items() if ranks.together else ():
        for name, tensor in tensors.items():
            if is_piece(tensor):
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=own(tensor).device)
                if ranks.is_first:
                    value.copy_(wholes[group][name])
                dist.broadcast(value, 0)
                own(tensor.detach()).copy_(piece_like(value, tensor))
            else:
                dist.broadcast(tensor.detach(), 0)


# Starting the processes on this machine with torchrun's own launcher


def launch(words: Sequence[str], settings: TrainSettings, folder: Path) -> None:
    """Run `electra words…` in `settings.processes` processes; `folder` is the run's. If one is killed or its machine fails, all start
    again, at most `settings.restarts` times. torchrun's own restarts would also restart a run that was stopped or refused."""
    for restart in range(settings.restarts + 1):
        try:
            return launch_once(words, settings)
        except ElectraError as error:
            if say_failed(folder, KILLED, is_gone):
                log.warning(KILLED)
            if not isinstance(error, MachineError) or restart == settings.restarts:
                raise
            if not is_said(error):
                log.warning("%s", error)
            log.warning("restarting all processes (restart %d of %d).", restart + 1, settings.restarts)


def launch_once(words: Sequence[str], settings: TrainSettings) -> None:
    """The processes log their own errors; the one raised here has the exit code of the first that failed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    loggers = "torch.distributed", "torch.distributed.elastic.agent.server.api"  # the second has a level of its own
    for name in loggers:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # our processes report it in one line
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_count() // settings.processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",  # the machine's own name may not resolve
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "electra", *words)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:
            raise already_said(error_of(failure.exitcode)(f"process {rank} failed.")) from None
        name = failure.signal_name()
        why = f"{name}, usually because memory ran out" if name == "SIGKILL" else name
        raise MachineError(
            f"process {rank} of {settings.processes} was killed ({why}). The same command resumes from the newest checkpoint."
        ) from None
    except SignalException as stopped:
        kind = InterruptedRunError if stopped.sigval.name == "SIGINT" else PreemptedError
        raise already_said(kind("stopped.")) from None
