"""Tables as people have them: many classes, rare ones, few rows, columns that come and go."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from electra.base.errors import DataError
from electra.data.tokenizer import load_tokenizer
from electra.finetuning.classification import ClassificationSettings
from electra.finetuning.plan import make_plan
from electra.finetuning.predict import input_problems
from helpers import electra


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def problems(toy_model, tmp_path):
    """What is wrong with a table, without a network."""

    def find(rows: list[dict], **settings: Any) -> list[str]:
        plan = make_plan(str(write(tmp_path / "t.jsonl", rows)), settings, {})
        task = plan.task.build(load_tokenizer(toy_model), 24, plan.splits)
        return list(map(str, task.problems(plan.splits)))

    return find


def test_many_classes_are_refused_only_where_train_alone_makes_them_doubtful(problems):
    assert problems([{"text": f"row {n}", "label": f"class {n % 50}"} for n in range(400)]) == []
    alone = [{"text": f"row {n}", "label": f"class {n % 30}"} for n in range(58)]
    (line,) = problems(alone)
    assert "30 different labels in" in line and "labels=" in line
    assert problems(alone, labels=[f"class {n}" for n in range(30)]) == []


@pytest.mark.parametrize("kind", ["classification", "multilabel"])
def test_the_only_row_of_a_class_stays_in_train(problems, kind):
    """Wherever the hash of its text would put it."""
    common = [{"text": f"row {n}", "label": "ab"[n % 2]} for n in range(30)]
    for n in range(0, 30, 3):
        rare = [{"text": f"rare {n}", "label": "rare"}, {"text": f"rare {n}", "label": "rare"}]
        assert problems([*common, *rare], kind=kind) == []


@pytest.mark.parametrize("words", [{}, {"text": "text", "label": "label"}, {"kind": "classification"}])
@pytest.mark.parametrize(("rows", "said"), [("", "no rows"), ("a text,yes\n", "one row")])
def test_a_table_without_two_rows_says_so(tmp_path, rows, said, words):
    (tmp_path / "t.csv").write_text("text,label\n" + rows)
    with pytest.raises(DataError, match=f"has {said}. At least two different ones are needed"):
        make_plan(str(tmp_path / "t.csv"), words, {})


def test_rows_without_text_get_no_label(toy_model):
    settings = ClassificationSettings(text=("a|b",), labels=("no", "yes"))
    task = settings.build(load_tokenizer(toy_model), 24, {})
    rows = [{"a": "fine"}, {"b": "fine"}, {"a": ""}, {"c": "x"}, {"a": None}, {"b": 5}]
    assert list(map(str, input_problems(task, rows, before=10))) == [
        "row 14: no 'a|b'",
        "row 15: 'a|b' is None, not text",
        "row 16: 'a|b' is 5, not text",
    ]


def test_what_rows_say_together_is_told_with_what_is_wrong_with_one(toy_model):
    train = [{"text": "x", "label": "a"}, {"text": "", "label": "a"}, {"text": "y", "label": None}]
    splits = {"train": train, "dev": [{"text": "x", "label": "a"}, {"text": "", "label": "a"}]}
    task = ClassificationSettings().build(load_tokenizer(toy_model), 24, splits)
    assert [line.partition(" (")[0] for line in map(str, task.problems(splits))] == [
        "train row 2: no text in 'text'. Fill it or remove the row.",
        "train row 3: no label. Fill it or remove the row.",
        "dev row 2: no text in 'text'. Fill it or remove the row.",
        "train: one class only",
        "dev row 1 is also train row 1",
    ]


def test_rows_that_differ_in_case_and_blanks_alone_are_the_same(toy_model):
    tokenizer = load_tokenizer(toy_model)
    train = [{"text": "The  barak walks", "label": "a"}, {"text": "sele", "label": "b"}]
    splits = {"train": train, "dev": [{"text": "the Barak\twalks ", "label": "a"}, {"text": "se le", "label": "b"}]}
    task = ClassificationSettings().build(tokenizer, 24, splits)
    assert list(map(str, task.problems(splits))) == ["dev row 1 is also train row 1"]
    kept = ClassificationSettings(shared_rows="allow").build(tokenizer, 24, splits)
    assert kept.problems(splits) == []


def test_a_pair_in_the_other_order_is_the_same_where_both_orders_are_trained_on(toy_model):
    tokenizer = load_tokenizer(toy_model)
    train = [{"a": "barak", "b": "Selin", "label": "x"}, {"a": "timute", "b": "owa", "label": "y"}]
    splits = {"train": train, "dev": [{"a": "selin", "b": "barak", "label": "x"}]}
    for double, told in ((True, ["dev row 1 is also train row 1"]), (False, [])):
        task = ClassificationSettings(text=("a", "b"), double_unordered=double).build(tokenizer, 24, splits)
        assert list(map(str, task.problems(splits))) == told


def test_copies_in_other_case_stay_on_one_side_of_the_split_and_other_tables_are_split_as_ever(problems, tmp_path):
    rows = [{"text": f"row {n}", "label": "ab"[n % 2]} for n in range(60)]
    raw = sorted(rows, key=lambda row: hashlib.blake2b(row["text"].encode(), digest_size=8).digest())
    dev = make_plan(str(write(tmp_path / "u.jsonl", rows)), {}, {}).splits["dev"]
    assert sorted(map(str, dev)) == sorted(map(str, raw[:6]))
    assert problems([*rows, *({**row, "text": row["text"].upper() + " "} for row in rows)]) == []


def test_a_label_that_train_does_not_have_is_called_that_whether_labels_are_numbers_or_names(toy_model):
    def told(train: str, dev: str, **settings: Any) -> str:
        splits = {
            name: [{"text": f"{name} {it}", "label": it} for it in its]
            for name, its in [("train", train), ("dev", dev)]
        }
        task = ClassificationSettings(**settings).build(load_tokenizer(toy_model), 24, splits)
        (problem,) = task.problems(splits)
        return problem.text

    assert told("12345", "0").startswith(
        "label '0' was not seen in train (known: 1, 2, 3, 4, 5). Add rows with it to train"
    )
    assert told("ab", "c").startswith("label 'c' was not seen in train (known: a, b). Add rows with it to train")
    assert told("ab", "0").startswith("label '0' is a number where a name was expected (known: a, b)")
    assert told("123", "0", labels=("1", "2", "3")) == "label '0' is unknown (known: 1, 2, 3)."


@pytest.mark.parametrize("words", [{}, {"kind": "regression"}])
def test_numbers_with_a_comma_are_one_problem_and_no_classes(problems, words):
    lines = problems([{"text": f"row {n}", "label": f"{n % 30},{n % 10}0"} for n in range(400)], **words)
    assert [line.partition(":")[0] for line in lines] == ["train", "dev"]
    assert all("numbers with a comma ('" in line and "Write decimals with a point" in line for line in lines)


def test_the_number_of_classes_stands_beside_the_kind_that_was_guessed(tmp_path):
    def note(labels: list[Any]) -> str:
        table = write(tmp_path / "t.jsonl", [{"text": f"row {n}", "label": it} for n, it in enumerate(labels)])
        return next(line for line in make_plan(str(table), {}, {}).notes if "kind" in line)

    assert note(["a", "b"] * 20) == "kind (guessed from the labels): classification, 2 classes"
    assert note(["a|b", "a", "c"] * 20) == "kind (guessed from the labels): multilabel, 3 classes"
    assert note([1.5, 2.5] * 20) == "kind (guessed from the labels): regression"
    slip = note(["a|b", *["a", "b"] * 20])
    assert slip.startswith("kind (guessed from the labels): classification, 3 classes; 'a|b' is one of them, ")
    assert "kind=multilabel" in slip


def test_results_hold_the_finished_runs_of_earlier_commands(toy_model, tmp_path):
    """Other tasks, and seeds beyond those asked for this time."""
    for name in ("one", "two"):
        write(tmp_path / f"{name}.jsonl", [{"text": f"row {n}", "label": "ab"[n % 2]} for n in range(20)])

    def finetune(name: str, seeds: int) -> dict:
        words = ("epochs=1", "length=24", "--seeds", seeds, "--out", "out")
        done = electra("finetune", toy_model, f"{name}.jsonl", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        results = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]
        return {name: result["runs"] for name, result in results.items()}

    assert finetune("one", 2) == {"one": 2}
    assert finetune("two", 1) == {"two": 1, "one": 2}
    assert finetune("one", 1) == {"one": 2, "two": 1}
    assert "## two" in (tmp_path / "out" / "results.md").read_text()


def test_the_terminal_has_the_alarms_of_this_command_and_the_results_all(toy_model, tmp_path):
    for name in ("one", "two"):
        write(tmp_path / f"{name}.jsonl", [{"text": f"row {n}", "label": "ab"[n % 2]} for n in range(20)])
        done = electra("finetune", toy_model, f"{name}.jsonl", "epochs=1", "length=24", "--out", "out", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "WARNING: two: " in done.stdout and "WARNING: one: " not in done.stdout
    assert (tmp_path / "out" / "results.md").read_text().count("dev has only 2 rows") == 2
