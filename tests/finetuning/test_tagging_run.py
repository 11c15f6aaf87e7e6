"""Tagging as people do it: a file of words and tags in, tags for other files out."""

import gzip
import json
import random
from pathlib import Path

import pytest

from electra.base.errors import DataError
from electra.data.tables import read_conll, read_rows
from electra.finetuning.plan import guess_shape
from helpers import electra, write_table

FAST = ("epochs=8", "lr=4e-3", "batch=16", "evaluations=2", "length=40")
NOUNS = {"barak": "PER", "lonute": "LOC"}


def sentences(count: int, seed: int) -> list[dict]:
    """Two nouns are spans, with "back" as their second word now and then."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        tokens, tags = ["the"], ["O"]
        for _ in range(rng.randint(1, 5)):
            word = rng.choice(["barak", "lonute", "walks", "reads", "and"])
            tokens.append(word)
            tags.append(f"B-{NOUNS[word]}" if word in NOUNS else "O")
            if word in NOUNS and rng.random() < 0.4:
                tokens.append("back")
                tags.append(f"I-{NOUNS[word]}")
        made.append({"id": number, "tokens": [*tokens, str(seed * 1000 + number)], "tags": [*tags, "O"]})
    return made


def write_columns(path: Path, rows: list[dict]) -> Path:
    """With a column between words and tags, as CoNLL's files have."""
    parts = ["".join(f"{word} X {tag}\n" for word, tag in zip(row["tokens"], row["tags"], strict=True)) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("-DOCSTART- -X- O\n\n" + "\n".join(parts))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ner")
    write_columns(folder / "eng.train", sentences(120, 1))
    write_columns(folder / "eng.testa", sentences(30, 2))
    (folder / "my_ner.toml").write_text(
        'kind = "tagging"\nlength = 40\n[files]\ntrain = "eng.train"\ndev = "eng.testa"\n[rows]\ntrain = 900\n'
    )
    return folder


@pytest.fixture(scope="module")
def out(data, toy_model, tmp_path_factory) -> Path:
    """A task of one's own is one TOML file."""
    out = tmp_path_factory.mktemp("tagged") / "out"
    done = electra("finetune", toy_model, data / "my_ner.toml", f"data={data}", *FAST, "--seeds", 2, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "train: eng.train, 120 rows, NOT the official set of 900" in done.stderr
    return out


@pytest.fixture(scope="module")
def model(out) -> Path:
    return out / "my_ner" / "seed-0"


def test_results_have_span_scores_types_and_an_ensemble(out):
    results = json.loads((out / "results.json").read_text())["tasks"]["my_ner"]
    assert results["metric"] == "f1" and results["median"] > 0.8 and results["ensemble"]["f1"] > 0.8
    assert {entry["label"] for entry in results["per_class"]} == {"LOC", "PER"}
    assert "tokens are read in parts." in (out / "my_ner" / "seed-0" / "README.md").read_text()
    assert "f1 PER" in (out / "results.md").read_text() and "| PER |" in (out / "results.md").read_text()


def test_the_ensemble_is_made_of_mean_logits(out):
    import numpy as np
    from safetensors.numpy import load_file

    from electra.finetuning.folder import load_task_folder
    from electra.finetuning.report import unpack

    loaded = load_task_folder(out / "my_ner" / "seed-0")
    rows = [{"tokens": row["tokens"]} for row in sentences(30, 2)]
    examples, _ = loaded.task.encode(rows)
    runs = [unpack(load_file(out / "my_ner" / f"seed-{n}" / "outputs-dev.safetensors")) for n in range(2)]
    said = loaded.task.ensemble(rows, examples, runs)
    _, positions = examples[0].notes
    mean = np.mean([run[0]["logits"][positions] for run in runs], axis=0)
    shares = np.exp(mean) / np.exp(mean).sum(1, keepdims=True)
    for word, share in zip(said[0]["probabilities"], shares, strict=True):
        assert list(word.values()) == pytest.approx(share, abs=1e-5)


def test_the_folder_loads_in_transformers_and_its_pipeline_says_the_same(model):
    transformers = pytest.importorskip("transformers")
    network = transformers.AutoModelForTokenClassification.from_pretrained(model)
    assert network.config.id2label == dict(enumerate(["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]))
    say = transformers.pipeline("token-classification", model=str(model), aggregation_strategy="simple")
    found = say("the barak reads the lonute")
    assert [(it["entity_group"], it["word"]) for it in found] == [("PER", "barak"), ("LOC", "lonute")]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "jsonl.gz"])
def test_tables_come_back_with_predictions_beside_the_true_tags(model, tmp_path, kind, monkeypatch):
    monkeypatch.setattr("electra.finetuning.predict.CHUNK", 7)
    rows = sentences(20, 3)
    rows[0:8] = [{"id": n, "tokens": ["the", "reads"], "tags": ["O", "O"]} for n in range(8)]  # no span for long
    file = write_table(tmp_path / f"new.{kind}", rows)
    done = electra("predict", model, file, "--probabilities", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = list(read_rows(tmp_path / f"new.predictions.{kind}"))
    assert [row["tags"] for row in found] == [row["tags"] for row in rows]
    right = sum(row["tags"] == row["prediction"] for row in found)
    assert right >= 16
    for row in found:
        assert len(row["prediction"]) == len(row["tokens"]) == len(row["probabilities"])
        for span in row["spans"]:
            assert span["text"] == " ".join(row["tokens"][span["start"] : span["end"]])
            assert row["prediction"][span["start"]] == f"B-{span['type']}"
    again = electra("predict", model, f"new.predictions.{kind}", cwd=tmp_path)
    assert again.returncode == 3 and "has a column 'prediction' already" in again.stderr
    assert not (tmp_path / f"new.predictions.predictions.{kind}").exists()


def test_column_files_come_back_line_by_line_with_one_column_more(model, tmp_path, monkeypatch):
    monkeypatch.setattr("electra.finetuning.predict.CHUNK", 3)
    file = write_columns(tmp_path / "eng.testb", sentences(12, 4))
    (tmp_path / "eng.testb.gz").write_bytes(gzip.compress(file.read_bytes()))
    done = electra("predict", model, file, cwd=tmp_path)
    assert done.returncode == 0 and "eng.predictions.testb: 12 rows" in done.stdout, done.stderr
    before, after = (file.read_text().splitlines(), (tmp_path / "eng.predictions.testb").read_text().splitlines())
    assert after[0] == "-DOCSTART- -X- O O"
    assert [line.rpartition(" ")[0] if line else "" for line in after] == before
    named = read_conll(tmp_path / "eng.predictions.testb", {"gold": 2, "said": 3})
    assert sum(row["gold"] == row["said"] for row in named) >= 9
    assert electra("predict", model, tmp_path / "eng.testb.gz", cwd=tmp_path).returncode == 0
    packed = gzip.decompress((tmp_path / "eng.predictions.testb.gz").read_bytes())
    assert packed == (tmp_path / "eng.predictions.testb").read_bytes()


def test_words_alone_are_enough_to_predict(model, tmp_path):
    (tmp_path / "words.txt").write_text("the\nbarak\n\n\nthe\nlonute")
    done = electra("predict", model, tmp_path / "words.txt", "--out", tmp_path / "tagged.txt")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tagged.txt").read_text() == "the O\nbarak B-PER\n\n\nthe O\nlonute B-LOC\n"


def test_both_kinds_of_files_evaluate_alike(model, tmp_path):
    rows = sentences(25, 5)
    columns = electra("evaluate", model, write_columns(tmp_path / "test.txt", rows), "--json")
    assert columns.returncode == 0, columns.stderr
    renamed = [{"w": row["tokens"], "ner": row["tags"]} for row in rows]
    table = write_table(tmp_path / "test.parquet", renamed)
    words = ("--text", "w", "--label", "ner")
    other = electra("evaluate", model, table, *words, "--json")
    assert other.returncode == 0, other.stderr
    assert json.loads(columns.stdout) == json.loads(other.stdout)
    assert json.loads(columns.stdout)["scores"]["f1"] > 0.8
    shown = electra("evaluate", model, table, *words)
    assert "f1 PER" in shown.stdout and "each class" in shown.stdout


@pytest.mark.parametrize(
    ("row", "given", "kind"),
    [
        ({"words": ["a", "b"], "ner": ["O", "B-X"]}, {}, "tagging"),
        ({"w": ["a"], "ner": ["O"], "pos": ["A"]}, {"text": ["w"], "label": "ner"}, "tagging"),
        ({"tokens": ["a"], "ner": ["O"], "pos": ["A"]}, {"label": "pos"}, "tagging"),
        ({"tokens": ["a"], "text": "a", "label": "x"}, {"text": ["text"], "label": "label"}, None),
        ({"text": "a b", "label": ["x", "y"]}, {}, None),
        ({"question": "a", "context": "b", "answers": []}, {}, "span"),
        ({"question": "a", "context": "b", "label": "x"}, {}, None),
        ({"question": "a", "context": "b", "answers": "x"}, {"text": ["context"], "label": "answers"}, None),
    ],
)
def test_lists_of_words_and_questions_are_known_by_their_columns(tmp_path, row, given, kind):
    guess_shape(given, write_table(tmp_path / "mine.jsonl", [{"id": 1, **row}]))
    assert given.get("kind") == kind
    if kind == "tagging":
        assert given["tokens"] in row and given["tags"] in ("ner", "pos") and "label" not in given


def test_of_several_columns_of_tags_none_is_chosen_in_silence(tmp_path):
    file = write_table(tmp_path / "mine.jsonl", [{"tokens": ["a"], "ner": ["O"], "pos": ["A"]}])
    with pytest.raises(DataError, match="which of ner, pos are the tags of tokens"):
        guess_shape({}, file)


def test_a_tenth_of_the_sentences_is_split_off(toy_model, tmp_path):
    file = write_table(tmp_path / "mine.jsonl", sentences(40, 6))
    done = electra("finetune", toy_model, file, "epochs=1", "length=40", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "dev: a tenth of train, 4 rows" in done.stderr


def test_a_column_file_is_a_task_when_its_kind_is_said(toy_model, data, tmp_path):
    words = ("finetune", toy_model, data / "eng.train", "--dev", data / "eng.testa", "--out", tmp_path / "out")
    unsaid = electra(*words)
    assert unsaid.returncode == 2 and "set kind=tagging" in unsaid.stderr
    done = electra(*words, "kind=tagging", "epochs=1", "train_scheme=bioes")
    assert done.returncode == 0, done.stderr


GOOD = sentences(20, 7)


@pytest.mark.parametrize(
    ("change", "words", "parts"),
    [
        ({"tags": ["O"]}, (), ("train row 3: ", " words but 1 tag")),
        ({"tokens": ["a", "b"], "tags": ["O", "I-PER"]}, (), ("train row 3: tag 'I-PER' of word 2 ('b') after O must be B-PER",)),
        ({"tokens": ["a"], "tags": ["PER"]}, (), ("tag 'PER' of word 1 ('a') is not a tag of iob2",)),
        ({"tokens": ["a"], "tags": [3]}, (), ("'tags' has 3 for word 1, not valid text",)),
        ({"tokens": [], "tags": []}, (), ("train row 3: no words",)),
        ({"tokens": "a text"}, (), ("'tokens' is 'a text', not a list",)),
        ({}, ("--label", "ner"), ("no column 'ner' (there are id, tokens, tags)",)),
        ({}, ("scheme=none", "metric=f1"), ("has no spans",)),
    ],
)  # fmt: skip
def test_problems_of_sentences_are_told_with_their_row_and_nothing_is_written(
    toy_model, tmp_path, change, words, parts
):
    rows = [dict(row) for row in GOOD]
    rows[2] |= change
    rows[11] |= change
    file = write_table(tmp_path / "bad.jsonl", rows)
    done = electra("finetune", toy_model, file, "kind=tagging", *words, "--out", tmp_path / "out")
    assert done.returncode == (2 if "scheme=none" in words else 3), done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()
    for part in parts:
        assert part in done.stderr, done.stderr
    if change:
        assert "(2 problems)" in done.stderr and "train row 12: " in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.txt", "the O\nbarak\n", "a.txt:2 has 1 column"),
        ("a.txt", "the\nbarak\n", "has 1 column ('the'), not 2"),
        ("a.csv", "tokens,tags\na,O\n", "csv has no lists"),
    ],
)
def test_files_that_are_no_sentences_are_refused(toy_model, tmp_path, name, content, part):
    (tmp_path / name).write_text(content)
    done = electra("finetune", toy_model, tmp_path / name, "kind=tagging", "--out", tmp_path / "out")
    assert done.returncode == 3 and part in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([{"tokens": ["a"]}, {"tokens": "not a list"}], "row 2: 'tokens' is 'not a list', not a list of texts"),
        ([{"text": "a"}], "no column 'tokens' (there are text)"),
        ([{"tokens": ["a"], "spans": 1}], "has a column 'spans' already"),
    ],
)
def test_what_cannot_be_predicted_is_refused_and_nothing_is_written(model, tmp_path, rows, part):
    file = write_table(tmp_path / "new.jsonl", rows)
    done = electra("predict", model, file, cwd=tmp_path)
    assert done.returncode == 3 and part in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["new.jsonl"]
