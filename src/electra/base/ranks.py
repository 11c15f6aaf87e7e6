"""Processes that train one run together, as torchrun starts them: their ranks, what they agree on, what they add up.

A process alone has the same methods, which then cost nothing. Messages between hosts go through gloo; tensors on a GPU
go through NCCL. Process 0 alone reads and writes the run folder. Errors that concern all are raised in all of them, and only
process 0 reports those; that a process is gone is reported by the first of the others.
"""

import logging
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from electra.base.errors import ElectraError, MachineError, PeerError, PreemptedError, already_said, common, is_common
from electra.base.jobs import Signals, ending_at_signals, interruptible

log = logging.getLogger(__name__)
Result = TypeVar("Result")

PATIENCE = 600.0  # seconds that one process waits for the others
QUIET = 5.0  # seconds of that before it logs that it waits
SETTLING = 1.0  # seconds in which processes that notice a fault hear of each other
CONNECTING = 30.0  # seconds for connecting to processes that are there; gloo waits five times as long
NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The errors of gloo, NCCL and torch's store when a process is gone, and when it does not answer.
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
_board: dist.Store | None = None  # kept here, because the store ends with its last reference
_adds_up = False


@dataclass(frozen=True)
class Ranks:
    """This process (`rank`) among all (`world`); `local` is its number on its machine. `together`: whether there is a process
    group, which may be a group of one. `board`: the address of a store that the last process hosts, for when process 0 is gone."""

    rank: int = 0
    world: int = 1
    local: int = 0
    together: bool = False
    board: tuple[str, int] = "", 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Result) -> list[Result]:
        """The values of all processes, in the order of their ranks."""
        if not self.together:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def first(self, function: Callable[[], Result]) -> Result:
        """The result of `function` in process 0, for all; the others do not call it. The result must be picklable."""
        if not self.together:
            return function()
        outcome: list[Any] = [attempt(function) if self.is_first else None]
        dist.broadcast_object_list(outcome, 0)
        value, error = outcome[0]
        if error is not None:
            raise common(error)
        return value

    def everyone(self, function: Callable[[], Result]) -> Result:
        """Each process's own result of `function`. If it fails in one, it fails in all."""
        if not self.together:
            return function()
        value, error = attempt(function)
        for rank, other in enumerate(self.gather(error)):
            if other is not None:
                raise common(other if rank == 0 else type(other)(f"process {rank} of {self.world}: {other}"))
        return value  # type: ignore[return-value]

    def agree(self, signal: int | None, *values: float) -> tuple[int | None, list[float]]:
        """A signal that any process received, and the values of process 0, the same in all."""
        if not self.together:
            return signal, list(values)
        own = [float(signal or 0), *(values if self.is_first else [-torch.inf] * len(values))]
        agreed = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        number, *rest = agreed.tolist()
        return int(number) or None, rest

    def hear(self, signals: Signals, *values: float) -> list[float]:
        """The values of process 0. A signal that any process received is agreed on by all, which then stop at the same place. One
        that arrives later is heard the next time, or a process would save alone while the others train."""
        agreed, of_first = self.agree(signals.received, *values)
        if agreed:
            signals.received = signals.agreed = agreed
        return of_first

    def total(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums added up over all processes, which must have the same names."""
        if not self.together:
            return dict(sums)
        totals = {name: tensor.clone() for name, tensor in sums.items()}
        for name in sorted(totals):
            dist.all_reduce(totals[name])
        return totals

    def wait_at_most(self, seconds: float) -> None:
        """Set the timeout of messages between hosts. GPUs wait twice as long, so that the timeout is reported by a host."""
        if self.together:
            group = dist.group.WORLD
            assert group is not None
            for name, device in (("gloo", "cpu"), ("nccl", "cuda")):
                if name in dist.get_backend_config(group):
                    wait = timedelta(seconds=seconds if name == "gloo" else 2 * seconds)
                    group._get_backend(torch.device(device))._set_default_timeout(wait)

    def device(self, chosen: torch.device) -> torch.device:
        """The device for this process: with several processes on GPUs, one of its own."""
        if chosen.type != "cuda" or not self.together:
            return chosen
        if self.local >= (count := torch.cuda.device_count()):
            raise MachineError(
                f"process {self.local + 1} on this machine has no GPU: torch sees {count}. Start one process per "
                "GPU, or use train.device=cpu."
            )
        torch.cuda.set_device(self.local)
        return torch.device("cuda", self.local)

    def launcher(self, processes: int) -> list[str]:
        """The words that start `electra` in as many processes as these: torchrun's, unless the setting `processes` does so by itself."""
        if not self.together or self.world == processes > 1:
            return ["electra"]
        here = variable("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else self.world
        nodes, restarts = self.world // max(here, 1), os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        # torchrun does not say at which port its machines met: that of its own store is another
        port = "PORT" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else os.environ["MASTER_PORT"]
        endpoint = f"{os.environ['MASTER_ADDR']}:{port}"
        where = (
            ["--standalone"]
            if nodes < 2
            else ["--nnodes", f"{nodes}", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        )
        again = ["--max-restarts", restarts] if restarts != "0" else []
        return ["torchrun", *where, "--nproc-per-node", f"{here}", *again, "-m", "electra"]

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """A context in which counts (`over_ranks`) are those of all processes."""
        global _adds_up
        before, _adds_up = _adds_up, self.together
        try:
            yield
        finally:
            _adds_up = before


ALONE = Ranks()


def over_ranks(values: Tensor) -> Tensor:
    """The sum over all processes inside `adding_up`; elsewhere the values themselves. The sum has no gradient."""
    if not _adds_up:
        return values
    total = values.detach().clone()
    dist.all_reduce(total)
    return total


def is_launched() -> bool:
    """Whether torchrun, or anything that sets the same variables, started this process among others."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


@contextmanager
def join(patience: Callable[[], float] = lambda: PATIENCE) -> Iterator[Ranks]:
    """Join the processes that torchrun started, and yield them once all are there, waiting at most `patience()` seconds. Without
    torchrun, a process alone. May be nested."""
    global _current, _board
    if _current is not None or not is_launched():
        yield _current or ALONE
        return
    ranks = meet(attempt(patience)[0] or PATIENCE)  # errors in settings are reported when all are there
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
        _current = _board = None
        logging.getLogger("electra").setLevel(level)
        dist.destroy_process_group()


def abort_nccl() -> None:
    """Abort NCCL. A kernel that waits for a process that is gone would wait for ever, and block the end of the group."""
    group = dist.group.WORLD
    if group is not None and "nccl" in dist.get_backend_config(group):
        nccl = group._get_backend(torch.device("cuda"))
        if isinstance(nccl, dist.ProcessGroupNCCL):
            nccl._set_default_timeout(timedelta(seconds=10))
            nccl.abort()


def meet(patience: float) -> Ranks:
    if missing := [name for name in NAMES if not os.environ.get(name)]:
        names = " and ".join(name for name in NAMES[:2] if name in os.environ)
        raise MachineError(f"{', '.join(missing)} must be set with {names}. Start with torchrun, or unset {names}.")
    rank, world = variable("RANK"), variable("WORLD_SIZE")
    if rank >= world:
        raise MachineError(f"RANK={rank}, but WORLD_SIZE={world}: ranks count from 0. Start with torchrun.")
    local = variable("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    meeting = Meeting(rank, world, os.environ["MASTER_ADDR"], variable("MASTER_PORT", 65535), patience)
    try:
        with ending_at_signals(lambda _: PreemptedError("stopped before all processes had connected.")):
            store, board = interruptible(find_others, meeting, seconds=patience + QUIET)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=min(patience, CONNECTING)),
        )
    except ElectraError:
        raise
    except (RuntimeError, ValueError, TimeoutError) as error:
        reason = next(iter(str(error).splitlines()), "no answer")
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise MachineError(f"port {meeting.where} is in use. Choose another MASTER_PORT.") from None
        raise MachineError(
            f"process {rank} of {world} could not connect to the others at {meeting.where}: {reason.rstrip('.')}. Start all processes again, "
            "with another MASTER_PORT if something else is listening on this one."
        ) from None
    ranks = Ranks(rank, world, local, together=True, board=board)
    ranks.wait_at_most(patience)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=stop_without, args=(os.getppid(),), daemon=True).start()
    return ranks


def stop_without(launcher: int) -> None:
    """Stop this process when its launcher is gone: if that was killed, nobody else would stop us."""
    while os.getppid() == launcher:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def variable(name: str, most: int = 999999) -> int:
    text = os.environ[name]
    if not re.fullmatch("[0-9]{1,6}", text) or int(text) > most:
        raise MachineError(
            f"{name}={text[:40]!r} is not a whole number from 0 to {most}. Start with torchrun, or unset it."
        )
    return int(text)


@dataclass
class Meeting:
    """The wait for processes that are not all there yet, at most `seconds`."""

    rank: int
    world: int
    host: str
    port: int
    seconds: float
    begun: float = field(default_factory=time.monotonic)
    is_told: bool = False

    @property
    def where(self) -> str:
        return f"{self.host}:{self.port}"

    def go_on(self, missing: Sequence[int], reason: object = "") -> None:
        """Wait a moment more for the processes `missing`; an error if the time is up, reported only by a caller that names some."""
        names, waited = ", ".join(map(str, missing)), time.monotonic() - self.begun
        if waited > self.seconds:
            late = MachineError(
                f"process {names} of {self.world} did not connect to {self.where} within {self.seconds:g} s (train.timeout)"
                f"{f': {reason}' if reason else ''}. Start all processes, on machines that can reach that address."
            )
            raise late if missing else already_said(late)
        if waited > QUIET and missing and not self.is_told:
            self.is_told = True
            why = f" ({reason})" if reason else ""
            log.info(
                "waiting for process %s of %d at %s%s, for %g s at most.",
                *(names, self.world, self.where, why, self.seconds),
            )
        time.sleep(0.02)


def find_others(meeting: Meeting) -> tuple[dist.Store, tuple[str, int]]:
    """A store for all processes, and the address of the one that the last process hosts. Called in a thread, this can be
    interrupted: torch's own rendezvous waits where no signal reaches it."""
    global _board
    is_host = meeting.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    own = own_address(meeting, is_host)
    host, port, limit = meeting.host, meeting.port, timedelta(seconds=meeting.seconds)
    hosted = dist.TCPStore(host, port, meeting.world, is_host, limit, wait_for_workers=False, multi_tenant=is_host)
    store = meeting_place(hosted, meeting)
    if meeting.world == 1:
        return store, ("", 0)
    if meeting.rank == meeting.world - 1:
        _board = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
        store.set("board", f"{own} {_board.port}")
    address, number = store.get("board").decode().split()
    return store, (address, int(number))


def own_address(meeting: Meeting, is_host: bool) -> str:
    """The address by which this machine reaches the store, once that is up. On the host, its own once its name resolves: torch's
    store logs pages about a name that does not."""
    while True:
        try:
            if is_host:
                return str(socket.getaddrinfo(meeting.host, meeting.port)[0][4][0])
            with socket.create_connection((meeting.host, meeting.port), 2 * SETTLING) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            meeting.go_on([0], error.strerror)


def meeting_place(store: dist.Store, meeting: Meeting) -> dist.Store:
    """A fresh part of the store. torchrun keeps the store when it restarts processes, and with it the addresses of those that are
    gone, for which others may wait for ever. Every process writes a unique name and its world size, and process 0 publishes those
    that it has read: who finds its own name there knows that process 0 is of this start. Process 0 says when all are there."""
    rank, world, place = meeting.rank, str(meeting.world), None
    name = f"{uuid.uuid4().hex}/{world}"
    named, here = ([f"{word}/{other}" for other in range(meeting.world)] for word in ("name", "here"))
    store.set(named[rank], name)
    while True:
        if rank == 0:
            known = store.multi_get([key for key in named if store.check([key])])
            store.set("names", " ".join([name, *(other.decode() for other in known)]))
        first, *names = store.get("names").decode().split() if store.check(["names"]) else [""]
        world_of_first = first.rpartition("/")[2]
        if name in names:
            place = dist.PrefixStore(first, store)
            place.set(here[rank], world)
            if world != world_of_first:
                raise already_said(other_world(rank, world, world_of_first))
            if place.check(["complete"]):
                return place
            if place.check(["late"]):
                meeting.seconds = 0
        if place is None:
            meeting.go_on([0], f"one has WORLD_SIZE={world_of_first}" if world_of_first not in ("", world) else "")
        elif rank == 0:
            try:
                there = [other for other, key in enumerate(here) if place.check([key])]
                for other, its in zip(there, place.multi_get([here[it] for it in there]), strict=True):
                    if its.decode() != world:
                        raise other_world(other, its.decode(), world)
                if missing := [other for other in range(meeting.world) if other not in there]:
                    meeting.go_on(missing)
                else:
                    place.set("complete", "yes")
            except MachineError:
                place.set("late", "yes")
                time.sleep(SETTLING)  # the others read it before the store is gone
                raise
        else:
            meeting.go_on([])


def other_world(rank: int, its: str, of_first: str) -> MachineError:
    what = f"process {rank} was started with WORLD_SIZE={its}, process 0 with WORLD_SIZE={of_first}"
    return MachineError(f"{what}. Start all processes with the same WORLD_SIZE.")


@contextmanager
def explain_peers(ranks: Ranks) -> Iterator[None]:
    """Turn errors about a process that is gone or does not answer into one line, reported by one process."""
    try:
        yield
    except RuntimeError as error:
        is_gone, is_silent = (any(sign in str(error) for sign in signs) for signs in (GONE, SILENT))
        if not (is_gone or is_silent):
            raise
        others, speaks = those_that_notice(ranks)
        silent = ", ".join(f"process {rank}" for rank in range(ranks.world) if rank not in others)
        peer = PeerError(
            "another process of this run ended. Its own message says why; what was saved is intact: run the same command again."
            if is_gone
            else f"{silent or 'another process'} did not answer in time: it hangs, or its machine is gone."
        )
        raise peer if speaks else already_said(peer) from error


def those_that_notice(ranks: Ranks) -> tuple[list[int], bool]:
    """The processes that notice a fault, and whether this one is to report it: the first of them, once. They hear of each other through
    the store of the last process or, if that is the one at fault, through that of process 0 or torchrun."""

    def ask(store: Callable[[], dist.Store]) -> tuple[list[int], bool]:
        board = dist.PrefixStore("fault", store())
        board.set(f"{ranks.rank}", "notices")
        time.sleep(SETTLING)
        those = [rank for rank in range(ranks.world) if board.check([f"{rank}"])]
        return those, those[0] == ranks.rank and board.add("speaks", 1) == 1

    def of_last() -> dist.Store:
        socket.create_connection(ranks.board, SETTLING).close()  # torch itself would retry for long
        return _board or dist.TCPStore(*ranks.board, wait_for_workers=False)

    for store in (of_last, dist.distributed_c10d._get_default_store):
        with suppress(RuntimeError, OSError):  # if its process hangs, the store hangs too
            return interruptible(ask, store, seconds=3 * SETTLING)
    return [ranks.rank], True


def attempt(function: Callable[[], Result]) -> tuple[Result | None, ElectraError | OSError | None]:
    try:
        return function(), None
    except (ElectraError, OSError) as error:
        return None, error
