"""Whatever happens to one of several processes: a clear line, the right exit code, nobody left, nothing lost."""

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import electra
from electra.base import ranks
from electra.data.prepare import PrepareSettings, prepare
from electra.data.shards import manifest_hash
from electra.pretraining.run import refuse_others
from electra.train import checkpoint
from electra.train.checkpoint import checkpoint_folders, problem_of
from helpers import command, environment, write_corpus
from together import Together, wait_for_step, wait_until


def together(world: int, recipe: Path, prepared: Path, run: Path, *more: object, **how) -> Together:
    words = "pretrain", recipe, f"data={prepared}", f"run={run}", *more
    return Together(world, run.parent / "said", *words, **how)


@pytest.mark.parametrize(
    ("world", "word", "reason"),
    [
        (3, "train.batch=8", "train.batch=8 over 3 processes: every process must get the same number of rows. Use train.batch=6 or 9"),
        (2, "train.batch=1", "train.batch=1 over 2 processes: every process must get the same number of rows. Use train.batch=2,"),
        (2, "train.accumulate=8", "over 2 processes x train.accumulate=8: every process must get the same number of rows. Use train.batch=16,"),
        (2, "encoder.heads=3", "hidden (32) must be a multiple of heads (3)"),
    ],
    ids=["batch", "fewer rows than processes", "accumulate", "heads"],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_in_one_line_before_anything_is_written(
    world, word, reason, recipe, prepared, tmp_path
):
    processes = together(world, recipe, prepared, tmp_path / "run", word)
    assert processes.codes(60) == [2] * world
    (line,) = processes.lines()
    assert reason in line
    assert not (tmp_path / "run").exists()


def refused_line(recipe: Path, tmp_path: Path, *changes: Sequence[str]) -> str:
    """What is said where process 0 and process 1 have other words."""
    words = "pretrain", recipe, f"run={tmp_path / 'run'}"
    processes = Together(2, tmp_path / "said", *words, changes=dict(enumerate(changes)))
    assert processes.codes(60) == [2, 2]
    (line,) = processes.lines()
    assert "process 1 of 2 differs from process 0" in line and not (tmp_path / "run").exists()
    return line


def test_a_process_with_other_settings_is_refused_with_the_difference(recipe, prepared, tmp_path):
    data = f"data={prepared}"
    assert "optimizer.lr: 0.001 -> 0.5" in refused_line(recipe, tmp_path, [data], [data, "optimizer.lr=0.5"])


def test_a_process_with_other_data_is_refused_with_the_difference(recipe, prepared, tmp_path):
    text, other = write_corpus(tmp_path / "text.txt"), tmp_path / "shards"
    prepare([text], other, prepared, PrepareSettings(heldout_share=0.3), workers=1)
    line = refused_line(recipe, tmp_path, [f"data={prepared}"], [f"data={other}"])
    assert f"(data_manifest_sha256: '{manifest_hash(prepared)}' -> '{manifest_hash(other)}')" in line


def test_a_process_of_another_version_is_refused_with_the_difference(recipe, prepared, tmp_path, monkeypatch):
    def refuse(there: ranks.Ranks, *known) -> None:
        if there.rank == 1:
            monkeypatch.setattr("electra.__version__", "0.0.1")
        refuse_others(there, *known)

    monkeypatch.setattr("electra.pretraining.run.refuse_others", refuse)
    data = [f"data={prepared}"]
    assert f"(electra: '{electra.__version__}' -> '0.0.1')" in refused_line(recipe, tmp_path, data, data)


@pytest.mark.parametrize("launcher", [{}, {"TORCHELASTIC_RUN_ID": "any"}], ids=["none", "torchrun"])
def test_sigterm_to_all_processes_saves_once(launcher, recipe, prepared, tmp_path, monkeypatch):
    """As schedulers send it. torchrun hears it too and passes it on, while the checkpoint is written."""
    write = checkpoint.save_checkpoint

    def save(*given, **how):
        (tmp_path / "saves").touch()
        time.sleep(1)
        return write(*given, **how)

    monkeypatch.setattr(checkpoint, "save_checkpoint", save)
    run = tmp_path / "run"
    processes = together(2, recipe, prepared, run, "train.steps=9999", "train.save_every=9999", variables=launcher)
    wait_for_step(run, 10)
    for _ in range(1 + len(launcher)):
        for process in processes.processes.values():
            process.terminate()
        wait_until((tmp_path / "saves").exists)
    assert processes.codes(60) == [75, 75]
    state = json.loads((run / "run_state.json").read_text())
    (line,) = processes.lines()
    assert state["state"] == "preempted" and f"stopped at step {state['step']} of 9999; everything is saved" in line
    (folder,) = checkpoint_folders(run / "checkpoints")
    assert folder.name == f"step-{state['step']:09d}" and problem_of(folder) is None


@pytest.mark.parametrize(("there", "missing"), [([0], [1]), ([1], [0]), ([0, 2], [1])])
def test_processes_that_never_come_are_named_in_one_line(there, missing, recipe, prepared, tmp_path):
    world = len(there + missing)
    processes = together(world, recipe, prepared, tmp_path / "run", f"train.timeout={world}", missing=missing)
    assert processes.codes(60) == [5] * len(there)
    (line,) = processes.lines()
    assert f"process {missing[0]} of {world} did not connect to 127.0.0.1:" in line and f"within {world} s" in line
    assert "frame #" not in processes.said(there[0]) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("there", [0, 1])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_process_that_waits_for_others_says_so_and_can_be_stopped(
    there, number, code, recipe, prepared, tmp_path, monkeypatch
):
    monkeypatch.setattr(ranks, "QUIET", 0.2)
    processes = together(2, recipe, prepared, tmp_path / "run", "train.timeout=60", missing=[1 - there])
    wait_until(lambda: f"waiting for process {1 - there} of 2 at 127.0.0.1:" in processes.said(there))
    pid = processes.processes[there].pid
    assert pid
    os.kill(pid, number)
    assert processes.codes(20) == [code]
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_told(recipe, prepared, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        processes = together(1, recipe, prepared, tmp_path / "run", variables={"MASTER_PORT": port})
        assert processes.codes(60) == [5]
    assert f"port 127.0.0.1:{port} is in use" in processes.said(0)
    assert not (tmp_path / "run").exists()


def test_processes_that_start_again_do_not_meet_those_that_are_gone(recipe, prepared, tmp_path):
    """torchrun's store lives on when processes do not."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for _ in range(2):
        processes = together(2, recipe, prepared, tmp_path / "run", "train.batch=9", variables=variables)
        assert processes.codes(60) == [2, 2], processes.said(0)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_hangs_is_named_and_one_that_is_killed_is_noticed_at_once(victim, recipe, prepared, tmp_path):
    """Also process 0, which hosts the store by which processes without torchrun find each other."""
    run, survivor = tmp_path / "run", 1 - victim
    processes = together(2, recipe, prepared, run, "train.timeout=4")
    wait_for_step(run, 10)
    sleeper = processes.processes[victim]
    assert sleeper.pid
    os.kill(sleeper.pid, signal.SIGSTOP)
    processes.processes[survivor].join(30)
    sleeper.kill()
    sleeper.join()
    assert processes.processes[survivor].exitcode == 5
    (line,) = processes.lines()
    assert f"process {victim} did not answer" in line
    state = json.loads((run / "run_state.json").read_text())
    assert state["state"] == "failed" and f"process {victim} did not answer" in state["reason"]
    go_on = f"torchrun --standalone --nproc-per-node 2 -m electra pretrain {recipe} data={prepared} run={run} train.timeout=4"
    assert f"to resume: {go_on}\n" in processes.said(survivor) and state["resume"] == go_on

    processes = together(2, recipe, prepared, run)
    wait_for_step(run, 20)
    processes.processes[victim].kill()
    assert sorted(processes.codes(30)) == [-signal.SIGKILL, 5]
    (line,) = processes.lines()
    assert "another process of this run ended" in line and line in processes.said(survivor)
    folders = checkpoint_folders(run / "checkpoints")
    assert all(problem_of(folder) is None for folder in folders)
    state = json.loads((run / "run_state.json").read_text())
    assert state["state"] == "failed"
    assert victim or state["step"] == int(folders[-1].name.removeprefix("step-")) > 0


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"pretrain" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to find the processes")
@pytest.mark.parametrize(("parallel", "kills"), [("ddp", 20), ("fsdp", 4)])
def test_random_kills_with_restarts_end_with_the_same_weights(parallel, kills, recipe, prepared, tmp_path):
    """At any moment: while processes start and meet (every fourth), train, log or save."""
    words = [
        "pretrain",
        recipe,
        f"data={prepared}",
        "train.processes=2",
        "train.save_every=3",
        f"train.restarts={kills}",
    ]
    words += [f"train.parallel={parallel}", "train.steps=300", "train.log_every=2", "train.evaluate_every=25"]
    whole, killed, rng = tmp_path / "whole", tmp_path / "killed", random.Random(0)
    subprocess.run(command(*words, f"run={whole}"), env=environment(), check=True, timeout=600)
    parent = subprocess.Popen(command(*words, f"run={killed}"), env=environment(), stderr=subprocess.PIPE, text=True)
    for number in range(kills):
        if number % 4:
            wait_for_step(killed, 10 * number, timeout=300)
        time.sleep(rng.uniform(0, 0.3 if number % 4 else 6))
        until = time.monotonic() + 120
        while not (workers := workers_of(parent.pid)) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(rng.choice(workers), signal.SIGKILL)
    _, errors = parent.communicate(timeout=600)
    assert parent.returncode == 0, errors
    last = Path("checkpoints") / "step-000000300" / "model.safetensors"
    assert (killed / last).read_bytes() == (whole / last).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to find the processes")
@pytest.mark.parametrize("told", ["launcher", "all"])
def test_sigterm_to_the_launcher_saves_once_and_exits_75(told, recipe, prepared, tmp_path):
    run = tmp_path / "run"
    words = ["pretrain", recipe, f"data={prepared}", f"run={run}", "train.processes=2", "train.save_every=1000"]
    parent = subprocess.Popen(command(*words), env=environment(), stderr=subprocess.PIPE, text=True)
    wait_for_step(run, 10)
    for pid in workers_of(parent.pid) if told == "all" else ():
        os.kill(pid, signal.SIGTERM)
    parent.terminate()
    _, errors = parent.communicate(timeout=120)
    assert parent.returncode == 75 and errors.count("everything is saved") == 1, errors
    assert json.loads((run / "run_state.json").read_text())["state"] == "preempted"
    assert len(checkpoint_folders(run / "checkpoints")) == 1
