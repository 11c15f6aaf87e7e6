"""What a score is held against, each checked against scikit-learn or by counting."""

import json
import random
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from electra.data.tokenizer import load_tokenizer
from electra.finetuning.baselines import WordModel, baseline_scores
from electra.finetuning.classification import ClassificationSettings
from electra.finetuning.questions import SpanSettings
from electra.finetuning.run import finetune_untrained
from electra.finetuning.tagging import TaggingSettings
from helpers import electra

WORDS = ["barak", "lonute", "timin", "gorowa", "sele", "walks", "jumps", "reads", "cooks"]


def sentences(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 9))) for _ in range(count)]


def baselines(tokenizer, settings, train, dev):
    task = settings.build(tokenizer, 32, {"train": train})
    return {name: answers(dev) for name, answers in task.baselines(train).items()}, task


@pytest.fixture(scope="module")
def tokenizer(toy_model):
    return load_tokenizer(toy_model)


def test_classes_are_what_sklearn_says(tokenizer):
    texts = sentences(160)
    rows = [{"text": it, "label": "yes" if "walks" in it or it.startswith("b") else "no"} for it in texts]
    train, dev = rows[:120], rows[120:]
    said, task = baselines(tokenizer, ClassificationSettings(), train, dev)
    labels = [row["label"] for row in train]
    theirs = make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression(C=10.0, max_iter=200))
    expected = theirs.fit(texts[:120], labels).predict(texts[120:])
    assert [it["prediction"] for it in said["words"]] == expected.tolist()
    majority = DummyClassifier().fit(texts[:120], labels).predict(texts[120:])
    assert [it["prediction"] for it in said["majority"]] == majority.tolist()
    assert task.scores(dev, said["words"])["accuracy"] > task.scores(dev, said["majority"])["accuracy"] + 0.1


def test_several_labels_are_told_apart_and_a_label_of_half_the_rows_is_the_majority(tokenizer):
    rows = [{"text": it, "label": [*(w for w in ("walks", "sele") if w in it), "any"]} for it in sentences(200)]
    said, _ = baselines(tokenizer, ClassificationSettings(kind="multilabel"), rows[:150], rows[150:])
    assert all(it["prediction"] == said["majority"][0]["prediction"] for it in said["majority"])
    assert "any" in said["majority"][0]["prediction"]
    right = [set(it["prediction"]) == set(row["label"]) for it, row in zip(said["words"], rows[150:], strict=True)]
    assert np.mean(right) > 0.8


def test_words_know_whether_two_texts_are_alike(tokenizer):
    """Random pairs: either text alone says little about how many words they share."""
    pairs = zip(sentences(300), sentences(300, seed=1), strict=True)
    rows = [{"a": a, "b": b, "label": 5.0 * len({*a.split()} & {*b.split()}) / 9} for a, b in pairs]
    settings = ClassificationSettings(kind="regression", text=("a", "b"), scale=5.0)
    said, _ = baselines(tokenizer, settings, rows[:200], rows[200:])
    truth = [row["label"] for row in rows[200:]]
    assert spearmanr(truth, [it["prediction"] for it in said["words"]]).statistic > 0.6
    assert said["majority"][0]["prediction"] == pytest.approx(np.mean([row["label"] for row in rows[:200]]))


def test_every_word_gets_the_tag_it_has_most_often_and_spans_are_legal(tokenizer):
    train = [
        {"tokens": ["Ada", "met", "May"], "tags": ["B-PER", "O", "O"]},
        {"tokens": ["in", "May", "Smith"], "tags": ["O", "O", "I-PER"]},
        {"tokens": ["May"], "tags": ["B-PER"]},
    ]
    dev = [{"tokens": ["Ada", "Smith", "met", "May", "Eve"], "tags": ["B-PER", "I-PER", "O", "O", "B-PER"]}]
    dev += [{"tokens": ["Smith"], "tags": ["B-PER"]}]
    said, task = baselines(tokenizer, TaggingSettings(), train, dev)
    assert [it["prediction"] for it in said["words"]] == [["B-PER", "I-PER", "O", "O", "O"], ["B-PER"]]
    assert [it["prediction"] for it in said["majority"]] == [["O"] * 5, ["O"]]
    assert task.scores(dev, said["words"])["f1"] == pytest.approx(0.8)


def test_no_answer_at_all_is_the_baseline_of_squad_2_alone(tokenizer):
    rows = [{"id": str(n), "question": "who", "context": "barak walks", "answers": []} for n in range(3)]
    rows[0]["answers"] = [{"text": "barak", "answer_start": 0}]
    said, task = baselines(tokenizer, SpanSettings(has_unanswerable=True, max_query_length=6), rows, rows)
    assert task.scores(rows, said["majority"])["exact"] == pytest.approx(2 / 3)
    assert baselines(tokenizer, SpanSettings(max_query_length=6), rows, rows)[0].keys() == {"words"}


def test_a_question_is_answered_by_the_sentence_that_shares_its_rarest_words(tokenizer):
    context = "The barak walks 5.2 miles in the sea. The timak, as the others, sleeps! 山に犬がいる。川に猫がいる。"
    rows = [
        {"id": question, "question": question, "context": context, "answers": [{"text": answer, "answer_start": 0}]}
        for question, answer in {
            "where, as they say, do the others see a barak": "The barak walks 5.2 miles in the sea.",
            "what does the timak do": "The timak, as the others, sleeps!",
            "猫はどこ": "川に猫がいる。",
        }.items()
    ]
    train = [*rows, *({**rows[0], "context": f"as the others of {n}"} for n in range(5))]
    said, task = baselines(tokenizer, SpanSettings(max_query_length=6), train, rows)
    assert [it["prediction"] for it in said["words"]] == [row["answers"][0]["text"] for row in rows]
    assert task.scores(rows, said["words"])["exact"] == 1
    asked = [{**rows[0], "question": question} for question in ("the barak walks", "why sugar the barak")]
    sure, unsure = (-it["null_score_difference"] for it in said_of(task, train, asked))
    assert sure == pytest.approx(1) and 0 < unsure < 1
    assert said_of(task, train, [{**rows[0], "question": "?", "context": ""}])[0]["prediction"] == ""


def said_of(task, train, rows):
    return task.baselines(train)["words"](rows)


def test_scripts_without_spaces_have_words_too():
    texts = [("犬が好き",), ("猫が好き",), ("この犬だ",), ("その猫だ",)] * 5
    model = WordModel("classification", texts, np.array([0, 1, 0, 1] * 5))
    assert model.predict([("犬",), ("猫",)]).tolist() == [0, 1]


def test_texts_without_a_word_and_one_class_in_train_are_no_error(tokenizer):
    rows = [{"text": "!", "label": "a"}, {"text": "?", "label": "b"}]
    assert set(baselines(tokenizer, ClassificationSettings(), rows, rows)[0]) == {"majority", "words"}
    one = [{"text": it, "label": "a"} for it in sentences(4)]
    said, _ = baselines(tokenizer, ClassificationSettings(labels=("a", "b")), one, one)
    assert {it["prediction"] for it in said["words"]} == {"a"}


def test_they_are_computed_once_for_the_same_data(tokenizer, tmp_path, monkeypatch):
    rows = [{"text": it, "label": it[0]} for it in sentences(40)]
    task = ClassificationSettings().build(tokenizer, 32, {"train": rows})
    first = baseline_scores(tmp_path, "one", task, rows, {"dev": rows})
    monkeypatch.setattr(task, "baselines", lambda train: {})
    assert baseline_scores(tmp_path, "one", task, rows, {"dev": rows}) == first
    assert baseline_scores(tmp_path, "other", task, rows, {"dev": rows}) == {"dev": {}}


def test_they_stand_beside_every_score(toy_model, tmp_path):
    rows = [{"text": it, "label": "yes" if "walks" in it else "no"} for it in sentences(120)]
    table = tmp_path / "my.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    done = electra("finetune", toy_model, table, "epochs=1", "evaluations=1", "--out", out)
    assert done.returncode == 0, done.stderr
    dev = json.loads((out / "results.json").read_text())["tasks"]["my"]["baselines"]["dev"]
    majority, words = (f"{dev[name]['accuracy']:.4f}" for name in ("majority", "words"))
    assert f"{majority} │ {words}" in done.stdout and "words: TF-IDF with logistic regression" in done.stdout
    page = (out / "results.md").read_text()
    assert f"| {majority} | {words} |" in page and f"| majority | {majority}" in page and f"| words | {words}" in page


def test_the_same_network_untrained_is_a_baseline_at_its_own_best_rate(toy_model, tmp_path):
    rows = [{"text": it, "label": "yes" if "walks" in it else "no"} for it in sentences(120)]
    table, out = tmp_path / "my.jsonl", tmp_path / "out"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("epochs=2", "evaluations=1", "reinitialise=1", "length=16", "--untrained")
    done = electra("finetune", toy_model, table, *words, "--out", out)
    assert done.returncode == 0, done.stderr
    folders = list((out / "untrained").glob("lr-*"))
    scores = [json.loads((it / "results.json").read_text())["tasks"]["my"]["median"] for it in folders]
    methods = [json.loads((it / "my" / "settings.json").read_text())["method"] for it in folders]
    assert [it["pretrained"] for it in methods] == [False] * 3 and {it["layer_decay"] for it in methods} == {1.0}
    assert len({it["lr"] for it in methods}) == 3
    task = json.loads((out / "results.json").read_text())["tasks"]["my"]
    assert task["baselines"]["dev"]["untrained"]["accuracy"] == max(scores)
    assert done.stderr.count("from random weights, at lr ") == 4  # three rates, and the best with all seeds
    assert done.stderr.count("train: ") == 1, done.stderr
    assert f"{max(scores):.4f} │\n" in done.stdout and "untrained: the same network" in done.stdout
    again = electra("finetune", toy_model, table, *words[:-1], "--out", out)  # what was measured is still shown
    assert again.returncode == 0 and f"{max(scores):.4f} │\n" in again.stdout, again.stderr
    shutil.rmtree(out / "my")  # to train on other rows
    table.write_text("".join(json.dumps(row) + "\n" for row in rows[:60]))
    other = electra("finetune", toy_model, table, *words[:-1], "--out", out)
    assert other.returncode == 0, other.stderr
    task = json.loads((out / "results.json").read_text())["tasks"]["my"]
    assert task["baselines"]["dev"].keys() == {"majority", "words"}


def test_the_rate_of_the_untrained_network_stays_when_the_command_is_repeated(tmp_path, monkeypatch):
    scores, trained = {3e-4: [0.7, 0.1, 0.1], 1e-3: [0.6] * 3, 3e-3: [0.5] * 3}, dict.fromkeys((3e-4, 1e-3, 3e-3), 0)

    def finetune(model, items, overrides, folder, seeds, jobs):
        rate = overrides["lr"]
        trained[rate] = max(trained[rate], seeds)  # finished runs stay in the results
        dev = {f"seed {seed}": {"accuracy": scores[rate][seed]} for seed in range(trained[rate])}
        median = statistics.median(scores[rate][: trained[rate]])
        return {"tasks": {"a": {"metric": "accuracy", "median": median, "scores": {"dev": dev}}}}

    monkeypatch.setattr("electra.finetuning.run.finetune", finetune)
    planned = SimpleNamespace(plan=SimpleNamespace(name="a"), overrides={})
    first, again = (finetune_untrained("model", {"a": [planned]}, tmp_path, 3, 1) for _ in range(2))
    assert first == again == {"a": {"accuracy": pytest.approx(0.3)}} and trained[1e-3] == 1


def labelled_table(path: Path) -> Path:
    rows = [{"text": it, "label": "yes" if "walks" in it else "no"} for it in sentences(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stored_settings(out: Path) -> list[dict]:
    return [json.loads(it.read_text()) for it in out.glob("untrained/*/*/settings.json")]


QUICK = ("evaluations=1", "length=16", "batch=32", "--untrained", "--out")


def test_what_is_trained_together_is_untrained_together(toy_model, tmp_path):
    one, other = (labelled_table(tmp_path / f"{name}.jsonl") for name in "ab")
    done = electra("finetune", toy_model, f"{one}+{other}", "epochs=1", *QUICK, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    stored = stored_settings(tmp_path / "out")
    assert len(stored) == 6 and all({*it["together"]} == {"a", "b"} for it in stored)


@pytest.mark.slow
def test_after_a_search_untrained_has_the_settings_that_won(toy_model, tmp_path):
    table, out = labelled_table(tmp_path / "a.jsonl"), tmp_path / "out"
    words = ("lr=1e-5", "layer_decay=1.0", "pooling=cls")  # so that epochs alone are searched, and more of them win
    done = electra("finetune", toy_model, table, "--search", "--trials", 3, *words, *QUICK, out)
    assert done.returncode == 0, done.stderr
    own = json.loads((out / "a" / "settings.json").read_text())
    stored = stored_settings(out)
    assert len(stored) == 3 and all(it["task"]["epochs"] == own["task"]["epochs"] for it in stored)
