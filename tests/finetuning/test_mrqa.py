"""Question data in the layout of the MRQA shared task."""

import gzip
import json
from pathlib import Path

import pytest

from electra.base.errors import DataError
from electra.finetuning.questions import SpanSettings, nested_layout, read_mrqa, score1
from helpers import electra

CONTEXT = "The barak walks the lonute, and the lonute walks back."
HEADER = {"header": {"dataset": "Beings", "split": "train"}}


def entry(number: int, **change) -> dict:
    """As in the files: `last` of a span is included, tokens are given too, an accepted answer may be written otherwise."""
    question = {
        "qid": f"q{number}",
        "question": f"Who walks back, {number}?",
        "question_tokens": [["Who", 0]],
        "answers": ["the Lonute", "a lonute"],
        "detected_answers": [{"text": "lonute", "char_spans": [[20, 25], [36, 41]], "token_spans": [[4, 4], [8, 8]]}],
    }
    first = {"qid": f"p{number}", "question": "What?", "answers": ["barak"]}
    first["detected_answers"] = [{"text": "Barak", "char_spans": [[4, 8]]}]
    return {"id": "", "context": CONTEXT, "context_tokens": [["The", 0]], "qas": [first, {**question, **change}]}


def write(path: Path, *lines: object) -> Path:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["beings.jsonl.gz", "beings.jsonl"])
def test_every_question_of_a_context_is_a_row(tmp_path, name):
    path = write(tmp_path / name, HEADER, entry(1), entry(2))
    assert nested_layout(path) == SpanSettings().layout(path) == "mrqa"
    rows = read_mrqa(path)
    assert [row["id"] for row in rows] == ["p1", "q1", "p2", "q2"] and {row["context"] for row in rows} == {CONTEXT}
    assert rows[0]["answers"] == [{"text": "barak", "answer_start": 4}]  # as the context has it
    assert [it["answer_start"] for it in rows[1]["answers"]] == [20, 36]
    assert all(CONTEXT.startswith(it["text"], it["answer_start"]) for row in rows for it in row["answers"])
    assert rows[1]["accepted"] == ["the Lonute", "a lonute"] and "context_tokens" not in rows[1]


def test_a_file_without_a_header_is_known_by_its_questions(tmp_path):
    assert nested_layout(write(tmp_path / "a.jsonl", entry(1))) == "mrqa"
    flat = {"id": 1, "question": "Where are the qas?", "context": 'a "qas": [ here', "answers": []}
    assert nested_layout(write(tmp_path / "b.jsonl", flat)) is None


def test_answers_are_scored_against_all_that_are_accepted(tmp_path, toy_model):
    from electra.data.tokenizer import load_tokenizer

    rows = read_mrqa(write(tmp_path / "a.jsonl", HEADER, entry(1, answers=["back home", "Back"])))
    task = SpanSettings(length=80).build(load_tokenizer(toy_model), 80, {})
    scores = task.scores(rows[1:], [{"prediction": "back"}])
    assert scores["exact"] == 1 == score1("back", ["back home", "Back"]).exact
    assert task.scores(rows[1:], [{"prediction": "lonute"}])["f1"] == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"context": "a"}', "line 2 has no 'qas'"),
        ('{"context": "a", "qas": [{"question": "?"}]}', "line 2 has no 'id'"),
        ('{"context": "a", "qas": 3}', "line 2 is not laid out"),
        (
            '{"context": "a", "qas": [{"qid": "1", "question": "?", "detected_answers": [{"text": "a", "char_spans": [[0]]}]}]}',
            "line 2 is not laid out",
        ),
        ('{"context": ', "line 2 is not valid JSON"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, line, words):
    with pytest.raises(DataError, match=words):
        read_mrqa(write(tmp_path / "bad.jsonl", HEADER, line))


def test_such_files_are_fine_tuned_on_predicted_and_evaluated(tmp_path, toy_model):
    train = write(tmp_path / "Beings.jsonl.gz", HEADER, *map(entry, range(12)))
    other = {"context": CONTEXT + " So.", "qas": entry(99)["qas"]}
    dev = write(tmp_path / "held.jsonl.gz", HEADER, other)
    words = ("length=40", "max_query_length=12", "doc_stride=16", "epochs=1", "evaluations=1")
    done = electra("finetune", toy_model, train, "--dev", dev, *words, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "kind (guessed): span" in done.stderr and "train: Beings.jsonl.gz, 24 rows" in done.stderr
    model = tmp_path / "out" / "Beings" / "seed-0"
    predicted = electra("predict", model, dev, "--probabilities")
    assert predicted.returncode == 0, predicted.stderr
    answers = json.loads((tmp_path / "held.predictions.json").read_text())
    assert answers.keys() == {"p99", "q99"} and (tmp_path / "held.predictions.nbest.json").is_file()
    scores = json.loads(electra("evaluate", model, dev, "--json").stdout)["scores"]
    truths = {"p99": ["barak"], "q99": ["the Lonute", "a lonute"]}
    assert scores["f1"] == pytest.approx(sum(score1(answers[it], truths[it]).f1 for it in truths) / 2)
