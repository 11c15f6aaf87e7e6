import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from electra.base import jobs
from electra.base.errors import DataError, MachineError, PreemptedError
from electra.base.jobs import Signals, cpu_count, peak_memory, run_jobs
from electra.data.files import whole_file
from helpers import environment


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


def test_a_script_that_workers_cannot_read_is_told_of_its_guard(tmp_path: Path) -> None:
    """They would begin its work again."""
    script = tmp_path / "script.py"
    script.write_text("from electra.base.jobs import run_jobs\nprint(list(run_jobs(abs, [(-1,)], 1)))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment(), timeout=120)
    assert 'starts workers must do so under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
    guarded = script.read_text().replace("print", 'if __name__ == "__main__":\n    print')
    script.write_text(guarded)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.stdout == "[1]\n", done.stderr


def test_a_signal_stops_workers_in_the_middle_of_their_jobs() -> None:
    started = time.monotonic()
    with Signals() as signals, pytest.raises(PreemptedError, match="What is finished is kept"):
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        list(run_jobs(time.sleep, [(60,)], 1, signals))
    assert time.monotonic() - started < 30


def tell(text: str) -> str:
    logging.getLogger("electra.somewhere").warning("working on %s", text)
    return text


def test_what_workers_log_is_logged_here_before_their_results(caplog: pytest.LogCaptureFixture) -> None:
    for relays in (False, True):
        caplog.clear()
        assert list(run_jobs(tell, [("one",), ("two",)], 1, relays=relays)) == ["one", "two"]
        said = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert said == ([("WARNING", "working on one"), ("WARNING", "working on two")] if relays else [])


SLOW_START = """
import sys, time
if __name__ == "__mp_main__":
    time.sleep(2)  # a worker that is still importing
from electra.base.errors import InterruptedRunError
from electra.base.jobs import Signals, run_jobs
if __name__ == "__main__":
    print("begins", flush=True)
    try:
        with Signals() as signals:
            list(run_jobs(time.sleep, [(0,)] * 2, 2, signals))
    except InterruptedRunError:
        sys.exit(130)
"""


def test_ctrl_c_while_workers_start_prints_nothing_of_theirs(tmp_path: Path) -> None:
    (tmp_path / "slow_start.py").write_text(SLOW_START)
    words = [sys.executable, str(tmp_path / "slow_start.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes, start_new_session=True, env=environment()) as process:
        assert process.stdout and process.stdout.readline() == "begins\n"
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: everybody gets it
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")


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


def test_a_terminal_that_is_closed_asks_for_a_stop_unless_nohup_was_said() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with Signals() as signals:
        signal.raise_signal(signal.SIGHUP)
    assert isinstance(signals.stop("saved."), PreemptedError) and signal.getsignal(signal.SIGHUP) is before
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
        assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def handlers() -> Iterator[None]:
    """A process that leaves ignores signals; the test's goes on."""
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_what_torchrun_passes_on_after_the_stop_does_not_end_who_is_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    with jobs.ending_at_signals(lambda number: SystemExit(128 + number)):
        with Signals() as signals:
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_saves_nothing_leaves_as_at_an_error(number: signal.Signals, tmp_path: Path) -> None:
    signal.signal(number, signal.SIG_DFL)  # it may be ignored where tests are started in the background
    ending = jobs.ending_at_signals(lambda number: SystemExit(128 + number))
    with pytest.raises(SystemExit) as stop, ending, whole_file(tmp_path / "answers.csv") as file:
        file.write(b"half")
        signal.raise_signal(number)
    assert stop.value.code == 128 + number and not list(tmp_path.iterdir())
    assert signal.getsignal(number) is signal.SIG_DFL
