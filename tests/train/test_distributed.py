"""N processes compute what one computes, and a run goes on with another N."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist

from electra.base.ranks import Ranks
from electra.train.checkpoint import checkpoint_folders
from electra.train.log import read_metrics
from electra.train.loop import HeldOutEvaluation, RunState
from electra.train.step import Step
from helpers import electra_forked, environment
from together import Together, free_port, wait_for_step

STEPS = "train.steps=50"
TIMES = ("seconds", "training_seconds", "tokens_per_second")


def pretrain(world: int, recipe: Path, prepared: Path, run: Path, *more: object) -> Together:
    return Together(world, run.parent / f"{run.name}-said", "pretrain", recipe, f"data={prepared}", f"run={run}", *more)


def stopped(world: int, recipe: Path, prepared: Path, run: Path, *more: object, step: int = 10) -> Together:
    """By a signal to the last process, some time after `step`."""
    processes = pretrain(world, recipe, prepared, run, *more)
    wait_for_step(run, step)
    processes.processes[world - 1].terminate()
    assert processes.codes() == [75] * world, processes.said(0)
    return processes


@pytest.mark.parametrize("when", ["while it logs", "while all agree", "while it evaluates"])
def test_a_signal_to_one_process_stops_all_after_the_same_step_whenever_it_comes(
    when, recipe, prepared, tmp_path, monkeypatch
):
    """Between the moment when they agree whether to stop and the one when they do, it would save alone, and wait for the others for ever."""
    calls = []

    def signalled(function):
        def called(*given):
            result = function(*given)
            calls.append(None)
            if os.environ["RANK"] == "1" and len(calls) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        return called

    place = {"while it logs": (RunState, "log_metrics"), "while all agree": (Ranks, "agree")}
    owner, name = place.get(when, (HeldOutEvaluation, "describe"))
    monkeypatch.setattr(owner, name, signalled(getattr(owner, name)))
    processes = pretrain(2, recipe, prepared, tmp_path / "run", "train.steps=100000", "train.timeout=20")
    assert processes.codes(60) == [75, 75], processes.said(0)


def finish(world: int, recipe: Path, prepared: Path, run: Path, *more: object) -> Path:
    processes = pretrain(world, recipe, prepared, run, *more)
    assert processes.codes() == [0] * world, processes.said(0)
    return run


def weights(run: Path) -> dict[str, bytes]:
    folder = checkpoint_folders(run / "checkpoints")[-1]
    return {name: (folder / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer", "sums")}


def metrics(run: Path) -> list[dict]:
    return [{key: value for key, value in record.items() if key not in TIMES} for record in read_metrics(run)]


def assert_same_training(run: Path, other: Path, tolerance: float = 1e-5) -> None:
    """Every loss of every line within the tolerance, counts equal, weights as near as that allows."""
    ours, theirs = metrics(run), metrics(other)
    assert [(r["kind"], r["step"]) for r in ours] == [(r["kind"], r["step"]) for r in theirs]
    for record, reference in zip(ours, theirs, strict=True):
        for key in ("loss", "mlm_loss", "rtd_loss"):
            if key in reference:
                assert record[key] == pytest.approx(reference[key], abs=tolerance), (reference["step"], key)
        for key in ("replaced_share", "target_variety", "tokens", "lr"):
            assert record.get(key) == reference.get(key), (reference["step"], key)
        assert record["auc"] == pytest.approx(reference["auc"], abs=1e-3)
    mine, other_weights = (
        load_file(checkpoint_folders(r / "checkpoints")[-1] / "model.safetensors") for r in (run, other)
    )
    assert mine.keys() == other_weights.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other_weights[name], atol=1e-4, rtol=0, msg=name)


@pytest.fixture(scope="module")
def alone(recipe, prepared, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    done = electra_forked("pretrain", recipe, f"data={prepared}", f"run={run}", STEPS)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def two(recipe, prepared, tmp_path_factory) -> Path:
    return finish(2, recipe, prepared, tmp_path_factory.mktemp("two") / "run", STEPS)


def test_two_processes_compute_what_one_computes_dropout_included(two, alone):
    assert_same_training(two, alone)
    assert json.loads((two / "run_state.json").read_text())["state"] == "finished"
    assert json.loads((two / "environment.json").read_text())["processes"] == 2
    assert (two / "export" / "model.safetensors").is_file()


def test_one_process_under_torchrun_is_to_the_bit_one_without(alone, recipe, prepared, tmp_path):
    run = finish(1, recipe, prepared, tmp_path / "run", STEPS)
    assert weights(run) == weights(alone)
    assert metrics(run) == metrics(alone)


def test_with_a_budget_of_time_all_have_one_plan_though_one_of_them_compiles(recipe, prepared, tmp_path, monkeypatch):
    call = Step.__call__

    def step(it: Step, batch, number, *rates):
        """What one process compiles for its own rows takes time that is no part of its training."""
        rank = os.environ["RANK"]
        with (tmp_path / rank).open("a") as file:
            print(number, *rates, file=file)
        outputs = call(it, batch, number, *rates)
        if rank == "1" and number in (4, 9):
            it.paused = 0.3
            time.sleep(it.paused)
        return outputs

    monkeypatch.setattr(Step, "__call__", step)
    decay = ("optimizer.weight_decay=auto", "optimizer.total_decay=2.0")
    finish(2, recipe, prepared, tmp_path / "run", "train.minutes=0.05", *decay)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


def test_a_signal_to_one_process_stops_all_after_one_checkpoint_and_any_number_goes_on(
    two, alone, recipe, prepared, tmp_path
):
    run = tmp_path / "run"
    processes = stopped(2, recipe, prepared, run, STEPS, "train.save_every=1000")
    state = json.loads((run / "run_state.json").read_text())
    assert (
        state["state"] == "preempted"
        and [line for line in processes.lines() if "stopped at step" in line] == processes.lines()
    )
    (saved,) = checkpoint_folders(run / "checkpoints")
    assert saved.name == f"step-{state['step']:09d}"

    shutil.copytree(run, tmp_path / "with-one")
    assert weights(finish(2, recipe, prepared, run, STEPS)) == weights(two)
    assert metrics(run) == metrics(two)
    assert_same_training(finish(1, recipe, prepared, tmp_path / "with-one", STEPS), alone)


@pytest.mark.slow
def test_torchrun_on_two_machines_trains_like_one_process(alone, recipe, prepared, tmp_path):
    """Both are this one: each process is the first of its machine, and the agents agree on who is who."""
    place = ["--local-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *place]
    run = tmp_path / "run"
    words = [*launcher, "-m", "electra", "pretrain", str(recipe), f"data={prepared}", f"run={run}", STEPS]
    agents = [subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        said = [agent.communicate(timeout=200)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert_same_training(run, alone)
    assert json.loads((run / "environment.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_weights_in_pieces_train_alike_and_go_on_to_the_bit(alone, recipe, prepared, tmp_path):
    run, interrupted, more = tmp_path / "run", tmp_path / "interrupted", (STEPS, "train.parallel=fsdp")
    assert_same_training(finish(2, recipe, prepared, run, *more), alone)
    assert (run / "export" / "model.safetensors").is_file()
    stopped(2, recipe, prepared, interrupted, *more)
    assert weights(finish(2, recipe, prepared, interrupted, *more)) == weights(run)
    assert metrics(interrupted) == metrics(run)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [[], ["optimizer.kind=muon", "train.accumulate=2"]])
def test_a_run_goes_from_whole_weights_to_pieces_and_back(more, recipe, prepared, tmp_path):
    alone, run = finish(1, recipe, prepared, tmp_path / "alone", *more), tmp_path / "run"
    for world, parallel, step in ((2, "ddp", 10), (2, "fsdp", 20), (4, "fsdp", 30)):
        stopped(world, recipe, prepared, run, f"train.parallel={parallel}", *more, step=step)
    assert_same_training(finish(1, recipe, prepared, run, *more), alone)


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_gradients_are_sent_in_bfloat16_and_train_nearly_alike(parallel, two, recipe, prepared, tmp_path, monkeypatch):
    """Rounding moves a gradient by 2^-9 of itself, and losses by 1e-5 until the first token is sampled otherwise, which counts for one
    of the few hundred tokens behind a metric: losses that fall by 1.2 and 0.3 are then 0.005 apart."""
    sends = "all_reduce" if parallel == "ddp" else "reduce_scatter_single"
    sends = sends if hasattr(dist, sends) else "reduce_scatter_tensor"  # torch before 2.13
    send = getattr(dist, sends)

    def recorded(*tensors, **named):
        with (tmp_path / os.environ["RANK"]).open("a") as file:
            message = named["input"] if parallel == "fsdp" else tensors[0]
            print(message.dtype, message.numel(), file=file)
        return send(*tensors, **named)

    monkeypatch.setattr(dist, sends, recorded)
    words = STEPS, "train.reduce=bfloat16", f"train.parallel={parallel}"
    run = finish(2, recipe, prepared, tmp_path / "run", *words)
    sent = [line.split() for line in (tmp_path / "0").read_text().splitlines()]
    assert [dtype for dtype, size in sent if int(size) > 10_000] == ["torch.bfloat16"] * 50
    for record, reference in zip(metrics(run), metrics(two), strict=True):
        for key in ("mlm_loss", "rtd_loss"):
            assert record[key] == pytest.approx(reference[key], abs=1e-4 if record["step"] == 5 else 0.02)


def test_doctor_examines_the_processes_too(recipe, prepared, tmp_path):
    words = "doctor", recipe, f"data={prepared}", f"run={tmp_path / 'run'}"
    processes = Together(2, tmp_path / "said", *words)
    assert processes.codes(100) == [0, 0], processes.said(0)
    assert "2 processes: clocks are 0.0" in processes.said(
        0
    ) and "supports renames and locks; all processes see it" in processes.said(0)
    assert processes.said(1) == "" and sorted(tmp_path.iterdir()) == [tmp_path / "said"]


MORE = {
    "plain": [],
    "accumulate": ["train.accumulate=2"],
    "muon": ["optimizer.kind=muon", "optimizer.decoupled=true"],
    "electric": ["objective.kind=electric", "generator.kind=two_tower"],
    "spans": ["masking.unit=span", "objective.kind=replaced_span"],
    "recovery": ["objective.kind=token_recovery"],
    "unigram": ["generator.kind=unigram"],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MORE)
def test_one_two_and_four_processes_train_alike(name, recipe, prepared, tmp_path):
    more = [*MORE[name], STEPS, "train.evaluate_every=25", "train.save_every=100"]
    alone = finish(1, recipe, prepared, tmp_path / "1", *more)
    for world in (2, 4):
        assert_same_training(finish(world, recipe, prepared, tmp_path / str(world), *more), alone)
