"""A step that several processes compute together: each has its rows of every part of the batch, and all learn the same.

What one process computes, N compute: denominators are those of the whole part (`over_ranks` in the losses), gradients and the
sums of metrics are added up, and on a processor dropout is drawn for the whole part and each takes its rows. On a GPU every
process has a stream of dropout of its own.

Gradients are added up in buckets after the last part, not while the backward pass runs: a compiled backward pass hands over
all of them at its end, and one plain sequence can be captured in a CUDA graph.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from electra.base.ranks import Ranks
from electra.objectives.losses import Sums

BUCKET = 64 << 20  # bytes


class OwnRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random numbers of dropout as one process would draw them for the rows of all; this one's are kept."""

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
    """Around a forward pass over this process's rows."""
    shares_dropout = ranks.world > 1 and device.type == "cpu"
    with ranks.adding_up(), OwnRows(ranks) if shares_dropout else nullcontext():
        yield


def add_up_gradients(parameters: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Every process has the sum of all gradients afterwards, the same bits."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    waiting = []
    for bucket in buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket]).to(dtype)
        waiting.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
    for bucket, flat, work in waiting:
        assert work is not None
        work.wait()
        pieces = flat.split([gradient.numel() for gradient in bucket])  # type: ignore[no-untyped-call]
        torch._foreach_copy_(bucket, [piece.view_as(own) for piece, own in zip(pieces, bucket, strict=True)])


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def add_up_scalars(sums: Sums) -> Sums:
    """One message for all numbers, exact for counts. Histograms, which are long, are added up when somebody reads them."""
    names = [name for name, value in sums.items() if value.ndim == 0]
    packed = torch.stack([sums[name].double() for name in names])
    dist.all_reduce(packed)
    return sums | {name: total.to(sums[name].dtype) for name, total in zip(names, packed.unbind(), strict=True)}
