"""Several tasks with one encoder, and tasks that start from another task's encoder."""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from electra.base.errors import ElectraError
from electra.base.jobs import Signals
from electra.data.tokenizer import load_tokenizer
from electra.finetuning.classification import ClassificationSettings
from electra.finetuning.plan import MethodSettings, PlannedTask
from electra.finetuning.seeds import build_model, load_start, plan_item, prepare_task, run_seed
from electra.finetuning.training import Encoded, Finetuned, JointBatches, JointObjective, Prepared, collate
from helpers import electra

FAST = ("epochs=1", "lr=4e-3", "batch=8", "evaluations=2", "length=24")


def beings(path: Path, count: int, seed: int, number: bool = False) -> Path:
    """Which being walks, or how many words there are."""
    rng = random.Random(seed)
    lines = ["text,label"]
    for row in range(count):
        being, words = rng.choice(["barak", "lonute"]), rng.randint(2, 9)
        text = " ".join([being, *rng.choices(["reads", "jumps", "the", "back"], k=words), str(row)])
        lines.append(f"{text},{words / 10 if number else being}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("tables")
    return [beings(folder / "one.csv", 80, 1), beings(folder / "two.csv", 24, 2, number=True)]


@pytest.fixture(scope="module")
def joint(tmp_path_factory, toy_model, tables) -> Path:
    out = tmp_path_factory.mktemp("joint") / "out"
    done = electra("finetune", toy_model, "+".join(map(str, tables)), *FAST, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "one: one encoder, trained together with two" in done.stderr
    return out


def part(toy_model, rows: int, epochs: int = 1, **method) -> Prepared:
    task = ClassificationSettings(labels=("a", "b"), epochs=epochs).build(load_tokenizer(toy_model), 24, {})
    table = [{"text": f"the barak {'walks ' * (row % 5)}{row}", "label": "ab"[row % 2]} for row in range(rows)]
    plan = SimpleNamespace(name=str(rows), method=MethodSettings(batch=4, **method))
    return Prepared(PlannedTask(plan, task, None, {}), Encoded.of(task, table), {})


def test_by_size_every_task_has_the_batches_it_would_have_alone(toy_model):
    parts = [part(toy_model, 40), part(toy_model, 9, epochs=2)]
    data = JointBatches(parts, "size", seed=0)
    batches = list(data.batches(0))
    tasks = [batch.task for batch in batches]
    assert data.steps == len(batches) == 10 + 2 * 3 and tasks.count(0) == 10
    assert sum(len(batch.ids) for batch in batches if batch.task == 1) == 2 * 9
    assert sorted(tasks) != tasks  # mixed, not one after the other
    assert tasks != [batch.task for batch in JointBatches(parts, "size", seed=1).batches(0)]


def test_evenly_every_task_has_as_many_batches(toy_model):
    data = JointBatches([part(toy_model, 40), part(toy_model, 9)], "even", seed=0)
    tasks = [batch.task for batch in data.batches(0)]
    assert tasks.count(0) == tasks.count(1) == 7 and data.steps == 14


def test_a_resumed_run_goes_on_with_the_same_batches(toy_model):
    data = JointBatches([part(toy_model, 40), part(toy_model, 9)], "even", seed=3)
    whole = list(data.batches(0))
    for first in (1, 5, 13):
        rest = list(data.batches(first))
        assert [(it.task, it.ids.tolist()) for it in rest] == [(it.task, it.ids.tolist()) for it in whole[first:]]


def test_a_batch_trains_the_encoder_and_the_head_of_its_own_task(toy_model, tables):
    planned = plan_item("+".join(map(str, tables)), {"length": 24}, load_start(toy_model))
    prepared = list(map(prepare_task, planned))
    models = [build_model(it, 0) for it in planned]
    models = [Finetuned(models[0].encoder, model.head) for model in models]
    objective = JointObjective(models, prepared)
    batch = replace(collate(prepared[1].task, prepared[1].train.examples[:4], with_targets=True), task=1)
    loss = objective(batch)
    loss.total.backward()
    assert {name for name, it in objective.named_parameters() if it.grad is None} == {
        name for name, _ in objective.named_parameters() if name.startswith("heads.0.")
    }
    alone = prepared[1].task.loss(models[1](batch), batch.targets)
    assert loss.sums.keys() == {"two/loss", "two/batches"} and alone.shape == ()


def test_every_task_has_a_folder_of_its_own_and_the_encoder_is_one(joint, tables):
    one, two = (load_file(joint / name / "seed-0" / "model.safetensors") for name in ("one", "two"))
    shared = [name for name in one if name.startswith("electra.")]
    assert len(shared) > 10 and all(torch.equal(one[name], two[name]) for name in shared)
    results = json.loads((joint / "results.json").read_text())["tasks"]
    assert results["one"]["metric"] == "accuracy" and results["two"]["metric"] == "spearman"
    assert "one encoder, trained together with one" in (joint / "results.md").read_text()
    for name, table in zip(("one", "two"), tables, strict=True):
        folder = joint / name / "seed-0"
        assert json.loads((folder / "task.json").read_text())["together"] == ["one", "two"]
        assert electra("evaluate", folder, table, "--json").returncode == 0
        curve = json.loads((folder / "result.json").read_text())["curve"]
        assert len(curve) == 2 and curve[0].keys() >= {"step", results[name]["metric"]}
    assert "barak" in electra("predict", joint / "one" / "seed-0", "the barak walks").stdout


def test_the_same_command_keeps_it_and_another_company_is_refused(joint, toy_model, tables):
    again = electra("finetune", toy_model, "+".join(map(str, tables)), *FAST, "--out", joint)
    assert again.returncode == 0 and "1 finished run kept" in again.stderr
    alone = electra("finetune", toy_model, tables[0], *FAST, "--out", joint)
    assert alone.returncode == 2 and "holds runs trained together with two. " in alone.stderr


def test_an_interrupted_joint_run_ends_with_the_same_weights(joint, toy_model, tables, tmp_path):
    words = {"epochs": 1, "lr": 4e-3, "batch": 8, "evaluations": 2, "length": 24}
    planned = plan_item("+".join(map(str, tables)), words, load_start(toy_model))
    prepared = list(map(prepare_task, planned))

    class Stop(Signals):
        def __init__(self, after: int):
            super().__init__()
            self.left = after

        @property
        def received(self):
            self.left -= 1
            return 15 if self.left < 0 else None

        @received.setter
        def received(self, value):
            pass

    with pytest.raises((ElectraError, KeyboardInterrupt)):
        run_seed(prepared, 0, tmp_path, Stop(4))
    assert list(tmp_path.glob("one+two/training/seed-0/checkpoints/*")) and not list(
        tmp_path.glob("*/seed-0/task.json")
    )
    run_seed(prepared, 0, tmp_path, Signals())
    for name in ("one", "two"):
        before, after = (load_file(it / name / "seed-0" / "model.safetensors") for it in (joint, tmp_path))
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_tasks_with_other_methods_are_not_trained_together(toy_model, tables, tmp_path):
    toml = tmp_path / "slow.toml"
    toml.write_text(f'data = "{tables[1]}"\nkind = "regression"\ntext = ["text"]\nlr = 1e-5\n')
    done = electra("finetune", toy_model, f"{tables[0]}+{toml}", "--out", tmp_path / "out")
    assert done.returncode == 2 and "one and slow are trained together, but with different methods (lr: " in done.stderr
    twice = electra("finetune", toy_model, f"{tables[0]}+{tables[0]}", "--out", tmp_path / "out")
    assert twice.returncode == 2 and "twice" in twice.stderr
    half = electra("finetune", toy_model, f"{tables[0]}+", "--out", tmp_path / "out")
    assert half.returncode == 2 and "names no task before or after a +" in half.stderr


def test_a_task_starts_from_the_encoder_of_another_which_is_done_first(joint, toy_model, tables, tmp_path):
    out = tmp_path / "out"
    done = electra("finetune", toy_model, tables[1], tables[0], *FAST, "start=one", "--out", out)
    assert done.returncode == 0, done.stderr
    assert f"started from {out / 'one' / 'seed-0'}" in done.stdout
    assert f"started from {out / 'one' / 'seed-0'}" in (out / "results.md").read_text()
    stored = {name: json.loads((out / name / "settings.json").read_text()) for name in ("one", "two")}
    first, second = (load_start(it).sha256 for it in (toy_model, out / "one" / "seed-0"))
    assert stored["one"]["model_sha256"] == first != second == stored["two"]["model_sha256"]
    # again, now that it is there; from a path; and from another folder of results
    again = electra("finetune", toy_model, tables[1], *FAST, "start=one", "--out", out)
    assert again.returncode == 0 and "1 finished run kept" in again.stderr
    path = electra("finetune", toy_model, tables[1], *FAST, f"start={out / 'one'}", "--out", tmp_path / "path")
    assert path.returncode == 0 and "started from" in path.stdout
    weights = [load_file(it / "two" / "seed-0" / "model.safetensors") for it in (out, tmp_path / "path", joint)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_a_start_that_is_not_there_says_what_to_do(toy_model, tables, tmp_path):
    done = electra("finetune", toy_model, tables[1], "start=mnli", "--out", tmp_path / "out")
    assert (
        done.returncode == 3
        and "mnli holds no fine-tuned model. Fine-tune on mnli first" in done.stderr
        and "--out" in done.stderr
    )
    done = electra("finetune", toy_model, tables[0], "start=one", "--out", tmp_path / "out")
    assert done.returncode == 2 and "one is the task itself" in done.stderr
