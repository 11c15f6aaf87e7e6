"""Results that look ordinary and are not are said aloud; ordinary ones are left in peace."""

import json
import math
import random

import pytest

from electra.base.progress import literal
from electra.data.tokenizer import load_tokenizer
from electra.finetuning.baselines import label_alarms, majority_alarms, result_alarms, run_alarms
from electra.finetuning.classification import ClassificationSettings
from electra.finetuning.tagging import TaggingSettings
from helpers import electra

FALLING = [1.0 - 0.01 * step for step in range(40)]


@pytest.fixture(scope="module")
def tokenizer(toy_model):
    return load_tokenizer(toy_model)


def rows_of(labels):
    return [{"text": f"the barak walks {n}", "label": label} for n, label in enumerate(labels)]


@pytest.mark.parametrize("other", ["pos ", "Pos", "ｐｏｓ", " pos"])
def test_two_spellings_of_a_label_are_noticed(tokenizer, other):
    splits = {"train": rows_of(["pos", "neg", other])}
    task = ClassificationSettings().build(tokenizer, 24, splits)
    (text,) = label_alarms(task, splits)
    assert repr("pos") in text and repr(other) in text and "neg" not in text


@pytest.mark.parametrize("labels", [["pos", "neg"], ["a b", "ab"], ["1", "1.5"], ["é", "e"]])
def test_labels_that_differ_are_left_in_peace(tokenizer, labels):
    splits = {"train": rows_of(labels)}
    assert not label_alarms(ClassificationSettings().build(tokenizer, 24, splits), splits)


def test_a_class_without_a_row_in_train_is_named(tokenizer):
    splits = {"train": rows_of(["a", "b", "a"]), "dev": rows_of(["c", "a"])}
    task = ClassificationSettings(labels=("a", "b", "c")).build(tokenizer, 24, splits)
    (text,) = label_alarms(task, splits)
    assert "'c'" in text and "'a'" not in text
    many = ClassificationSettings(kind="multilabel", labels=("a", "b", "c")).build(tokenizer, 24, splits)
    assert "'c'" in label_alarms(many, {"train": rows_of([["a"], ["a", "b"], []])})[0]


def test_a_type_of_span_without_a_row_in_train_is_named_and_a_missing_tag_is_not(tokenizer):
    splits = {"train": [{"tokens": ["a", "b"], "tags": ["B-X", "O"]}]}  # no I-X, which is nothing to speak of
    assert not label_alarms(TaggingSettings().build(tokenizer, 24, splits), splits)
    task = TaggingSettings(labels=("O", "B-X", "I-X", "B-Y", "I-Y")).build(tokenizer, 24, splits)
    (text,) = label_alarms(task, splits)
    assert "'Y'" in text and "'X'" not in text


def test_texts_with_several_answers_in_train_are_counted(tokenizer):
    once = rows_of("ab" * 100)
    twice = [{**row, "label": "ab"[row["label"] == "a"]} for row in once]
    task = ClassificationSettings().build(tokenizer, 24, {"train": once})
    (text,) = label_alarms(task, {"train": [*once, *twice[:5]]})
    assert "5 texts of train, such as 'the barak walks 0', have several answers" in text
    assert not label_alarms(task, {"train": [*once, *twice[:1]]})  # a slip
    assert not label_alarms(task, {"train": [*once, *once]})
    several = ClassificationSettings(kind="multilabel").build(tokenizer, 24, {"train": once})
    assert "5 texts" in label_alarms(several, {"train": [*once, *twice[:5]]})[0]
    numbers = ClassificationSettings(kind="regression").build(tokenizer, 24, {})
    assert not label_alarms(numbers, {"train": rows_of([1, 2]) + rows_of([2, 1])})


def alarms_of(task, rows, answers, losses=FALLING):
    predictions = [{"prediction": answer} for answer in answers]
    return run_alarms(task, rows, predictions, task.scores(rows, predictions), losses)


def test_one_class_for_everything_is_an_alarm_unless_it_is_right(tokenizer):
    rows = rows_of("abab")
    task = ClassificationSettings().build(tokenizer, 24, {"train": rows})
    (text,) = alarms_of(task, rows, "aaaa")
    assert "every row is 'a'" in text
    assert not alarms_of(task, rows, "aaab") and not alarms_of(task, rows_of("aa"), "aa")


def test_nearly_one_class_for_everything_is_an_alarm_where_the_labels_are_others(tokenizer):
    rows = rows_of("aaabb" * 60)
    task = ClassificationSettings().build(tokenizer, 24, {"train": rows})
    (text,) = alarms_of(task, rows, "a" * 298 + "bb")
    assert "the answer to 298 of 300 rows is 'a'" in text
    assert not alarms_of(task, rows, "a" * 290 + "b" * 10) and not alarms_of(task, rows[:50], "a" * 49 + "b")
    rare = rows_of("a" * 280 + "b" * 20)
    assert not alarms_of(task, rare, "a" * 298 + "bb")


@pytest.mark.parametrize(
    ("metric", "score", "level", "is_said"),
    [("accuracy", 0.57, 0.58, True), ("accuracy", 0.58, 0.58, True), ("accuracy", 0.59, 0.58, False),
     ("accuracy", 1.0, 1.0, False), ("mse", 2.0, 1.5, True), ("mse", 1.0, 1.5, False), ("mcc", 0.0, 0.0, True)],
)  # fmt: skip
def test_a_score_that_is_not_above_the_majority_of_its_file_is_an_alarm(metric, score, level, is_said):
    texts = majority_alarms({metric: score, "other": 0.0}, {metric: level, "other": 1.0})
    assert len(texts) == is_said and all(f"{score:.4f}" in text and f"{level:.4f}" in text for text in texts)


def test_numbers_that_hardly_vary_and_one_tag_for_every_word_are_that_too(tokenizer):
    rows = rows_of([0.0, 2.5, 5.0])
    task = ClassificationSettings(kind="regression", scale=5.0).build(tokenizer, 24, {})
    assert "about 2.5" in alarms_of(task, rows, [2.50, 2.51, 2.49])[0] and not alarms_of(task, rows, [2.0, 2.5, 3.0])
    words = [{"tokens": ["a", "b"], "tags": ["B-X", "O"]}, {"tokens": ["c"], "tags": ["O"]}]
    tagging = TaggingSettings().build(tokenizer, 24, {"train": words})
    assert "is 'O'" in alarms_of(tagging, words, [["O", "O"], ["O"]])[0]
    assert not alarms_of(tagging, words, [["B-X", "O"], ["O"]])


def test_labels_of_a_regression_that_are_all_one_number_are_refused_in_train_and_an_alarm_elsewhere(
    tmp_path, toy_model
):
    """A correlation with a constant is undefined. It counts as 0, and that is said."""
    tables = {"same": rows_of([2.5] * 40), "vary": rows_of([n / 4 for n in range(40)])}
    for name, rows in tables.items():
        text = "".join(json.dumps(row | {"text": f"{name} {row['text']}"}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    same, vary, out = tmp_path / "same.jsonl", tmp_path / "vary.jsonl", tmp_path / "out"
    done = electra("finetune", toy_model, same, "kind=regression", "--out", out)
    assert done.returncode == 3 and "train: every label is 2.5: there is nothing to learn" in done.stderr
    done = electra("finetune", toy_model, vary, "--dev", same, "kind=regression", "epochs=1", "--out", out)
    said = "every label is 2.5, so its correlations are undefined and count as 0. Score it on rows that differ"
    assert done.returncode == 0 and f"dev: {said}" in done.stdout and f"dev: {said}" in done.stderr
    done = electra("evaluate", out / "vary" / "seed-0", same)
    assert done.returncode == 0 and said in done.stdout and "no better than" not in done.stdout


def test_a_loss_that_does_not_fall_is_an_alarm_once_there_are_enough_of_them(tokenizer):
    rows = rows_of("abab")
    task = ClassificationSettings().build(tokenizer, 24, {"train": rows})
    noisy = [0.69 + 0.02 * (step % 3 - 1) for step in range(40)]
    (text,) = alarms_of(task, rows, "abab", noisy)
    assert "does not fall" in text and "0.69" in text
    assert not alarms_of(task, rows, "abab", noisy[:9]) and not alarms_of(task, rows, "abab", FALLING)


def result(median, sd=None, cut=0, metric="accuracy", of=100, losses=(math.nan, math.nan), **levels):
    dev = {name: {metric: level} for name, level in levels.items()}
    counts = {"metric": metric, "median": median, "sd": sd, "cut": {"dev": (cut, of)}, "losses": losses}
    return {**counts, "cut_words": "cut", "cut_remedy": "Raise length.", "baselines": {"dev": dev}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (result(0.40, majority=0.5, words=0.3), ["worse than majority 0.5000: next to nothing"]),
        (result(0.40, losses=(0.6, 0.5), majority=0.5, words=0.3), ["worse than majority 0.5000: next to nothing"]),
        (
            result(0.40, losses=(0.6, 0.1), majority=0.5, words=0.7),
            ["majority 0.5000 and words 0.7000, though the loss fell from 0.600"],
        ),
        (result(0.60, losses=(0.6, 0.1), majority=0.5, words=0.7), ["worse than words 0.7000: a count of words"]),
        (result(0.60, 0.02, majority=0.5, words=0.7, untrained=0.65), ["words 0.7000 and untrained 0.6500: pre-train"]),
        (result(0.60, 0.10, majority=0.5, words=0.5, untrained=0.65), []),  # within one spread
        (result(0.80, majority=0.5, words=0.7), []),
        (result(0.995, majority=0.5, words=0.99), ["words 0.9900: dev rows seem to be in train, or one word"]),
        (result(0.80, majority=0.5, words=0.995), ["a count of words does better", "or one word gives"]),
        (result(0.995, majority=0.99, words=0.99), []),  # nearly all rows have one answer
        (result(0.2, metric="mse", majority=3.0, words=1.2), []),
        (result(0.80, cut=1), []),
        (result(0.80, cut=2), ["2 of 100 dev rows cut. Raise length."]),
        (result(0.80, of=99), ["dev has only 99 rows"]),
        (result(0.40, metric="mse", majority=0.5, words=0.45), []),  # of errors the lower is the better
        (result(0.60, metric="mse", majority=0.5, words=0.7), ["worse than majority 0.5000"]),
    ],
)
def test_a_baseline_that_is_better_and_rows_that_were_cut_are_said(given, words):
    texts = result_alarms(given)
    assert len(texts) == len(words) and all(word in text for word, text in zip(words, texts, strict=True))


def test_alarms_are_in_the_terminal_and_in_the_results(toy_model, tmp_path):
    rng = random.Random(0)
    table = tmp_path / "my.jsonl"
    rows = [
        {"text": " ".join(rng.choices(["barak", "sele", "walks"], k=30)), "label": rng.choice(["p", "p", "P"])}
        for _ in range(120)
    ]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = electra("finetune", toy_model, table, "epochs=1", "lr=1e-6", "length=16", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    texts = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]["my"]["alarms"]
    for word in ("'P' and 'p' look alike", "seed 0: the answer to every row is", "rows longer than 16 tokens"):
        (text,) = (text for text in texts if word in text)
        assert (
            f"WARNING: my: {text}" in done.stdout
            and f"**WARNING**: {literal(text)}" in (tmp_path / "out" / "results.md").read_text()
        )
    assert "look alike" in done.stderr and "my seed 0: the answer" in done.stderr
    others = tmp_path / "others.jsonl"
    others.write_text(table.read_text().replace("walks", "wal"))
    for words in ((), ("--json",)):
        scored = electra("evaluate", tmp_path / "out" / "my" / "seed-0", others, *words)
        assert scored.returncode == 0 and "the answer to every row is " in scored.stdout
