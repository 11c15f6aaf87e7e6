"""`train.processes=N`: the command that starts the others, how they end with it, and what it begins again."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from helpers import command, electra, environment
from together import wait_for_step, wait_until


def start(recipe: Path, prepared: Path, run: Path, *more: str) -> subprocess.Popen[bytes]:
    words = command("pretrain", recipe, f"data={prepared}", f"run={run}", "train.processes=2", *more)
    with run.with_name("said.txt").open("w") as said:
        return subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT, env=environment())


def end(launcher: subprocess.Popen[bytes], run: Path) -> tuple[int, str]:
    """Its exit code, and what all have said."""
    try:
        launcher.wait(90)
    except subprocess.TimeoutExpired:
        launcher.terminate()
        launcher.wait(60)
        pytest.fail(run.with_name("said.txt").read_text()[-4000:])
    return launcher.returncode, run.with_name("said.txt").read_text()


def ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children if b"pretrain" in Path(f"/proc/{child}/cmdline").read_bytes()]


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to find the processes")


def test_a_batch_that_cannot_be_cut_is_refused_before_any_process_is_started(recipe, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("electra.train.distributed.launch", lambda *_: pytest.fail("started"))
    refused = electra("pretrain", recipe, f"data={prepared}", f"run={tmp_path / 'run'}", "train.processes=3")
    assert (
        refused.returncode == 2 and "over 3 processes" in refused.stderr and ", or train.processes=2." in refused.stderr
    )


@pytest.mark.slow
def test_what_was_refused_is_not_begun_again(recipe, tmp_path):
    launcher = start(recipe, tmp_path / "nowhere", tmp_path / "run", "train.restarts=2")
    code, said = end(launcher, tmp_path / "run")
    assert code == 3 and said.count("nowhere does not exist") == 1, said


@needs_proc
@pytest.mark.slow
def test_what_was_stopped_is_not_begun_again(recipe, prepared, tmp_path):
    launcher = start(recipe, prepared, tmp_path / "run", "train.restarts=2", "train.steps=100000")
    wait_for_step(tmp_path / "run", 5)
    os.kill(ranks_of(launcher.pid)[1], signal.SIGTERM)
    code, said = end(launcher, tmp_path / "run")
    assert code == 75 and "resuming" not in said, said
    assert json.loads((tmp_path / "run" / "run_state.json").read_text())["state"] == "preempted"


@needs_proc
@pytest.mark.slow
def test_processes_stop_and_save_when_their_launcher_was_killed(recipe, prepared, tmp_path):
    launcher = start(recipe, prepared, tmp_path / "run", "train.steps=100000", "train.save_every=100000")
    wait_for_step(tmp_path / "run", 5)
    ranks = ranks_of(launcher.pid)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    state = json.loads((tmp_path / "run" / "run_state.json").read_text())
    assert state["state"] == "preempted" and (tmp_path / "run" / "checkpoints" / f"step-{state['step']:09d}").is_dir()


@needs_proc
@pytest.mark.slow
def test_processes_that_had_to_be_killed_are_told_of(recipe, prepared, tmp_path):
    """One hangs, so that the other can neither save nor hear a signal."""
    launcher = start(recipe, prepared, tmp_path / "run", "train.steps=100000")
    wait_for_step(tmp_path / "run", 5)
    hanging = ranks_of(launcher.pid)[1]
    os.kill(hanging, signal.SIGSTOP)
    launcher.send_signal(signal.SIGINT)
    code, said = end(launcher, tmp_path / "run")
    assert code == 130 and "were killed: what came after the newest checkpoint is lost" in said, said
    state = json.loads((tmp_path / "run" / "run_state.json").read_text())
    assert state["state"] == "failed" and "were killed" in state["reason"]
