"""Never loses work: whatever ends a run, the same command goes on and ends with the same weights, dropout included."""

import errno
import itertools
import json
import math
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from electra.base import files
from electra.base.errors import MachineError
from electra.objectives.corruption import SamplingSettings
from electra.pretraining.load import load_network
from electra.pretraining.trial import try_storage
from electra.train.checkpoint import checkpoint_folders, newest_checkpoint, problem_of
from electra.train.log import read_metrics
from electra.train.step import Step
from helpers import Forked, command, electra, environment
from together import wait_for_step


def start(recipe: Path, prepared: Path, run: Path, *more: str) -> Forked:
    return Forked("pretrain", recipe, f"data={prepared}", f"run={run}", *more)


def final_weights(run: Path) -> dict[str, bytes]:
    folder = checkpoint_folders(run / "checkpoints")[-1]
    return {name: (folder / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")}


def figures(run: Path) -> list[dict]:
    timing = ("seconds", "training_seconds", "tokens_per_second")
    return [{k: v for k, v in record.items() if k not in timing} for record in read_metrics(run)]


def kill_until_finished(recipe: Path, prepared: Path, run: Path, kills: int) -> int:
    """kill -9 at random moments, from the first import to the last checkpoint, until `kills` have hit."""
    rng = random.Random(0)
    done, words = 0, command("pretrain", recipe, f"data={prepared}", f"run={run}", "train.save_every=3")
    while done < kills:
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment())
        time.sleep(rng.uniform(1.0, 3.5))
        if process.poll() is None:
            process.kill()
            done += 1
        process.communicate()
        for folder in checkpoint_folders(run / "checkpoints"):
            assert problem_of(folder) is None
        if checkpoint_folders(run / "checkpoints")[-1:] == [run / "checkpoints" / "step-000000040"]:
            break
    again = electra(*words[3:])
    assert again.returncode == 0, again.stderr
    return done


def test_a_run_killed_twice_ends_with_the_same_weights_and_the_same_figures(finished_run, recipe, prepared, tmp_path):
    run = tmp_path / "run"
    for step in (10, 25):
        process = start(recipe, prepared, run)
        wait_for_step(run, step)
        process.kill()
        process.wait()
    again = electra("pretrain", recipe, f"data={prepared}", f"run={run}")
    assert again.returncode == 0 and "resuming at step" in again.stderr
    assert final_weights(run) == final_weights(finished_run)
    assert figures(run) == figures(finished_run)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_random_kills_end_with_the_same_weights(finished_run, recipe, prepared, tmp_path):
    total = 0
    for attempt in range(40):
        run = tmp_path / f"run-{attempt}"
        total += kill_until_finished(recipe, prepared, run, 20 - total)
        assert final_weights(run) == final_weights(finished_run)
        if total >= 20:
            break
    assert total >= 20


@pytest.mark.parametrize(
    ("number", "code", "state"), [(signal.SIGTERM, 75, "preempted"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_saves_and_the_same_command_ends_with_the_same_weights(
    number, code, state, finished_run, recipe, prepared, tmp_path
):
    run = tmp_path / "run"
    process = start(recipe, prepared, run, "train.save_every=1000")
    wait_for_step(run, 5)
    process.send_signal(number)
    assert process.wait(60) == code, process.said
    assert "everything is saved" in process.said and f"to resume: electra pretrain {recipe}" in process.said
    told = json.loads((run / "run_state.json").read_text())
    assert told["state"] == state and told["step"] == newest_checkpoint(run / "checkpoints").step
    assert electra("pretrain", recipe, f"data={prepared}", f"run={run}").returncode == 0
    assert final_weights(run) == final_weights(finished_run)


def test_a_finished_run_says_so_and_changes_nothing(finished_run, recipe, prepared):
    before = {
        path: path.read_bytes() for path in finished_run.rglob("*") if path.name.endswith(("safetensors", "jsonl"))
    }
    again = electra("pretrain", recipe, f"data={prepared}", f"run={finished_run}")
    assert again.returncode == 0 and "finished" in again.stdout
    assert before == {path: path.read_bytes() for path in before}


def test_a_second_process_is_refused_with_the_pid_of_the_first(recipe, prepared, tmp_path):
    run = tmp_path / "run"
    first = start(recipe, prepared, run, "train.steps=100000")
    wait_for_step(run, 5)
    second = electra("pretrain", recipe, f"data={prepared}", f"run={run}", "train.steps=100000")
    first.kill()
    first.wait()
    assert second.returncode == 5 and f"in use by process {first.pid}" in second.stderr


def no_folder_is_renamed(monkeypatch):
    def rename(path, target):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(Path, "rename", rename)


def locks_do_nothing(monkeypatch):
    monkeypatch.setattr(files.fcntl, "flock", lambda *_: None)


@pytest.mark.parametrize(
    ("storage", "problem"),
    [
        (no_folder_is_renamed, r"folders cannot be renamed \(Operation not supported\)"),
        (locks_do_nothing, "where locks have no effect"),
    ],
)
def test_storage_that_is_not_fit_for_a_run_is_refused_before_its_first_step(
    storage, problem, recipe, prepared, tmp_path, monkeypatch
):
    storage(monkeypatch)
    refused = electra("pretrain", recipe, f"data={prepared}", f"run={tmp_path / 'run'}")
    assert refused.returncode == 5 and re.fullmatch(
        rf"electra: .*{problem}.* Choose a folder on a local disk\.\n", refused.stderr
    )
    with pytest.raises(MachineError, match=problem):
        try_storage(tmp_path / "doctor" / "run")
    assert not list(tmp_path.iterdir())


def test_other_settings_are_refused_and_the_differing_keys_listed(finished_run, recipe, prepared):
    other = electra("pretrain", recipe, f"data={prepared}", f"run={finished_run}", "optimizer.lr=0.5", "seed=9")
    assert other.returncode == 2
    assert "optimizer.lr: 0.001 -> 0.5" in other.stderr and "seed: 3 -> 9" in other.stderr


def test_the_resolved_settings_in_the_run_folder_repeat_the_run(finished_run, tmp_path):
    run = tmp_path / "again"
    done = electra("pretrain", finished_run / "config.toml", f"run={run}")
    assert done.returncode == 0, done.stderr
    assert final_weights(run) == final_weights(finished_run)


def test_accumulating_in_parts_gives_the_same_corruption_losses_and_gradient(recipe, prepared, tmp_path):
    """At the first step both have the same weights. Packed rows have no padding, so all parts weigh the same."""
    first = {}
    for accumulate in (1, 4):
        run = tmp_path / f"run-{accumulate}"
        shape = ("rows.kind=packed", "encoder.dropout=0", "encoder.attention_dropout=0", "train.steps=1")
        words = (f"data={prepared}", f"run={run}", f"train.accumulate={accumulate}", *shape)
        assert electra("pretrain", recipe, *words).returncode == 0
        first[accumulate] = figures(run)[0]
    for name in ("replaced_share", "sampled_accuracy", "mlm_loss", "rtd_loss", "loss", "gradient_norm"):
        assert first[4][name] == pytest.approx(first[1][name], rel=1e-3), name


def test_a_finished_run_is_made_longer_with_a_schedule_of_its_own_and_its_config_repeats_it(recipe, prepared, tmp_path):
    """Twice longer; the run that config.toml describes has the same weights to the bit."""
    run, every = tmp_path / "run", ("train.log_every=1", "sampling.start_temperature=2")
    for steps in (8, 16, 20):
        done = electra("pretrain", recipe, f"data={prepared}", f"run={run}", f"train.steps={steps}", *every)
        assert done.returncode == 0, done.stderr
        assert ("extending the finished run" in done.stderr) == (steps > 8)
    rates = [record["lr"] / 1e-3 for record in read_metrics(run) if record["kind"] == "train"]
    warmed = [(n + 1) / 4 if n < 4 else 1 for n in range(8)]
    expected = [warmed[n] * (1 - n / 8) for n in range(8)] * 2 + [(n + 1) / 2 * (1 - n / 4) for n in range(2)]
    assert rates[:18] == pytest.approx(expected) and len(rates) == 20
    temperatures = [record["temperature"] for record in read_metrics(run) if record["kind"] == "train"]
    cooling = SamplingSettings(start_temperature=2.0).cooling
    assert temperatures == pytest.approx([2 - min(1, n / 8 / cooling) if n < 8 else 1 for n in range(20)])

    # every end has its export
    ends = [run / name for name in ("export-step-8", "export-step-16", "export")]
    assert len({(folder / "model.safetensors").read_bytes() for folder in ends}) == 3

    again = electra("pretrain", run / "config.toml", f"run={tmp_path / 'again'}")
    assert again.returncode == 0, again.stderr
    assert final_weights(tmp_path / "again") == final_weights(run)

    # the same command once more changes nothing, and what is not finished is not made longer
    words = ("pretrain", recipe, f"data={prepared}", f"run={run}", *every)
    before = final_weights(run)
    assert electra(*words, "train.steps=20").returncode == 0 and final_weights(run) == before
    shutil.rmtree(run / "checkpoints" / "step-000000020")
    refused = electra(*words, "train.steps=30")
    assert refused.returncode == 2 and "finish this one first" in refused.stderr and f"start={run}" in refused.stderr


def assert_exported(run: Path) -> None:
    """The export is the network of the newest checkpoint."""
    exported, trained = (load_network(path).encoder.state_dict() for path in (run / "export", run))
    assert all(torch.equal(exported[name], trained[name]) for name in trained)


def test_a_run_that_begins_again_leaves_nothing_of_the_earlier_one(finished_run, recipe, prepared, tmp_path):
    run, words = tmp_path / "run", ("pretrain", recipe, f"data={prepared}", f"run={tmp_path / 'run'}", "train.steps=4")
    shutil.copytree(finished_run, run)
    shutil.rmtree(run / "checkpoints")
    first = {"kind": "heldout", "step": 0, "auc": 0.123}
    (run / "metrics.jsonl").write_text(json.dumps(first) + "\n")
    (run / "tracking.json").write_text('{"wandb": "other"}')
    (run / "tensorboard").mkdir(exist_ok=True)
    done = electra(*words, f"start={finished_run}", "schedule.warmup=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("of an earlier run: kept in") == 1 and first not in read_metrics(run)
    assert not (run / "tracking.json").exists() and "0.123" not in (run / "before-after.md").read_text()
    kept = {"export", "metrics.jsonl", "samples.json", "tensorboard", "tracking.json"}
    assert {path.name for path in (run / "earlier-1").iterdir()} == kept
    assert_exported(run)

    # the same settings: a job that was taken away before its first checkpoint goes on as the same tracked run
    shutil.rmtree(run / "checkpoints")
    (run / "tracking.json").write_text('{"wandb": "same"}')
    again = electra(*words, f"start={finished_run}", "schedule.warmup=2")
    assert again.returncode == 0 and (run / "tracking.json").exists()
    assert {path.name for path in (run / "earlier-2").iterdir()} == {"export"}


def test_steps_that_are_trained_again_are_exported_again(finished_run, recipe, prepared, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    shutil.rmtree(run / "checkpoints" / "step-000000040")
    other = electra("pretrain", recipe, f"data={prepared}", f"run={run}", "train.accumulate=4")
    assert other.returncode == 0 and final_weights(run) != final_weights(finished_run)
    assert_exported(run)
    assert (run / "earlier-1" / "export" / "model.safetensors").is_file()


def test_a_stage_whose_warm_up_fills_it_is_told_with_its_own_steps(finished_run, recipe, prepared, tmp_path):
    run = tmp_path / "run"
    words = ("pretrain", recipe, f"data={prepared}", f"run={run}", "schedule.warmup=60", "train.keep_every=3")
    assert "warm-up takes 60 of 2 steps" in electra(*words, "train.steps=2").stderr
    done = electra(*words, "train.steps=8", "train.save_every=1000")
    assert "warm-up takes 6 of 6 steps" in done.stderr and done.stderr.count("learning rate never") == 1

    # checkpoints that are kept for ever need no multiple of save_every
    assert [folder.name[-1] for folder in checkpoint_folders(run / "checkpoints")] == ["3", "6", "8"]


def test_other_settings_for_a_finished_run_are_refused_without_a_word_that_is_not_true(finished_run, recipe, prepared):
    words = ("pretrain", recipe, f"data={prepared}", f"run={finished_run}", "seed=9", "train.steps=50")
    refused = electra(*words)
    assert refused.returncode == 2 and "seed: 3 -> 9" in refused.stderr
    assert "extending the finished run" not in refused.stderr and "finish this one" not in refused.stderr


def test_a_run_without_its_settings_is_told_to_restore_them(finished_run, recipe, prepared, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    (run / "config.toml").unlink()
    for words in (("pretrain", recipe, f"data={prepared}", f"run={run}"), ("evaluate", run)):
        refused = electra(*words)
        assert refused.returncode == 4, refused.stderr
        assert f"{run}/config.toml is missing. Restore it: state.json" in refused.stderr


def test_a_damaged_checkpoint_that_was_set_aside_is_no_problem_of_the_run(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    newest = checkpoint_folders(run / "checkpoints")[-1]
    newest.rename(newest.with_name(f"damaged-{newest.name}-77"))
    done = electra("verify", run)
    assert done.returncode == 0, done.stderr


AUTO, CPU = ("optimizer.weight_decay=auto", "optimizer.total_decay=2.0"), "train.device=cpu"


@pytest.mark.parametrize("budget", ["train.steps=60", "train.minutes=0.05"])
def test_weights_without_a_gradient_shrink_by_the_total(budget, recipe, prepared, tmp_path, monkeypatch):
    call, fractions, shares, positions = Step.__call__, [], [], []

    def step(it: Step, batch, number, fraction, share):
        """Rows of the table of positions that no text reaches: what changes them is decay."""
        (table,) = (p for name, p in it.objective.named_parameters() if "positions" in name and "generator" not in name)
        positions.append(table.detach()[24:].double())
        fractions.append(fraction)
        shares.append(share)
        return call(it, batch, number, fraction, share)

    monkeypatch.setattr(Step, "__call__", step)
    if "minutes" in budget:  # by a clock that goes on by as much at every look
        clock = itertools.count(step=0.01)
        monkeypatch.setattr("electra.train.loop.time", SimpleNamespace(monotonic=lambda: next(clock)))
    rare = ("train.save_every=100000", "train.evaluate_every=100000", "train.log_every=100000")
    triangle = ("schedule.kind=linear", "schedule.warmup=0.1", CPU)
    done = electra("pretrain", recipe, f"data={prepared}", f"run={tmp_path / 'run'}", budget, *rare, *triangle, *AUTO)
    assert done.returncode == 0, done.stderr
    if "steps" in budget:  # weight decay is a number: what the rates add up to is the triangle's area
        assert not any(shares)
        shares = [fraction / (60 / 2) for fraction in fractions]
    assert len(shares) > 30 and sum(shares) == pytest.approx(1, rel=0.06)
    left = math.prod(1 - 2.0 * share for share in shares[:-1])
    assert (positions[-1] / positions[0]).numpy() == pytest.approx(left, rel=1e-4)


def test_a_run_with_a_total_decay_goes_on_to_the_same_bits(recipe, prepared, tmp_path):
    run, words = tmp_path / "run", ("pretrain", recipe, f"data={prepared}", "train.steps=8", CPU)
    assert electra(*words, f"run={run}", *AUTO).returncode == 0
    whole = final_weights(run)
    shutil.rmtree(run / "checkpoints" / "step-000000008")
    assert electra(*words, f"run={run}", *AUTO).returncode == 0
    assert final_weights(run) == whole


def test_a_run_of_a_recipe_that_had_a_number_goes_on_with_it(recipe, prepared, tmp_path):
    """Twice, since the folder's settings are written anew; another number is another run."""
    run, words = tmp_path / "run", ("pretrain", recipe, f"data={prepared}", "train.steps=8", CPU)
    assert electra(*words, f"run={run}", "optimizer.weight_decay=0.5").returncode == 0
    whole, config = final_weights(run), run / "config.toml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if "total_decay" not in line))
    for _ in range(2):
        shutil.rmtree(run / "checkpoints" / "step-000000008")
        done = electra(*words, f"run={run}", *AUTO)
        assert done.returncode == 0, done.stderr
        assert final_weights(run) == whole
    refused = electra(*words, f"run={run}", "optimizer.weight_decay=0.4")
    assert refused.returncode == 2 and "optimizer.weight_decay: 0.5 -> 0.4" in refused.stderr
