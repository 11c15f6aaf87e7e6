"""Several runs at once, each in a process of its own: small models do not fill a GPU one by one."""

import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from electra.base.errors import ElectraError, MachineError
from electra.base.signals import Signals


def run_jobs(
    function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], workers: int, signals: Signals
) -> Iterator[Any]:
    """Results as they come. `function` must be importable by name; its errors come back as they were raised. Workers
    end with this process, however it ends."""
    context = multiprocessing.get_context("spawn")
    tasks: Any = context.Queue()
    results: Any = context.Queue()
    for job in jobs:
        tasks.put(job)
    count = min(workers, len(jobs))
    for _ in range(count):
        tasks.put(None)
    processes = [
        context.Process(target=_work, args=(function, tasks, results, os.getpid()), daemon=True)
        for _ in range(count)
    ]
    for process in processes:
        process.start()
    try:
        left = len(jobs)
        while left:
            try:
                good, value = results.get(timeout=0.3)
            except queue.Empty:
                if signals.received is not None:
                    raise signals.stop("stopped; finished runs are kept, the others begin again.") from None
                dead = [process.exitcode for process in processes if process.exitcode not in (None, 0)]
                if dead:
                    raise MachineError(
                        f"a worker ended with {dead[0]} (-9: killed, mostly for memory). Use fewer --jobs. Finished "
                        "runs are kept."
                    ) from None
                continue
            if not good:
                raise value
            left -= 1
            yield value
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _work(function: Callable[..., Any], tasks: Any, results: Any, parent: int) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while (job := tasks.get()) is not None:
        try:
            results.put((True, function(*job)))
        except ElectraError as error:
            results.put((False, error))
        except Exception as error:
            import traceback

            results.put((False, RuntimeError(f"{error}\n{traceback.format_exc()}")))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
