"""Fine-tuning as people do it: through the command line, interrupted, repeated, with wrong tables."""

import json
import math
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from electra.base.jobs import run_jobs
from electra.data.tables import read_rows
from electra.finetuning import run
from electra.finetuning.folder import load_task_folder
from helpers import Forked, electra, electra_forked, electra_process, write_table

FAST = ("epochs=6", "lr=4e-3", "batch=16", "evaluations=2", "length=24")


def rows(count: int = 160, seed: int = 0) -> list[dict]:
    """Which of two beings walks? One word decides."""
    rng = random.Random(seed)
    fill = ["reads", "jumps", "cooks", "the", "back", "and"]
    made = []
    for number in range(count):
        being = rng.choice(["barak", "lonute"])
        words = [rng.choice(fill) for _ in range(rng.randint(2, 12))]
        words.insert(rng.randrange(len(words)), being)
        made.append({"id": number, "review": " ".join(words) + f" {seed}{number}", "stars": being[:3]})
    return made


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    return write_table(tmp_path_factory.mktemp("table") / "my.csv", rows())


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toy_model, table) -> Path:
    out = tmp_path_factory.mktemp("finetuned") / "out"
    done = electra_forked("finetune", toy_model, table, *FAST, "--seeds", 2, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "text column (guessed): review" in done.stderr and "label column (guessed): stars" in done.stderr
    assert "dev: a tenth of train, 16 rows" in done.stderr
    return out


def test_a_table_is_a_task_and_the_results_say_everything(finished):
    results = json.loads((finished / "results.json").read_text())["tasks"]["my"]
    assert results["runs"] == 2 and results["median"] >= 0.8 and results["metric"] == "accuracy"
    assert results["best"] >= results["median"] and results["sd"] is not None
    assert sum(map(sum, results["confusion"])) == 16 == sum(entry["rows"] for entry in results["per_class"])
    text = (finished / "results.md").read_text()
    assert "best (chosen on dev)" in text and "a tenth of train (16 rows)" in text
    assert (finished / "my" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_rows_have_the_numbers_that_they_have_in_the_file(toy_model, tmp_path):
    table = [{"review": f"barak {number}", "stars": "ab"[number % 7 % 2]} for number in range(120)]
    out = tmp_path / "out"
    done = electra("finetune", toy_model, write_table(tmp_path / "my.csv", table), *FAST, "--out", out)
    assert done.returncode == 0, done.stderr
    wrong = [json.loads(line) for line in (out / "my" / "wrong.jsonl").read_text().splitlines()]
    assert wrong and [table[it["row"] - 1]["review"] for it in wrong] == [it["input"]["review"] for it in wrong]


def test_the_ensemble_averages_the_logits_of_the_seeds(finished):
    from safetensors.numpy import load_file

    from electra.finetuning.report import unpack

    folders = [finished / "my" / f"seed-{seed}" for seed in range(2)]
    first, second = (unpack(load_file(folder / "outputs-dev.safetensors")) for folder in folders)
    task = load_task_folder(folders[0]).task
    mean = [{"logits": (one["logits"] + other["logits"]) / 2} for one, other in zip(first, second, strict=True)]
    assert task.ensemble([], [], [first, second]) == task.predict([], [], mean)
    assert not (first[3]["logits"] == second[3]["logits"]).all()


def test_the_model_folder_loads_in_transformers_with_its_label_map(finished):
    transformers = pytest.importorskip("transformers")
    folder = finished / "my" / "seed-0"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.id2label == {0: "bar", 1: "lon"} and model.config.problem_type == "single_label_classification"
    written = json.loads((folder / "config.json").read_text())
    assert written["label2id"] == {"bar": 0, "lon": 1} and written["id2label"] == {"0": "bar", "1": "lon"}
    classify = transformers.pipeline("text-classification", model=str(folder))
    ours = load_task_folder(folder)
    sample = rows(12, seed=5)
    examples, _ = ours.task.encode(sample)
    from electra.finetuning.training import infer

    said = ours.task.predict(sample, examples, infer(ours.model, ours.task, examples, ours.method))
    for row, prediction in zip(sample, said, strict=True):
        theirs = classify(row["review"])[0]
        assert theirs["label"] == prediction["prediction"]
        assert theirs["score"] == pytest.approx(prediction[f"probability_{theirs['label']}"], abs=1e-5)


def test_the_same_command_keeps_what_is_finished_and_more_seeds_add_to_it(finished, toy_model, table):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("model.safetensors")}
    path = finished / "my" / "settings.json"  # as it was written before there was a choice
    stored = json.loads(path.read_text())
    assert stored["task"].pop("pooling") == "cls"
    path.write_text(json.dumps(stored))
    again = electra("finetune", toy_model, table, *FAST, "--seeds", 2, "--out", finished)
    assert again.returncode == 0 and "2 finished runs kept" in again.stderr
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("model.safetensors")}


def test_a_folder_with_other_settings_is_refused_with_the_difference(finished, toy_model, table):
    done = electra("finetune", toy_model, table, *FAST, "head=linear", "--out", finished)
    assert done.returncode == 2 and "head: 'transformers' -> 'linear'" in done.stderr


def test_other_data_under_the_same_name_is_refused(finished, toy_model, tmp_path):
    other = write_table(tmp_path / "my.csv", rows(seed=9))
    done = electra("finetune", toy_model, other, *FAST, "--out", finished)
    assert done.returncode == 2 and "with another file for train (my.csv)" in done.stderr


def test_a_killed_command_loses_the_run_in_progress_and_no_other(finished, toy_model, table, tmp_path):
    """Killed while the second seed trains, the same command again ends with the same weights as never interrupted."""
    out = tmp_path / "out"
    words = ("finetune", toy_model, table, *FAST, "--seeds", 2, "--out", out)
    process = Forked(*words)
    process.wait_for("\nmy seed 1 ")
    process.kill()
    process.wait()
    assert [path.name for path in (out / "my").glob("seed-*")] == ["seed-0"]
    again = electra(*words)
    assert again.returncode == 0 and "1 finished run kept" in again.stderr
    for seed in ("seed-0", "seed-1"):
        weights = [folder / "my" / seed / "model.safetensors" for folder in (out, finished)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not list(out.rglob("*.tmp"))


def test_a_signal_stops_with_its_exit_code(toy_model, table, tmp_path):
    process = Forked("finetune", toy_model, table, "epochs=2000", "evaluations=200", "--out", tmp_path / "out")
    process.wait_for("\nmy seed 0 ")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75
    assert "everything is saved" in process.said and "to resume: electra finetune" in process.said


@pytest.mark.slow
def test_processes_side_by_side_give_the_same_weights(finished, toy_model, table, tmp_path):
    done = electra_process("finetune", toy_model, table, *FAST, "--seeds", 2, "--jobs", 2, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for seed in (0, 1):  # every job shows how far it is
        assert re.search(rf"my seed {seed} (\d+)/\1 .*loss", done.stderr), done.stderr
    assert "2 of 2 done" in done.stderr
    for seed in ("seed-0", "seed-1"):
        weights = [folder / "my" / seed / "model.safetensors" for folder in (tmp_path / "out", finished)]
        assert weights[0].read_bytes() == weights[1].read_bytes()


def test_workers_end_with_their_parent(toy_model, table, tmp_path):
    process = Forked("finetune", toy_model, table, "epochs=3000", "--seeds", 2, "--jobs", 2, "--out", tmp_path / "out")
    children: list[str] = []
    deadline = time.monotonic() + 180
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children) < 2 and time.monotonic() < deadline:  # what tracks their resources may be this process's own
        children = path.read_text().split()
        time.sleep(0.2)
    process.kill()
    process.wait()
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(children) >= 2 and not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.parametrize("kind", ["csv", "tsv.gz", "jsonl", "json", "parquet", "jsonl.zst"])
def test_predictions_come_in_the_format_of_the_file(finished, tmp_path, kind):
    sample = [{key: row[key] for key in ("id", "review")} for row in rows(30, seed=3)]
    file = write_table(tmp_path / f"new.{kind}", sample)
    done = electra("predict", finished / "my" / "seed-0", file, "--probabilities", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = list(read_rows(tmp_path / f"new.predictions.{kind}"))
    assert [str(row["id"]) for row in found] == [str(row["id"]) for row in sample]
    for row in found:
        likely = max(("bar", "lon"), key=lambda name: float(row[f"probability_{name}"]))
        assert row["prediction"] == likely
    right = sum(row["prediction"] == true["stars"] for row, true in zip(found, rows(30, seed=3), strict=True))
    assert right >= 20


def test_predictions_do_not_depend_on_chunks_and_other_columns_can_be_named(finished, tmp_path, monkeypatch):
    from electra.finetuning import predict

    sample = [{"words": row["review"]} for row in rows(25, seed=4)]
    file = write_table(tmp_path / "new.jsonl", sample)
    model = finished / "my" / "seed-0"
    whole = predict.predict_file(model, file, tmp_path / "a.jsonl", True, {"text": ["words"]})
    monkeypatch.setattr(predict, "CHUNK", 7)
    predict.predict_file(model, file, tmp_path / "b.csv", True, {"text": ["words"]})
    assert whole.rows == 25
    for one, other in zip(read_rows(tmp_path / "a.jsonl"), read_rows(tmp_path / "b.csv"), strict=True):
        assert one["prediction"] == other["prediction"]
        assert one["probability_bar"] == pytest.approx(float(other["probability_bar"]), rel=1e-3)
    missing = electra("predict", model, file, cwd=tmp_path)
    assert missing.returncode == 3 and "no column 'review' (there are words)" in missing.stderr


def test_lines_of_text_are_no_table_and_are_sent_to_standard_input(finished, tmp_path):
    (tmp_path / "lines.txt").write_text("one text\nanother text\n")
    done = electra("predict", finished / "my" / "seed-0", "lines.txt", cwd=tmp_path)
    assert done.returncode == 2 and "lines.txt does not have the extension of a table" in done.stderr
    assert "standard input" in done.stderr and not list(tmp_path.glob("*predictions*"))


def test_the_folder_of_all_tasks_is_answered_with_a_model_inside(finished, tmp_path):
    done = electra("predict", finished, "one text")
    assert done.returncode == 3 and f"Give a model inside it, such as {finished / 'my'}." in done.stderr, done.stderr


def test_predictions_for_a_csv_of_semicolons_have_semicolons(finished, tmp_path):
    file = tmp_path / "new.csv"
    file.write_text("id;review\n1;one, and more\n2;two\n")
    assert electra("predict", finished / "my" / "seed-0", file).returncode == 0
    lines = (tmp_path / "new.predictions.csv").read_text().splitlines()
    assert lines[0].startswith("id;review;prediction") and lines[1].startswith("1;one, and more;") and len(lines) == 3


def test_predictions_keep_the_byte_order_mark_by_which_spreadsheets_know_utf_8(finished, tmp_path):
    for name, mark in (("marked.csv", "\ufeff"), ("plain.csv", "")):
        (tmp_path / name).write_text(f"{mark}review\nschön\n", "utf-8")
        assert electra("predict", finished / "my" / "seed-0", name, cwd=tmp_path).returncode == 0
        written = (tmp_path / name.replace(".", ".predictions.")).read_text("utf-8")
        assert written.startswith(f"{mark}review,prediction\n") and written.count("\ufeff") == len(mark)
    done = electra("predict", finished / "my" / "seed-0", "marked.csv", "--out", "a.jsonl", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "a.jsonl").read_bytes().startswith(b"{")


def test_predictions_lie_beside_the_file_and_are_overwritten_by_force_alone(finished, tmp_path):
    model = finished / "my" / "seed-0"
    file = write_table(tmp_path / "deep" / "new.csv", rows(5, seed=3))
    (tmp_path / "elsewhere").mkdir()
    assert electra("predict", model, file, cwd=tmp_path / "elsewhere").returncode == 0
    written = tmp_path / "deep" / "new.predictions.csv"
    before = written.read_bytes()
    written.write_bytes(b"mine")
    again = electra("predict", model, file)
    assert again.returncode == 2 and "new.predictions.csv is there already" in again.stderr
    assert again.stderr.endswith("Here that is --out and --force.\n")
    assert written.read_bytes() == b"mine" and not list((tmp_path / "elsewhere").iterdir())
    assert electra("predict", model, file, "--force").returncode == 0 and written.read_bytes() == before


def test_a_text_and_lines_of_standard_input_are_answered_on_standard_output(finished, tmp_path):
    model = finished / "my" / "seed-0"
    sample = [row["review"] for row in rows(4, seed=3)]
    file = write_table(tmp_path / "new.jsonl", [{"review": text} for text in sample])
    assert electra("predict", model, file, "--probabilities").returncode == 0
    expected = list(read_rows(tmp_path / "new.predictions.jsonl"))
    said = electra("predict", model, stdin="\n".join(sample))
    assert said.stdout.splitlines() == [f"{it['prediction']}\t{it['review']}" for it in expected]
    blank = electra("predict", model, stdin=f"{sample[0]}\n\n{sample[1]}\n").stdout.splitlines()
    assert len(blank) == 3 and (blank[0], blank[2]) == tuple(said.stdout.splitlines()[:2]) and blank[1].endswith("\t")
    one = electra("predict", model, sample[2], "--probabilities")
    answer = json.loads(one.stdout)
    assert answer["probability_bar"] == pytest.approx(expected[2]["probability_bar"], rel=1e-4)
    missing = electra("predict", model, "absent.csv")
    assert missing.returncode == 3 and "absent.csv does not exist" in missing.stderr
    for options in (["--out", "a.csv"], ["--force"], ["--escape-formulas"]):
        refused = electra("predict", model, "some text", *options, cwd=tmp_path)
        assert refused.returncode == 2 and f"{options[0]} is for files, not for 'some text'" in refused.stderr
    tab = electra("predict", model, "one\ttwo parts")
    assert tab.returncode == 3 and "has 2 parts, where the model reads one text" in tab.stderr


def test_a_folder_of_seeds_answers_by_their_mean(finished, table, tmp_path):
    """The mean of two seeds' logits is, of two classes, the mean of their log odds."""
    done = electra("evaluate", finished / "my", table, "--json")
    assert done.returncode == 0, done.stderr
    answers = [tmp_path / f"{name}.jsonl" for name in ("both", "seed-0", "seed-1")]
    for path, folder in zip(answers, ("", "seed-0", "seed-1"), strict=True):
        assert electra("predict", finished / "my" / folder, table, "--out", path, "--probabilities").returncode == 0
    both, *seeds = ([row["probability_bar"] for row in read_rows(path)] for path in answers)
    odds = [[math.log(p / (1 - p)) for p in its] for its in (both, *seeds)]
    assert odds[0] == pytest.approx([(one + other) / 2 for one, other in zip(*odds[1:], strict=True)], abs=1e-3)
    right = [row["prediction"] == row["stars"] for row in read_rows(answers[0])]
    assert json.loads(done.stdout)["scores"]["accuracy"] == pytest.approx(sum(right) / 160)


def test_evaluate_scores_a_fine_tuned_model_on_a_table(finished, table, tmp_path):
    file = write_table(tmp_path / "new.parquet", rows(60, seed=6))
    done = electra("evaluate", finished / "my" / "seed-0", file, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    matrix = figures["confusion"]
    assert figures["scores"]["accuracy"] == pytest.approx((matrix[0][0] + matrix[1][1]) / 60)
    majority = max(map(sum, matrix)) / 60
    assert figures["baselines"]["majority"]["accuracy"] == pytest.approx(majority)
    assert figures["baselines"]["majority"].keys() == figures["scores"].keys()
    shown = electra("evaluate", finished / "my" / "seed-0", file)
    assert f"{figures['scores']['accuracy']:.4f} │ {majority:.4f} │" in " ".join(shown.stdout.split())
    assert "each class" in shown.stdout and "true class (down)" in shown.stdout and "trained on" not in shown.stderr
    assert "is the table it was trained on" in electra("evaluate", finished / "my" / "seed-0", table).stderr
    assert electra("evaluate", finished / "my" / "seed-0").returncode == 2
    refused = electra("evaluate", finished / "my" / "seed-0", file, "--rows", 5)
    assert refused.returncode == 2 and "rows 5 is for runs, and this scores a table" in refused.stderr


def task_toml(folder: Path, **more) -> Path:
    lines = {"text": ["a", "b"], "labels": ["no", "yes"], "epochs": 1, "length": 24, **more}
    path = folder / "mine.toml"
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in lines.items()))
    return path


def pairs(count: int, seed: int) -> list[dict]:
    return [
        {"a": row["review"], "b": "the back", "label": "yes" if row["stars"] == "bar" else "no"}
        for row in rows(count, seed)
    ]


def test_a_toml_file_is_a_task_whose_partial_files_are_named_as_such(toy_model, tmp_path):
    data = tmp_path / "data"
    write_table(data / "train_part.jsonl", pairs(40, 1))
    write_table(data / "dev_matched.csv", pairs(20, 2))
    write_table(data / "test.tsv", [{"a": row["a"], "b": row["b"]} for row in pairs(10, 3)])
    toml = task_toml(tmp_path)
    toml.write_text(toml.read_text() + '\n[rows]\ntrain = 900\ndev = 20\n[submission]\ntest = "Mine.tsv"\n')
    out = tmp_path / "out"
    done = electra("finetune", toy_model, toml, f"data={data}", "double_unordered=true", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "train: train_part.jsonl, 40 rows, NOT the official set of 900" in done.stderr
    assert "dev: dev_matched.csv, 20 rows, the official set's size" in done.stdout
    assert "mine*" in (out / "results.md").read_text()
    assert json.loads((out / "mine" / "seed-0" / "result.json").read_text())["steps"] == 3  # 80 rows in batches of 32
    submission = (out / "submission" / "Mine.tsv").read_text().splitlines()
    assert submission[0] == "index\tprediction" and len(submission) == 11
    assert submission[1].split("\t")[1] in ("no", "yes")


def test_of_several_dev_files_none_is_chosen_in_silence(toy_model, tmp_path):
    write_table(tmp_path / "d" / "train.csv", pairs(20, 1))
    write_table(tmp_path / "d" / "dev_a.csv", pairs(9, 2))
    write_table(tmp_path / "d" / "dev_b.csv", pairs(9, 3))
    words = ("finetune", toy_model, task_toml(tmp_path), f"data={tmp_path / 'd'}", "--out", tmp_path / "out")
    done = electra(*words)
    assert done.returncode == 3 and "which of dev_a.csv, dev_b.csv is dev? Say files.dev=NAME" in done.stderr
    assert electra(*words, "files.dev=dev_b").returncode == 0


def test_the_shipped_tasks_are_glue_with_the_paper_s_epochs():
    from electra.base import config
    from electra.finetuning.plan import TASKS, SourceSettings, place

    epochs, doubled = {}, set()
    for name in config.recipe_names(TASKS):
        tree = config.read_recipe(name, TASKS)
        for key in SourceSettings.model_fields:
            tree.pop(key, None)
        if tree["kind"] not in ("classification", "regression"):
            continue
        task, _ = place(tree, {})
        epochs[name] = task.epochs
        doubled |= {name} if task.double_unordered else set()
    ten = {"rte": 10, "stsb": 10}
    assert epochs == dict.fromkeys(("cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "wnli"), 3) | ten
    assert doubled == {"mrpc", "stsb"}


def test_glue_files_are_found_and_named(shared_data, toy_model, tmp_path):
    done = electra("finetune", toy_model, "wnli", f"data={shared_data / 'glue'}", "epochs=1", "--out", tmp_path / "o")
    assert done.returncode == 0, done.stderr
    assert "train.jsonl.zst, 635 rows, the official set's size" in done.stderr


def test_a_fine_tuned_model_is_a_start_for_another_task(finished, toy_model, table, tmp_path):
    from electra.finetuning.seeds import load_start

    start = load_start(finished / "my" / "seed-0")
    model = load_task_folder(finished / "my" / "seed-0").model
    for name, tensor in model.encoder.state_dict().items():
        assert torch.equal(start.tensors[name], tensor)
    bare = pytest.importorskip("transformers").AutoModel.from_pretrained(finished / "my" / "seed-0")
    bare.save_pretrained(tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).write_bytes((toy_model / name).read_bytes())
    again = load_start(tmp_path / "bare")
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in start.tensors.items())


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_numbers_and_several_labels_from_tables(toy_model, tmp_path, kind):
    made = [
        {"text": row["review"], "label": {"bar": 4.5, "lon": 1.0}[row["stars"]] if kind == "regression" else [row["stars"], "x"]}
        for row in rows(60)
    ]  # fmt: skip
    file = write_table(tmp_path / "t.jsonl", made)
    done = electra("finetune", toy_model, file, *FAST, "head=linear", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert f"kind (guessed from the labels): {kind}" in done.stderr
    predicted = electra("predict", tmp_path / "out" / "t" / "seed-0", file, cwd=tmp_path)
    assert predicted.returncode == 0, predicted.stderr
    first = next(read_rows(tmp_path / "t.predictions.jsonl"))["prediction"]
    assert isinstance(first, float if kind == "regression" else list)
    card = (tmp_path / "out/t/seed-0/README.md").read_text()
    assert ("The network's output x means 1.69016 x + 3.2037;" in card) == (kind == "regression")
    assert json.loads((tmp_path / "out/t/seed-0/task.json").read_text())["architecture"] == ""


@pytest.mark.parametrize("shared", [0, 2])
def test_the_card_says_how_many_rows_of_dev_were_trained_on(toy_model, tmp_path, shared):
    others = [{**row, "text": f"other {row['text']}"} for row in GOOD[:5]]
    dev = write_table(
        tmp_path / "dev.jsonl", [*others, *({**row, "text": row["text"].upper()} for row in GOOD[:shared])]
    )
    words = ("--dev", dev, *FAST[1:], "epochs=1", "min_steps=0", "shared_rows=allow", "--out", tmp_path / "out")
    done = electra("finetune", toy_model, write_table(tmp_path / "t.jsonl", GOOD), *words)
    assert done.returncode == 0, done.stderr
    card = (tmp_path / "out/t/seed-0/README.md").read_text()
    assert ("2 of 7 rows of dev are in train too, so scores on dev are too good." in card) == bool(shared)
    assert ("Scores on dev are of rows that were not trained on." in card) != bool(shared)


def test_a_diverging_run_stops_with_advice(toy_model, table, tmp_path):
    done = electra("finetune", toy_model, table, "lr=1e30", "clip=1e30", "epochs=2", "--out", tmp_path / "out")
    assert done.returncode == 6 and "lower lr" in done.stderr and not list((tmp_path / "out/my").glob("seed-*"))


@pytest.mark.parametrize(
    ("labels", "test", "said"),
    [
        ([1.0, 2.5, 4.0], [-1.0, -1.0], ""),  # what stands in published tests whose answers are secret
        (["a|b", "b", "c"], ["", ""], ""),
        (
            ["a", "b"],
            ["a", " b"],
            "test is not scored: 1 of 2 rows have no label that train knows (the first is row 2)",
        ),
        (["a", "b"], ["a", "b"], ""),
    ],
)
def test_a_test_is_scored_where_all_its_rows_have_answers(labels, test, said, toy_model, tmp_path):
    for split, its in {"train": labels * 12, "dev": labels, "test": test}.items():
        content = [{"text": f"the barak {split} {number}", "label": label} for number, label in enumerate(its)]
        write_table(tmp_path / "data" / f"{split}.csv", content)
    done = electra("finetune", toy_model, tmp_path / "data", "epochs=1", "length=24", "--out", tmp_path / "out")
    assert done.returncode == 0 and said in done.stderr, done.stderr
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"].values()
    assert ("test" in result["scores"]) == (labels[0] == test[0] and not said)
    assert any("not scored" in text for text in result["alarms"]) == bool(said)


GOOD = [{"text": f"the barak {n}", "label": "ab"[n % 2]} for n in range(40)]


def spoiled(*changes: tuple[int, str, object]) -> list[dict]:
    made = [dict(row) for row in GOOD]
    for row, column, value in changes:
        made[row][column] = value
    return made


@pytest.mark.parametrize(
    ("table", "dev", "words", "parts"),
    [
        (
            GOOD,
            None,
            ("--text", "txt", "--label", "label"),
            ("no column 'txt' (there are text, label). Did you mean 'text'?", "(2 problems)"),
        ),
        ([GOOD[0]] * 20, None, ("--text", "text", "--label", "label"), ("one class only (a)",)),
        ([GOOD[0]] * 20, None, ('labels=["a", "b"]',), ("train row 1 is also train row 3",)),
        (GOOD, None, ("--text", "text", "--label", "lab"), ("no column 'lab'",)),
        (spoiled((3, "label", None), (7, "label", "")), None, (), ("no label", "(2 problems)")),
        (spoiled((3, "text", "  "), (5, "text", None)), None, (), ("no text in 'text'", "(2 problems)")),
        (
            [{**row, "label": "a"} for row in GOOD],
            None,
            ("--text", "text", "--label", "label"),
            ("one class only (a)",),
        ),
        (GOOD, GOOD[:3], (), ("dev row 1 is also train row 1", "dev row 3 is also train row 3", "shared_rows=allow")),
        (GOOD, [{"text": "new", "label": "c"}], (), ("dev row 1: label 'c' was not seen in train (known: a, b)",)),
        (
            spoiled((2, "label", "1")),
            None,
            ('labels=["a", "b"]',),
            ("label '1' is a number where a name was expected",),
        ),
        (spoiled((2, "label", "x")), None, ("kind=regression",), ("label 'x' is not a number", "40 problems")),
        (
            [{**row, "text": n} for n, row in enumerate(GOOD)],
            None,
            ("--text", "text"),
            ("column 'text' holds numbers",),
        ),
        ([{**row, "label": f"c{n}"} for n, row in enumerate(GOOD)], None, (), ("different labels", "kind=regression")),
        (GOOD, None, ("metric=pearson",), ("metric=pearson is not one of classification",)),
    ],
)
def test_problems_of_a_table_are_reported_together_and_nothing_is_written(
    toy_model, tmp_path, table, dev, words, parts
):
    file = write_table(tmp_path / "t.jsonl", table)
    more = ("--dev", write_table(tmp_path / "dev.jsonl", dev)) if dev else ()
    done = electra("finetune", toy_model, file, *more, *words, "--out", tmp_path / "out")
    assert done.returncode == (2 if "metric=pearson" in words else 3), done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()
    for part in parts:
        assert part in done.stderr, done.stderr


def test_problems_that_rows_have_in_common_are_one_line_and_at_most_twenty_are_shown(toy_model, tmp_path):
    rows = [
        *GOOD,
        *({"text": "", "label": "a"} for _ in range(50)),
        *({"text": f"x{n}", "label": f"{n}c"} for n in range(30)),
    ]
    file = write_table(tmp_path / "t.jsonl", rows)
    dev = write_table(tmp_path / "d.jsonl", [{**row, "text": f"new {row['text']}"} for row in GOOD])
    words = ('labels=["a", "b"]', "--out", tmp_path / "out", "--dev", dev)
    done = electra("finetune", toy_model, file, *words)
    assert done.returncode == 3 and "(80 problems)" in done.stderr
    assert "train rows 41, 42, 43 and 47 more: no text in 'text'" in done.stderr
    assert done.stderr.count("is unknown") == 19 and "… and 11 more" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (("MODEL", "nothing"), 2, "neither a task (cola"),
        (("MODEL", "missing.csv"), 3, "missing.csv does not exist"),
        (("MODEL", __file__), 2, "save it as csv (UTF-8)"),
        (("MODEL", "mrpc"), 2, "Add data=FOLDER"),
        (("MODEL", "mrpc", "data=nowhere"), 3, "nowhere"),
        (("MODEL", "TABLE", "epoch=3"), 2, "Did you mean epochs?"),
        (("MODEL", "TABLE", "lr=fast"), 2, "lr"),
        (("MODEL", "TABLE", "kind=poetry"), 2, "unknown kind of task 'poetry'"),
        (("MODEL", "TABLE", "--dev", "gone.csv"), 3, "gone.csv"),
        (("MODEL", "TABLE", "TABLE"), 2, "two tasks are called my"),
        (("nowhere", "TABLE"), 3, "nowhere"),
        (("MODEL", "TABLE", "--text2", "x"), 2, "--text"),
        (("MODEL", "epochs=2"), 2, "no task given"),
    ],
)
def test_mistakes_get_one_line_and_their_exit_code_in_finetune(toy_model, table, tmp_path, words, code, part):
    names = {"MODEL": toy_model, "TABLE": table}
    done = electra("finetune", *(names.get(word, word) for word in words), "--out", tmp_path / "out")
    assert done.returncode == code, done.stderr
    assert part in done.stderr and "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_a_table_is_read_and_encoded_once_however_many_seeds(toy_model, table, tmp_path, monkeypatch):
    from electra.finetuning import plan, run
    from electra.finetuning.classification import Classification

    encoded, read = [], []
    encode, read_rows = Classification.encode, plan.read_rows
    monkeypatch.setattr(Classification, "encode", lambda self, rows: encoded.append(rows) or encode(self, rows))
    monkeypatch.setattr(plan, "read_rows", lambda *words: read.append(words[0]) or read_rows(*words))
    overrides = {"epochs": 1, "length": 24, "evaluations": 1, "kind": "classification"}
    run.finetune(toy_model, [str(table)], overrides, tmp_path / "out", seeds=2)
    assert len(encoded) == 2 and read == [table]  # train and dev, in one file


def test_a_length_beyond_the_positions_is_refused(toy_model, tmp_path):
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in GOOD))
    done = electra("finetune", toy_model, table, "length=4000", "--out", tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out" / "table").exists()
    positions = json.loads((toy_model / "config.json").read_text())["max_position_embeddings"]
    assert f"length=4000, but the model has {positions} positions. Use at most that many." in done.stderr


def finetune_in_worker(model, table, out):
    return run.finetune(model, [str(table)], {"epochs": 1}, out, seeds=2, jobs=2)["tasks"], os.getpid()


def test_a_worker_has_workers_of_its_own(toy_model, table, tmp_path):
    """`electra compare --jobs 2 --task-jobs 2`."""
    ((tasks, pid),) = run_jobs(finetune_in_worker, [(toy_model, table, tmp_path / "out")], 1)
    (result,) = tasks.values()
    assert len(result["seconds"]) == 2 and pid != os.getpid()
    (alone,) = run.finetune(toy_model, [str(table)], {"epochs": 1}, tmp_path / "alone", seeds=2)["tasks"].values()
    assert alone["scores"] == result["scores"]


def test_every_gpu_has_its_own_runs(toy_model, table, tmp_path, monkeypatch):
    """Also the trials of a search."""
    started: list[tuple] = []

    def run_here(function, jobs, workers, signals, share, relays, devices):
        started.append((len(jobs), workers, devices, *share.args))
        return (function(*job) for job in jobs)

    for place in ("run", "search"):
        monkeypatch.setattr(f"electra.finetuning.{place}.gpu_names", lambda device: ["4", "5"])
    monkeypatch.setattr("electra.finetuning.seeds.run_jobs", run_here)
    monkeypatch.setattr("torch.get_num_threads", lambda: 20)
    run.finetune(toy_model, [str(table)], {"epochs": 1, "min_steps": 0}, tmp_path / "out", seeds=2, jobs=3, trials=1)
    trials, seeds = started
    assert trials[1:] == seeds[1:] == (6, ["4", "5"], 3)  # of the 20 threads each worker has 3
    assert seeds[0] == 2
