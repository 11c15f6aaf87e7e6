"""Recipes side by side, as people use it: short runs on the small corpus."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from electra import compare
from electra.base.errors import DataError, DivergedError, MachineError, MemoryExhaustedError, SettingsError
from electra.commands.console import print_table
from electra.inspector.compare import (
    STORED_RUN,
    Budget,
    ComparedRun,
    Tasks,
    Yardsticks,
    comparison_table,
    parse_budget,
    summary,
    variants,
    with_steps,
)
from electra.inspector.probe import LabelledTexts
from electra.pretraining.settings import resolve
from helpers import electra, words_of

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("2m", Budget("seconds", 120)),
        ("90s", Budget("seconds", 90)),
        ("0.5h", Budget("seconds", 1800)),
        ("3e14 flops", Budget("flops", 3e14)),
        ("3e14 paper flops", Budget("paper flops", 3e14)),
        ("500 steps", Budget("steps", 500)),
    ],
)
def test_budgets_are_time_flops_or_steps(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["", "2", "two minutes", "-3m", "0s", "1e400 steps"])
def test_a_budget_that_is_none_is_refused(text):
    with pytest.raises(SettingsError, match='Use "2m"'):
        parse_budget(text)


def test_varying_a_key_makes_a_variant_of_every_recipe_and_value():
    made = variants(["a", "b"], ["data=x"], "2m", "generator.width=0.5,1")
    assert [v.name for v in made] == [f"{r} generator.width={w}" for r in "ab" for w in ("0.5", "1")]
    assert made[1].overrides == ("data=x", "generator.width=1")


def test_the_table_has_median_and_all_seeds_and_leaves_gaps_where_nothing_was_measured():
    results = [ComparedRun("a", seed, 10, 1e9, 1.0, {"auc": auc}, None) for seed, auc in enumerate((0.6, 0.9, 0.7))]
    results.append(ComparedRun("b", 0, 20, 2e9, 1.0, {"auc": float("nan")}, 0.5))
    results.append(ComparedRun("b", 1, 20, 2e9, 1.0, {}, None, diverged=True))
    rows = summary(results)
    assert rows[0]["auc"] == {"median": 0.7, "least": 0.6, "greatest": 0.9, "seeds": [0.6, 0.9, 0.7]}
    assert "auc" not in rows[1]
    table = comparison_table(results).markdown()
    assert rows[1]["probe"]["median"] == 0.5 and "| b | 2 (1 diverged) | 20 |" in table
    assert "| a | 3 | 10 | – | – | 1.00e+09 | – | 0.700 (0.600, 0.900, 0.700) | – |" in table
    assert "| 0.700 (0.600–0.900) | – |" in comparison_table(results, is_wide=False).markdown()


@pytest.fixture(scope="module")
def compared(tmp_path_factory, recipe, prepared):
    folder = tmp_path_factory.mktemp("compare")
    table = folder / "table.csv"
    lines = [f"the {'barak' if n % 2 else 'selin'} walks {n},{'a' if n % 2 else 'b'}" for n in range(60)]
    table.write_text("sentence,kind\n" + "\n".join(lines) + "\n")
    words = ["compare", recipe, f"{recipe}+masked-lm", f"data={prepared}", "--seeds", "2"]
    words += ["--budget", "6 steps", "--out", folder / "out"]
    words += ["--table", table, "--text", "sentence", "--label", "kind"]
    done = electra(*words)
    assert done.returncode == 0, done.stderr
    return folder / "out", words, done


def test_every_recipe_is_trained_for_every_seed_and_measured(compared, recipe):
    out, _, done = compared
    rows = {row["variant"]: row for row in json.loads((out / "results.json").read_text())}
    assert list(rows) == [str(recipe), f"{recipe}+masked-lm"]
    assert all(row["seeds"] == 2 and 0 <= row["probe"]["median"] <= 1 for row in rows.values())
    assert "auc" in rows[str(recipe)] and "auc" not in rows[f"{recipe}+masked-lm"]
    assert all(row["steps"] == 6 and row["flops"] > 0 and row["paper_flops"] > 0 for row in rows.values())
    assert all(row["learning_rate"] == 1e-3 for row in rows.values())
    for state in out.glob("*/seed-*/run/run_state.json"):
        real = json.loads(state.read_text())["tokens"]  # without padding
        assert json.loads((state.parents[1] / "result.json").read_text())["tokens"] == real <= 6 * 8 * 24
    assert [run["seed"] for run in rows[str(recipe)]["runs"]] == [0, 1]
    assert (out / "comparison.png").stat().st_size > 5000
    page = (out / "comparison.md").read_text()
    assert page.count("\n") == 4
    for row in rows.values():
        assert f"({', '.join(f'{score:.3f}' for score in row['mlm_loss']['seeds'])})" in page
    assert "comparison.md" in done.stdout


def test_a_frozen_generator_without_a_source_is_refused_with_the_way_to_one(recipe, prepared, tmp_path):
    for recipes in (f"{recipe}+two-stage", f"{recipe}+frozen-generator", "two-stage"):
        done = electra("compare", recipes, f"data={prepared}", "--out", tmp_path / "out")
        assert done.returncode == 2 and "give generator.source" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_probe_runs_where_train_device_says(recipe, prepared, tmp_path, monkeypatch):
    devices = []

    def probe(table, network, *_):
        devices.append(next(network.encoder.parameters()).device.type)
        return 0.5

    monkeypatch.setattr("electra.inspector.compare.probe_accuracy", probe)
    monkeypatch.setattr("electra.inspector.compare.choose_device", lambda train: torch.device("meta"))
    labelled = LabelledTexts(["a", "b"], np.array(["x", "y"]), 1)
    words = [f"data={prepared}", "train.device=cpu"]
    compare([str(recipe)], words, seeds=1, budget="1 steps", yardsticks=Yardsticks(labelled), out=tmp_path / "out")
    assert devices == ["meta"]


def test_finished_runs_are_not_trained_again_and_another_budget_needs_another_folder(compared):
    out, words, _ = compared
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    again = electra(*words)
    assert again.returncode == 0, again.stderr
    assert stamps == {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    other = electra(*[("7 steps" if word == "6 steps" else word) for word in words])
    assert other.returncode == 2 and "not the same: budget" in other.stderr
    without = electra(*words[: words.index("--table")])
    assert without.returncode == 2 and "not the same: table" in without.stderr


def test_a_cut_plan_is_one_line_and_not_a_traceback(compared):
    out, words, _ = compared
    path = next(out.rglob("comparison.json"))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    done = electra(*words)
    path.write_bytes(whole)
    assert done.returncode == 4 and f"electra: {path} cannot be read" in done.stderr.splitlines()[-1]


def test_seeds_of_other_shards_do_not_join(recipe, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("electra.inspector.compare.pretrain", lambda *_: {"auc": 0.7})
    shards, out = shutil.copytree(prepared, tmp_path / "shards"), tmp_path / "out"
    words = [str(recipe)], [f"data={shards}"]
    compare(*words, seeds=1, budget="1 steps", out=out)
    plan = json.loads((out / "comparison.json").read_text())
    manifest = (shards / "manifest.json").read_text()
    (shards / "manifest.json").write_text(manifest + " ")
    with pytest.raises(SettingsError, match=f"not the same: data={shards}"):
        compare(*words, seeds=2, budget="1 steps", out=out)
    # begun by a version that did not know the data
    (out / "comparison.json").write_text(json.dumps({key: plan[key] for key in plan if not key.startswith("data=")}))
    assert len(compare(*words, seeds=2, budget="1 steps", out=out)) == 2


def test_seeds_that_had_another_number_of_steps_are_shown_from_to():
    runs = [ComparedRun("a", seed, steps, 1e9 * steps, 1.0, {}, None) for seed, steps in enumerate((1200, 900, 1000))]
    (row,) = summary(runs)
    assert (row["steps"], row["flops"], row["paper_flops"]) == ([900, 1200], [9e11, 1.2e12], None)
    assert "| a | 3 | 900–1,200 | – | – | 9.00e+11–1.20e+12 | – |" in comparison_table(runs).markdown()


def test_a_budget_of_time_shows_the_seconds_that_the_runs_took(recipe, prepared, tmp_path, monkeypatch):
    runs = [ComparedRun("a", seed, 10, 1e9, seconds, {}, None) for seed, seconds in enumerate((41.2, 23.0))]
    assert "| a | 2 | 23–41 | 10 |" in comparison_table(runs, is_timed=True).markdown()
    assert "seconds" not in comparison_table(runs).markdown()
    monkeypatch.setattr("electra.inspector.compare.step_seconds", lambda settings: 1.0)
    words = ["compare", recipe, f"data={prepared}", "--seeds", 1, "--budget", "2s", "--out", tmp_path / "out"]
    assert "seconds" in electra(*words).stdout
    assert "| recipe | seeds | seconds taken | steps |" in (tmp_path / "out" / "comparison.md").read_text()


def test_the_seconds_of_a_run_that_went_on_are_those_of_all_its_processes(recipe, prepared, tmp_path, monkeypatch):
    def pretrain(settings, _):
        Path(settings.run).mkdir()
        (Path(settings.run) / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "seconds": 4000.0}\n')
        return {"auc": 0.7}

    monkeypatch.setattr("electra.inspector.compare.pretrain", pretrain)
    (result,) = compare([str(recipe)], [f"data={prepared}"], seeds=1, budget="1 steps", out=tmp_path / "out")
    assert result.seconds == 4000


def test_names_and_scores_are_whole_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"modern-tiny+masked-lm optimizer.betas=[0.9,0.9{digit}]" for digit in (5, 9)]
    scores = {f"task{n}": [50.0 + n] for n in range(7)}
    runs = [
        ComparedRun(it, seed, 9, 1e9, 1.0, {"auc": 0.5, "mlm_loss": 6.5}, None, tasks=scores, tokens=10**6)
        for it in names
        for seed in (0, 1)
    ]
    table = comparison_table(runs, is_wide=False)
    print_table(table)
    lines = capsys.readouterr().out.splitlines()
    firsts = "".join(line.split("│")[1].strip() for line in lines if line[0] == "│").replace(" ", "")
    whole = "".join(names).replace(" ", "")
    assert firsts == whole * firsts.count(whole) and firsts and max(map(len, lines)) <= 80
    shown = " ".join(lines)
    assert all(cell in shown for cell in (*table.columns, *table.rows[0][1:]))


def test_a_recipe_of_a_run_that_was_made_longer_is_compared(recipe, prepared, tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr("electra.inspector.compare.pretrain", lambda settings, _: trained.append(settings) or {})
    (tmp_path / "longer.toml").write_text(recipe.read_text().replace("steps = 40", "steps = 50\nstages = [40]"))
    compare([str(tmp_path / "longer.toml")], [f"data={prepared}"], seeds=1, budget="20 steps", out=tmp_path / "out")
    assert (trained[0].train.steps, trained[0].train.stages, trained[0].schedule.warmup) == (20, (), 2)


@pytest.mark.parametrize("word", ["train.steps=40", "train.minutes=1", "train.save_every=3", "train={log_every=7}"])
def test_what_the_budget_decides_is_not_given_too(word):
    with pytest.raises(SettingsError, match=r"^train\.\w+ is set by the comparison, from the budget"):
        variants(["a"], [word], "1s")


def test_values_in_brackets_are_one_value():
    made = variants(["a"], [], "2m", "optimizer.betas=[0.9,0.95],[0.9, 0.99]")
    assert [it.overrides[-1] for it in made] == ["optimizer.betas=[0.9,0.95]", "optimizer.betas=[0.9, 0.99]"]


def test_a_value_without_effect_is_said_before_training(recipe, prepared, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("electra.inspector.compare.pretrain", lambda *_: {})
    words = {"vary": "generator.width=0.25,0.5", "seeds": 1, "budget": "1 steps", "out": tmp_path / "out"}
    compare([f"{recipe}+masked-lm"], [f"data={prepared}"], **words)
    assert caplog.text.count("generator.width will have no effect") == 2


def test_a_file_is_a_recipe_whatever_its_name(recipe, prepared, tmp_path):
    (tmp_path / "w=0.5").mkdir()
    shutil.copy(recipe, tmp_path / "w=0.5" / "config.toml")
    words = ["compare", "w=0.5/config.toml", "w=0.5/config.toml+masked-lm", f"data={prepared}", "optimizer.lr=1e+30"]
    done = electra(*words, "--seeds", "1", "--budget", "2 steps", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("1 (1 diverged)") == 2, done.stderr
    assert "comparison.md" in done.stdout and "comparison.png" not in done.stdout


def test_a_task_without_files_is_answered_with_the_setting_of_this_command(recipe, prepared, tmp_path):
    done = electra("compare", recipe, f"data={prepared}", "--tasks", "cola", "--out", tmp_path / "out")
    assert done.returncode == 2 and "where are the files of cola? Add finetune.data=FOLDER" in done.stderr


def test_an_error_is_no_score_that_could_be_averaged(recipe, prepared, tmp_path):
    for split in ("train", "dev"):
        rows = [json.dumps({"text": f"{split} {n}", "label": n / 7}) + "\n" for n in range(9)]
        (tmp_path / f"{split}.jsonl").write_text("".join(rows))
    words = (
        "--tasks",
        tmp_path / "train.jsonl",
        f"finetune.files.dev={tmp_path / 'dev.jsonl'}",
        "--out",
        tmp_path / "out",
    )
    done = electra("compare", recipe, f"data={prepared}", *words, "finetune.metric=mse", "--budget", "1 steps")
    assert done.returncode == 2 and "train: mse is better the lower it is" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_row_without_a_label_is_not_a_table_without_the_column(recipe, tmp_path):
    rows = [{"text": f"a {n}", "label": None if n == 2 else n % 2} for n in range(9)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = electra("compare", recipe, "data=x", "--table", tmp_path / "t.jsonl", "--out", tmp_path / "out")
    assert done.returncode == 3 and "row 3 has nothing in its 'label'" in done.stderr


def test_a_recipe_named_twice_is_refused():
    with pytest.raises(SettingsError, match="named twice"):
        variants(["a", "a"], [], "2m")


@pytest.mark.slow
def test_the_same_flops_are_fewer_steps_for_a_dearer_objective(recipe, prepared, tmp_path):
    done = electra(
        *("compare", recipe, f"{recipe}+all-tokens", f"data={prepared}", "--seeds", "1", "--jobs", "2"),
        *("--budget", "2e9 flops", "--out", tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr
    plain, dear = json.loads((tmp_path / "out" / "results.json").read_text())
    assert dear["steps"] < plain["steps"]
    assert dear["flops"] == pytest.approx(plain["flops"], rel=0.2) == pytest.approx(2e9, rel=0.2)


def test_wrong_settings_of_any_recipe_stop_everything_before_it_starts(recipe, prepared, tmp_path):
    done = electra(
        *("compare", recipe, f"{recipe}+electric", f"data={prepared}", "generator.kind=transformer"),
        *("--budget", "2 steps", "--out", tmp_path / "out"),
    )
    assert done.returncode == 2 and "two_tower" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("word", ["train.processes=2", "train.parallel=fsdp"])
def test_what_needs_several_processes_is_refused_before_anything_is_written(word, recipe, prepared, tmp_path):
    done = electra("compare", recipe, f"data={prepared}", word, "--budget", "2 steps", "--out", tmp_path / "out")
    assert done.returncode == 2 and word.partition("=")[0] in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_that_diverges_is_a_result_and_the_others_go_on(recipe, prepared, tmp_path):
    words = ["compare", recipe, f"data={prepared}", "--vary", "optimizer.lr=1e-3,1e30", "--seeds", "1"]
    done = electra(*words, "--budget", "6 steps", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    good, bad = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (good["diverged"], bad["diverged"]) == (0, 1)
    assert "auc" in good and "auc" not in bad and "diverged" in done.stdout


@pytest.mark.parametrize(("error", "finished"), [(MemoryExhaustedError, 2), (MachineError, 1)])
def test_what_is_finished_is_in_the_report_when_a_run_fails(error, finished, recipe, prepared, tmp_path, monkeypatch):
    """A run that does not fit keeps no other from its turn; a broken machine stops all."""

    def pretrain(settings, _):
        if settings.objective.kind == "token_recovery":
            raise error("no room")
        return {"auc": 0.7}

    monkeypatch.setattr("electra.inspector.compare.pretrain", pretrain)
    recipes = [f"{recipe}", f"{recipe}+all-tokens", f"{recipe}+masked-lm"]
    with pytest.raises(error, match="no room"):
        compare(recipes, [f"data={prepared}"], seeds=1, budget="1 steps", out=tmp_path / "out")
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["variant"] for row in rows] == [recipes[0], recipes[2]][:finished]
    assert (tmp_path / "out" / "comparison.md").read_text().count("| 0.700 |") == finished
    assert (tmp_path / "out" / "comparison.png").is_file() == (error is MemoryExhaustedError)


@pytest.mark.parametrize("workers", [(), pytest.param(("--jobs", "2", "--task-jobs", "2"), marks=pytest.mark.slow)])
def test_several_budgets_and_tasks_give_a_curve_over_flops(workers, recipe, prepared, tmp_path):
    rows = [f"{'barak sees' if n % 2 else 'selin hears'} it {n},{'a' if n % 2 else 'b'}" for n in range(80)]
    (tmp_path / "kinds.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    words = ["compare", recipe, f"{recipe}+masked-lm", f"data={prepared}", "finetune.epochs=1", "finetune.batch=16"]
    words += ["--tasks", tmp_path / "kinds.csv", "--task-seeds", "2", "--seeds", "1", "--out", tmp_path / "out"]
    done = electra(*words, *workers, "--budget", "2e8 paper flops, 4e8 paper flops")
    assert done.returncode == 0, done.stderr
    small, large, masked_small, masked_large = json.loads((tmp_path / "out" / "results.json").read_text())
    assert small["variant"] == f"{recipe}, 2e8 paper flops" and large["steps"] == pytest.approx(
        2 * small["steps"], abs=1
    )
    assert small["paper_flops"] == pytest.approx(2e8, rel=0.1) == pytest.approx(masked_small["paper_flops"], rel=0.1)
    run = json.loads(next((tmp_path / "out").rglob("result.json")).read_text())
    assert len(run["tasks"]["kinds"]) == 2 and all(0 <= score <= 100 for score in run["tasks"]["kinds"])
    assert masked_large["tasks"]["median"] == masked_large["kinds"]["median"]
    assert "mean of tasks" in (tmp_path / "out" / "comparison.md").read_text()


def test_the_mean_of_tasks_is_that_of_their_medians():
    run = ComparedRun("a", 0, 1, 1.0, 1.0, {}, None, tasks={"cola": [10, 30, 20], "rte": [50, 60, 58]})
    assert run.measure("tasks") == 39 and run.measure("cola") == 20 and run.measure("glue5") is None


def test_other_tasks_stand_beside_the_mean_of_glues_five():
    five = {"cola": [10, 30, 20], "sst2": [80], "mrpc": [70], "stsb": [60], "rte": [50]}
    run = ComparedRun("a", 0, 1, 1.0, 1.0, {}, None, tasks={**five, "mnli": [100], "qnli": [100]})
    assert run.measure("glue5") == 56 and run.measure("tasks") is None
    (row,) = summary([run])
    assert row["glue5"]["median"] == row["runs"][0]["glue5"] == 56 and row["runs"][0]["tasks"]["cola"] == [10, 30, 20]
    assert "| 56.0 |" in comparison_table([run]).markdown()


def test_a_mean_of_fewer_tasks_does_not_stand_beside_one_of_more():
    runs = [ComparedRun(name, 0, 1, 1.0, 1.0, {}, None, tasks=tasks) for name, tasks in (
        ("a", {"kinds": [90], "moods": [50]}), ("b", {"kinds": [80]}), ("c", {"moods": [60], "kinds": [70]})
    )]  # fmt: skip
    rows = {row["variant"]: row for row in summary(runs)}  # fine-tuning diverged on b's moods, where all score low
    assert "tasks" not in rows["b"] and rows["b"]["runs"][0]["tasks"] == {"kinds": [80]}
    assert [rows[name]["tasks"]["median"] for name in "ac"] == [70, 65]
    assert "| b | 1 | 1 | – | – | 1.00e+00 | – | – | 80.0 | – |" in comparison_table(runs).markdown()


def test_scores_on_other_tables_do_not_join(recipe, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("electra.inspector.compare.pretrain", lambda *_: {"auc": 0.7})
    monkeypatch.setattr("electra.inspector.compare.finetuned_scores", lambda *_: {"kinds": [50]})
    table, out = tmp_path / "kinds.csv", tmp_path / "out"
    yardsticks = Yardsticks(tasks=Tasks((str(table),), {}))
    words = {"seeds": 1, "budget": "1 steps", "yardsticks": yardsticks, "out": out}
    for label in "ab":
        table.write_text("text,label\n" + "".join(f"it is {n},{'xy'[n % 2]}{label}\n" for n in range(20)))
        if label == "b":
            with pytest.raises(SettingsError, match=f"not the same: files of {table}"):
                compare([str(recipe), f"{recipe}+masked-lm"], [f"data={prepared}"], **words)
            plan = json.loads((out / "comparison.json").read_text())
            del plan[f"files of {table}"]  # begun by a version that did not know it
            (out / "comparison.json").write_text(json.dumps(plan))
        assert len(compare([str(recipe)], [f"data={prepared}"], **words)) == 1


def test_tasks_and_their_seeds_join_finished_runs(recipe, prepared, tmp_path, monkeypatch):
    trained, tuned = [], []
    monkeypatch.setattr("electra.inspector.compare.pretrain", lambda *_: trained.append(1) or {"auc": 0.7})

    def finetune(run, items, overrides, out, seeds, jobs):
        tuned.append((*items, seeds))
        if items == ["rte"]:
            raise DivergedError("lost")
        scores = {"dev": {f"seed {seed}": {"accuracy": 0.5 + seed / 10} for seed in range(seeds)}}
        return {"tasks": {items[0]: {"metric": "accuracy", "scores": scores}}}

    monkeypatch.setattr("electra.inspector.compare.finetune", finetune)

    def plan(item, *_):
        return SimpleNamespace(name=item, files={}, task=SimpleNamespace(metric="accuracy"))

    monkeypatch.setattr("electra.inspector.compare.make_plan", plan)

    def scores(names, seeds, **overrides):
        yardsticks = Yardsticks(tasks=Tasks(names, {"data": "glue", **overrides}, seeds))
        words = {"seeds": 1, "budget": "1 steps", "yardsticks": yardsticks, "out": tmp_path / "out"}
        (result,) = compare([str(recipe)], [f"data={prepared}"], **words)
        assert result == STORED_RUN.validate_json(next((tmp_path / "out").rglob("result.json")).read_text())
        return result.tasks

    assert scores(("cola",), 1) == {"cola": [50]}
    plan = tmp_path / "out" / "comparison.json"
    earlier = {"names": ["cola"], "overrides": {"data": "glue"}, "seeds": 1}  # as earlier versions wrote it
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"tasks": earlier}))
    assert scores(("rte", "mnli"), 1, epochs=1) == {"cola": [50], "mnli": [50]}  # one that diverges has no score
    assert scores(("cola",), 2) == {"cola": [50, 60], "mnli": [50]}
    assert tuned == [("cola", 1), ("rte", 1), ("mnli", 1), ("cola", 2)] and trained == [1]
    with pytest.raises(SettingsError, match="not the same: settings of cola"):
        scores(("cola",), 1, epochs=1)


def test_every_gpu_has_its_own_runs(recipe, prepared, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("electra.inspector.compare.gpu_names", lambda device: ["4", "5"])
    jobs = "electra.inspector.compare.run_jobs"
    monkeypatch.setattr(jobs, lambda *given, devices: started.append((*given[2:], devices)) or iter(()))
    monkeypatch.setattr("torch.get_num_threads", lambda: 20)
    compare([str(recipe)], [f"data={prepared}"], seeds=2, budget="1 steps", jobs=3, out=tmp_path / "out")
    [(workers, _, share, devices)] = started
    assert (workers, devices) == (6, ["4", "5"])
    assert share.args == (3,)  # of the 20 threads


def test_settings_of_fine_tuning_without_a_task_are_refused(recipe, prepared, tmp_path):
    done = electra("compare", recipe, f"data={prepared}", "finetune.lr=1e-3", "--out", tmp_path / "out")
    assert done.returncode == 2 and "Name some with --tasks" in done.stderr
    for option in ("--task-jobs", "--task-seeds"):
        done = electra(
            "compare", recipe, f"data={prepared}", option, 2, "--budget", "1 steps", "--out", tmp_path / "out"
        )
        assert done.returncode == 2 and f"{option} 2 is for fine-tuning, and there is no task. Name some" in done.stderr


@pytest.mark.parametrize(("option", "value"), [("--text", "review"), ("--label", "stars"), ("--probe-rows", 500)])
def test_options_of_a_table_without_a_table_are_refused(option, value, recipe, prepared, tmp_path):
    done = electra("compare", recipe, f"data={prepared}", option, value, "--budget", "1 steps", "--out", tmp_path)
    assert done.returncode == 2 and f"{option} {value} is for a table, and there is none." in done.stderr


def test_a_task_that_does_not_exist_stops_everything_before_it_starts(recipe, prepared, tmp_path):
    with pytest.raises(SettingsError, match="colla"):
        compare(
            [str(recipe)], [f"data={prepared}"], yardsticks=Yardsticks(tasks=Tasks(("colla",), {})), out=tmp_path / "o"
        )
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("base", ["modern-small", "electra-small"])
def test_every_side_of_the_papers_comparisons_can_be_trained(base, monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    import claim

    families = claim.families(base)
    assert [*families["table5"]][:5] == ["ELECTRA", "All-Tokens MLM", "Replace MLM", "ELECTRA 15 %", "BERT"]
    for family in families.values():
        for name, (recipe, words) in family.items():
            resolve(recipe, ["data=x", *words, *words_of("two-stage" if name == claim.TWO_STAGE else "")])


def test_short_runs_decay_weights_as_much_as_the_recipe(prepared):
    for words, steps, lr in (((), 90, 1e-2), (("optimizer.lr=2e-2",), 900, 2e-2)):
        settings = with_steps(resolve("modern-tiny", [f"data={prepared}", *words])[0], steps)
        assert lr * settings.optimizer_of_run().weight_decay * steps == pytest.approx(1e-2 * 0.5 * 1800)


def test_shards_that_are_not_there_are_said_to_be_missing(recipe, tmp_path):
    with pytest.raises(
        DataError, match=r'nowhere does not exist. Run "electra prepare" to build token shards there\.$'
    ):
        compare([str(recipe)], [f"data={tmp_path / 'nowhere'}"], budget="1 steps", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
