"""Processes that work on one run together, as torchrun starts them: who they are, what they agree on, what they add up.

A process alone has the same methods, which then cost nothing. What hosts tell each other goes through gloo; tensors on a GPU
go through NCCL. Process 0 alone reads and writes the run folder. Errors that concern all are raised in all of them, and only
process 0 speaks of those.
"""

import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from electra.base.errors import ElectraError, MachineError, already_said, common, is_common

log = logging.getLogger(__name__)
Result = TypeVar("Result")

PATIENCE = 600.0  # seconds that one process waits for the others
CONNECTING = 30.0  # seconds for connecting to processes that are there; gloo waits five times as long
NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What gloo, NCCL and torch's store say when a process is gone, and when it does not answer.
GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "recvValue failed",
    "remote process exited",
    "communicator was aborted",
)
SILENT = ("Timed out waiting", "timed out", "Timeout", "timeout")
_current: "Ranks | None" = None
_adds_up = False


class PeerError(MachineError):
    """Another process of the run is gone or does not answer."""


@dataclass(frozen=True)
class Ranks:
    """This process (`rank`) among all (`world`); `local` is its number on its machine. `together`: whether there is a group,
    which may be a group of one."""

    rank: int = 0
    world: int = 1
    local: int = 0
    together: bool = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Result) -> list[Result]:
        """The value of every process, in their order."""
        if not self.together:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def first(self, function: Callable[[], Result]) -> Result:
        """What process 0 makes of it, for all; nobody else calls it. It must survive a pickle."""
        if not self.together:
            return function()
        outcome: list[Any] = [attempt(function) if self.is_first else None]
        dist.broadcast_object_list(outcome, 0)
        value, error = outcome[0]
        if error is not None:
            raise common(error)
        return value

    def everyone(self, function: Callable[[], Result]) -> Result:
        """What each makes of it for itself. If it fails in one, it fails in all."""
        if not self.together:
            return function()
        value, error = attempt(function)
        for rank, other in enumerate(self.gather(error)):
            if other is not None:
                raise common(other if rank == 0 else type(other)(f"process {rank} of {self.world}: {other}"))
        return value  # type: ignore[return-value]

    def agree(self, signal: int | None, *values: float) -> tuple[int | None, list[float]]:
        """Any process's signal, and the values of process 0."""
        if not self.together:
            return signal, list(values)
        said = [float(signal or 0), *(values if self.is_first else [-torch.inf] * len(values))]
        agreed = torch.tensor(said, dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        number, *rest = agreed.tolist()
        return int(number) or None, rest

    def total(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums of all processes, each of which has all the names."""
        if not self.together:
            return dict(sums)
        totals = {name: tensor.clone() for name, tensor in sums.items()}
        for name in sorted(totals):
            dist.all_reduce(totals[name])
        return totals

    def wait_at_most(self, seconds: float) -> None:
        """For the hosts' messages. What waits on a GPU waits twice as long, so that a host is the one to say so."""
        if self.together:
            group = dist.group.WORLD
            assert group is not None
            for name, device in (("gloo", "cpu"), ("nccl", "cuda")):
                if name in dist.get_backend_config(group):
                    wait = timedelta(seconds=seconds if name == "gloo" else 2 * seconds)
                    group._get_backend(torch.device(device))._set_default_timeout(wait)

    def device(self, chosen: torch.device) -> torch.device:
        """Of several GPUs, each process its own."""
        if chosen.type != "cuda" or not self.together:
            return chosen
        if self.local >= (count := torch.cuda.device_count()):
            raise MachineError(
                f"process {self.local + 1} of this machine has no GPU: torch sees {count}. Start as many processes as there "
                "are GPUs, or use train.device=cpu."
            )
        torch.cuda.set_device(self.local)
        return torch.device("cuda", self.local)

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """Counts (`over_ranks`) are those of all processes meanwhile."""
        global _adds_up
        before, _adds_up = _adds_up, self.together
        try:
            yield
        finally:
            _adds_up = before


ALONE = Ranks()


def over_ranks(values: Tensor) -> Tensor:
    """The sum over all processes inside `adding_up`; elsewhere the values themselves. No gradient passes."""
    if not _adds_up:
        return values
    total = values.detach().clone()
    dist.all_reduce(total)
    return total


def is_launched() -> bool:
    """Whether torchrun, or whoever sets the same variables, started this process among others."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


@contextmanager
def join() -> Iterator[Ranks]:
    """The processes that torchrun started, once all are there; a process alone where none did. May be nested."""
    global _current
    if _current is not None or not is_launched():
        yield _current or ALONE
        return
    ranks = meet()
    _current = ranks
    level = logging.getLogger("electra").level
    if not ranks.is_first:
        logging.getLogger("electra").setLevel(logging.CRITICAL)
    try:
        with explain_peers(ranks):
            yield ranks
            dist.barrier()  # without it, whoever ends first may take the others down
    except BaseException as error:
        with suppress(RuntimeError):
            if is_common(error):
                dist.barrier()
            else:
                abort_nccl()
        raise
    finally:
        _current = None
        logging.getLogger("electra").setLevel(level)
        dist.destroy_process_group()


def abort_nccl() -> None:
    """A kernel that waits for a process which is gone would wait for ever, and the end of the group with it."""
    group = dist.group.WORLD
    if group is not None and "nccl" in dist.get_backend_config(group):
        nccl = group._get_backend(torch.device("cuda"))
        if isinstance(nccl, dist.ProcessGroupNCCL):
            nccl._set_default_timeout(timedelta(seconds=10))
            nccl.abort()


def meet() -> Ranks:
    if missing := [name for name in NAMES if not os.environ.get(name)]:
        raise MachineError(f"{', '.join(missing)} must be set beside {NAMES[0]} and {NAMES[1]}. Start with torchrun.")
    rank, world = variable("RANK"), variable("WORLD_SIZE")
    if rank >= world:
        raise MachineError(f"RANK={rank}, but WORLD_SIZE={world}: ranks count from 0. Start with torchrun.")
    local = variable("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    patience = variable("ELECTRA_MEET_SECONDS") if "ELECTRA_MEET_SECONDS" in os.environ else PATIENCE
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=patience)))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
            store=meeting_place(store, rank, world, patience),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=min(patience, CONNECTING)),
        )
    except (RuntimeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise MachineError(f"port {where} is in use. Choose another MASTER_PORT.") from None
        raise MachineError(f"process {rank} of {world} did not meet the others at {where}: {reason}") from None
    ranks = Ranks(rank, world, local, together=True)
    ranks.wait_at_most(patience)
    return ranks


def variable(name: str) -> int:
    text = os.environ[name]
    if not re.fullmatch("[0-9]{1,6}", text):
        raise MachineError(
            f"{name}={text[:40]!r} is not a whole number from 0 to 999999. Start with torchrun, or unset it."
        )
    return int(text)


def meeting_place(store: dist.Store, rank: int, world: int, patience: float) -> dist.Store:
    """A part of the store that is new. torchrun keeps the store when it starts processes again, and with it the addresses of those
    that are gone, at which others may wait for ever. Everybody leaves a name, process 0 shows those that it has read, and whoever
    finds its own among them knows that process 0 is of now."""
    name, until = uuid.uuid4().hex, time.monotonic() + patience
    everyone, place = range(world), dist.PrefixStore(name, store)
    named, here = [f"name/{other}" for other in everyone], [f"here/{other}" for other in everyone]
    store.set(named[rank], name)
    while time.monotonic() < until:
        if rank == 0 and store.check(named):
            store.set("names", " ".join([name, *(other.decode() for other in store.multi_get(named))]))
        if store.check(["names"]):
            first, *names = store.get("names").decode().split()
            if name in names:
                place = dist.PrefixStore(first, store)
                place.set(here[rank], "yes")
                if place.check(here):
                    return place
        time.sleep(0.02)
    missing = ", ".join(str(other) for other in everyone if other != rank and not place.check([here[other]]))
    raise RuntimeError(f"process {missing} did not come within {patience:.0f} s")


@contextmanager
def explain_peers(ranks: Ranks) -> Iterator[None]:
    """As one line, from one process: that another is gone or silent. Of process 0 itself that is gone, whoever started it tells."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if any(sign in text for sign in GONE):
            gone = PeerError(
                "another process of this run ended. Its own message says why; what is saved is whole: run the same command again."
            )
            raise gone if ranks.is_first else already_said(gone) from error
        if any(sign in text for sign in SILENT):
            waiting = ranks_that_wait(ranks)
            silent = [f"process {rank}" for rank in range(ranks.world) if rank not in waiting]
            names = ", ".join(silent) or "another process"
            hangs = PeerError(f"{names} did not answer in time: it hangs, or its machine is gone.")
            raise hangs if ranks.rank == waiting[0] else already_said(hangs) from error
        raise


def ranks_that_wait(ranks: Ranks) -> list[int]:
    """Those that notice that others do not answer, this one among them."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"waits/{ranks.rank}", "yes")
    time.sleep(1)
    return [rank for rank in range(ranks.world) if rank == ranks.rank or store.check([f"waits/{rank}"])]


def attempt(function: Callable[[], Result]) -> tuple[Result | None, ElectraError | OSError | None]:
    try:
        return function(), None
    except (ElectraError, OSError) as error:
        return None, error
