"""Processes: many jobs in several of them, signals that ask for a stop at the next safe point, cores and memory."""

import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from electra.base.errors import ElectraError, InterruptedRunError, MachineError, PipeClosedError, PreemptedError

log = logging.getLogger(__name__)
Result = TypeVar("Result")
VISIBLE = "CUDA_VISIBLE_DEVICES"
STOPPED = "stopped. What is finished is kept: run the same command again."


def cpu_count() -> int:
    """The cores that this process may use; all cores if the system does not say (macOS)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def peak_memory() -> int:
    """The most bytes of memory that this process has used so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Signals:
    """SIGTERM, SIGINT and, unless nohup ignores it, SIGHUP ask for a stop at the next safe point; a second one ends the process
    at once. SIGPIPE (the reader of our output went away, see `stop_at_closed_pipe`) asks for a stop too, however often it comes.
    torchrun passes on the signals that it receives, also if a scheduler sent them to its processes too. So under torchrun a second
    signal ends nothing; torchrun itself kills processes that take longer than half a minute."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.agreed: int | None = None  # the signal that all processes of a run agreed on: `Ranks.hear`
        self.is_told_twice = "TORCHELASTIC_RUN_ID" in os.environ

    def __enter__(self) -> "Signals":
        listens = threading.current_thread() is threading.main_thread()  # python lets no other thread listen
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGPIPE] if listens else []
        if listens and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self.previous = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, signal.SIG_IGN if self.is_told_twice and self.received else handler)

    def handle(self, number: int, _: FrameType | None) -> None:
        if self.received is not None and number != signal.SIGPIPE and not self.is_told_twice:
            os._exit(128 + number)
        self.received = self.received or number

    def stop(self, message: str) -> ElectraError:
        if self.received == signal.SIGPIPE:
            return PipeClosedError(message)
        return InterruptedRunError(message) if self.received == signal.SIGINT else PreemptedError(message)


class SignalHeard(BaseException):
    """Raised wherever the process happens to be. Not an Exception: code that takes errors for bad rows, which it skips, must not
    catch this."""


@contextmanager
def ending_at_signals(error: Callable[[int], BaseException]) -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block as an error does, so that only whole files remain; a second one ends the process.
    A signal that is ignored, as by nohup, stays ignored."""

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SignalHeard(number)

    listens = threading.current_thread() is threading.main_thread()
    heard = [it for it in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(it) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, end) for number in heard if listens}
    try:
        yield
    except SignalHeard as heard_signal:
        raise error(*heard_signal.args) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def preempted(_: int) -> PreemptedError:
    return PreemptedError(STOPPED)


def interruptible(function: Callable[..., Result], *arguments: Any, seconds: float | None = None) -> Result:
    """Call a library function that would hold up signals until it returns. It runs in a thread that ends with the process.
    TimeoutError after `seconds`."""
    outcome: Future[Result] = Future()

    def work() -> None:
        try:
            outcome.set_result(function(*arguments))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return outcome.result(seconds)


def stop_at_closed_pipe() -> None:
    """Stop at the next safe point if `Signals` listens, so that work is saved; else end the process with the exit code for this."""
    if callable(signal.getsignal(signal.SIGPIPE)):
        signal.raise_signal(signal.SIGPIPE)
    else:
        sys.exit(PipeClosedError.exit_code)


def run_jobs(
    function: Callable[..., Result],
    jobs: Iterable[tuple[Any, ...]],
    workers: int,
    signals: Signals | None = None,
    start: Callable[[], object] | None = None,
    relays: bool = False,
    devices: Sequence[str] = (),
) -> Iterator[Result]:
    """Run jobs in worker processes and yield results as they come. `function` and `start`, which every worker calls once before
    its first job, must be picklable. At most two jobs per worker are taken from `jobs` at a time, so that a stream of any
    length fits into memory. ElectraError and OSError are raised here as they were in the worker. With `relays`, what workers
    log is logged here. Each worker sees one of the GPUs in `devices`, in turn. Workers end with this process, however it ends.

    Not concurrent.futures: its shutdown waits for jobs that are running, which may take hours."""
    context = multiprocessing.get_context("spawn")
    processes: dict[Any, Any] = {}  # by our end of the pipe to each
    begun = set[Any]()
    waiting, ahead, idle = iter(jobs), deque[tuple[Any, ...]](), list[Any]()
    more, busy = True, 0
    try:
        while more or ahead or busy:
            # take one more job, and start one more process until there are enough
            if more and len(ahead) < workers:
                job = next(waiting, None)
                if job is None:
                    more = False
                    continue
                ahead.append(job)
                if len(processes) < workers:
                    ours, other_end = context.Pipe()
                    words = function, start, other_end, relays
                    process = context.Process(target=_work, args=words, daemon=True)
                    with _interrupts_held_back(), _seeing(devices, len(processes)):
                        process.start()
                    processes[ours] = process
                    other_end.close()
            # a worker sends None when it is ready to begin, then a result after each job
            for connection in wait(list(processes), timeout=0 if more and len(ahead) < workers else 0.3):
                message = _receive(connection, processes[connection], connection in begun)
                begun.add(connection)
                if isinstance(message, LogMessage):
                    log.log(*message)
                    continue
                idle.append(connection)
                if message is not None:
                    busy -= 1
                    good, value = message
                    if not good:
                        raise value
                    yield value
            while idle and ahead:
                with suppress(ConnectionError):  # a dead worker is noticed when its answer is awaited
                    idle.pop().send(ahead.popleft())
                busy += 1
            if signals is not None and signals.received is not None:
                raise signals.stop(STOPPED)
    finally:
        for connection, process in processes.items():
            connection.close()  # a worker that survives the signal, to save, ends when it asks for its next job
            process.terminate()
        for process in processes.values():
            process.join(60)
            process.kill()
            process.join()


def _receive(connection: Any, process: Any, has_begun: bool) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        process.join(5)
        if process.exitcode == -signal.SIGTERM:  # a scheduler sends it to all processes of a job, in any order
            raise PreemptedError(STOPPED) from None
        if process.exitcode == 1 and not has_begun:
            why = "a worker process exited before it started working. A script that starts workers must do so under"
            raise MachineError(f'{why} `if __name__ == "__main__":`.') from None
        raise MachineError(
            f"a worker process died (exit code {process.exitcode}; -9 usually means that memory ran out). What is finished "
            "is kept: run the same command again, with fewer processes."
        ) from None


class LogMessage(NamedTuple):
    """A message that a worker logged."""

    level: int
    text: str


class Relay(logging.Handler):
    """Sends log messages to the parent, which knows where they go."""

    def __init__(self, connection: Any) -> None:
        super().__init__()
        self.connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self.connection.send(LogMessage(record.levelno, record.getMessage()))


@contextmanager
def _seeing(devices: Sequence[str], number: int) -> Iterator[None]:
    """A context in which a process that is started sees one GPU."""
    before = os.environ.get(VISIBLE)
    if devices:
        os.environ[VISIBLE] = devices[number % len(devices)]
    try:
        yield
    finally:
        if devices:
            os.environ.pop(VISIBLE) if before is None else os.environ.update({VISIBLE: before})


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A context in which a process that is started receives no Ctrl-C until it ignores it."""
    resource_tracker.ensure_running()  # else Python starts it with the first process, and unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(function: Callable[..., Any], start: Callable[[], object] | None, connection: Any, relays: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    multiprocessing.current_process().daemon = False  # it stays one for its parent, but may start workers of its own
    relay, logger = Relay(connection), logging.getLogger("electra")
    if relays:
        logger.addHandler(relay)
        logger.setLevel(logging.INFO)
    parent = multiprocessing.parent_process()
    assert parent
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if start:
        start()
    with suppress(OSError):  # as below
        connection.send(None)
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):  # the parent is gone
            return
        try:
            message: tuple[bool, Any] = True, function(*job)
        except (ElectraError, OSError) as error:
            message = False, error
        except Exception as error:  # it may not be picklable
            message = False, RuntimeError(f"{error}\n{traceback.format_exc()}")
        relay.acquire()  # threads of the job may still be logging
        with suppress(OSError):  # the parent is gone
            connection.send(message)
        relay.release()


def _end_with(parent: BaseProcess) -> None:
    """End this process when its parent ends. A worker whose parent was killed would wait for its next job for ever."""
    parent.join()
    os._exit(1)
