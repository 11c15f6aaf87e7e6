"""Fine-tuning never loses work: kill -9 inside a seed, and the same command ends with the same weights."""

import json
import time
from pathlib import Path

import pytest

from electra.train.checkpoint import checkpoint_folders
from electra.train.log import read_metrics
from helpers import Forked, electra

METHOD = ("epochs=12", "batch=4", "evaluations=3", "keep=best", "save_minutes=0.000001", "optimizer=muon")


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    rows = [{"text": f"the barak {'walks' if n % 2 else 'reads'} {n}", "label": "ab"[n % 2]} for n in range(24)]
    path = tmp_path_factory.mktemp("table") / "my.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(model: Path, table: Path, out: Path, *more: str) -> tuple:
    return ("finetune", model, table, *METHOD, *more, "--out", out)


def kill_after(step: int, arguments: tuple, training: Path) -> None:
    process = Forked(*arguments)
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        folders = checkpoint_folders(training / "checkpoints")
        if folders and int(folders[-1].name.removeprefix("step-")) >= step:
            break
        time.sleep(0.002)
    assert process.poll() is None, "it was over before it could be killed"
    process.kill()
    process.wait()


def outcome(out: Path) -> tuple:
    seed = out / "my" / "seed-0"
    result = json.loads((seed / "result.json").read_text())
    timeless = {key: value for key, value in result.items() if key != "seconds"}
    return (seed / "model.safetensors").read_bytes(), timeless


def test_a_seed_killed_twice_ends_with_the_same_weights_scores_and_metrics(toy_model, table, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert electra(*words(toy_model, table, whole)).returncode == 0
    training = killed / "my" / "training" / "seed-0"
    for step in (9, 30):
        kill_after(step, words(toy_model, table, killed), training)
        assert not (killed / "my" / "seed-0").exists()
    again = electra(*words(toy_model, table, killed))
    assert again.returncode == 0 and "resuming at step" in again.stderr
    assert outcome(whole) == outcome(killed)
    kinds = [
        [(record["kind"], record["step"], record.get("loss")) for record in read_metrics(folder)]
        for folder in (training, whole / "my" / "training" / "seed-0")
    ]
    assert kinds[0] == kinds[1] and {kind for kind, *_ in kinds[0]} == {"train", "dev"}
    assert not list(killed.rglob("checkpoints")), "a finished seed needs none"


def test_what_was_begun_with_other_settings_begins_again(toy_model, table, tmp_path):
    training = tmp_path / "my" / "training" / "seed-0"
    kill_after(3, words(toy_model, table, tmp_path), training)
    again = electra(*words(toy_model, table, tmp_path, "lr=0.001"))
    assert again.returncode == 0 and "resuming" not in again.stderr
    assert "my seed 0 was started with other settings, so it starts over" in again.stderr
    assert electra(*words(toy_model, table, tmp_path / "other", "lr=0.001")).returncode == 0
    assert outcome(tmp_path) == outcome(tmp_path / "other")
