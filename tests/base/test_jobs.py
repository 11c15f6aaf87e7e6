import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from electra.base import jobs
from electra.base.errors import DataError, MachineError, PreemptedError
from electra.base.jobs import Signals, cpu_count, peak_memory, run_jobs


def double(number: int) -> int:
    return 2 * number


def fail(kind: type[Exception], *arguments: object) -> None:
    raise kind(*arguments)


def test_every_job_is_done_once() -> None:
    assert sorted(run_jobs(double, [(number,) for number in range(20)], 2)) == list(range(0, 40, 2))
    assert list(run_jobs(double, [], 2)) == []


def test_jobs_are_taken_as_they_are_needed() -> None:
    taken = 0

    def endless() -> Iterator[tuple[int]]:
        nonlocal taken
        while True:
            taken += 1
            yield (taken,)

    results = run_jobs(double, endless(), 1)
    assert {next(results) for _ in range(3)} <= set(range(2, 14, 2))
    results.close()
    assert taken <= 6


def test_errors_for_people_and_of_the_system_come_back_as_they_were() -> None:
    with pytest.raises(DataError, match="no text"):
        list(run_jobs(fail, [(DataError, "no text")], 1))
    with pytest.raises(OSError, match="No space") as error:
        list(run_jobs(fail, [(OSError, 28, "No space", "/disk")], 1))
    assert (error.value.errno, error.value.filename) == (28, "/disk")
    with pytest.raises(RuntimeError, match=r"(?s)odd.*Traceback.*in fail"):
        list(run_jobs(fail, [(KeyError, "odd")], 1))


def test_a_worker_that_dies_is_reported() -> None:
    with pytest.raises(MachineError, match="exit code 9;"):
        list(run_jobs(os._exit, [(9,)], 1))


def test_a_signal_stops_workers_in_the_middle_of_their_jobs() -> None:
    started = time.monotonic()
    with Signals() as signals, pytest.raises(PreemptedError, match="finished runs are kept"):
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        list(run_jobs(time.sleep, [(60,)], 1, signals))
    assert time.monotonic() - started < 30


def test_cores_are_counted_where_the_system_does_not_say_which_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert cpu_count() == 7


def test_peak_memory_is_in_bytes_on_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    status = Path("/proc/self/status")
    if status.exists():
        now = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmRSS"))
        assert peak_memory() >= int(now) * 1024 * 0.9
    linux = peak_memory()
    monkeypatch.setattr(jobs.sys, "platform", "darwin")
    assert abs(peak_memory() - linux / 1024) < linux / 10240
