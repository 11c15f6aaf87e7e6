"""The stories in examples/, end to end at a small size."""

import json
import runpy
from itertools import islice
from pathlib import Path

import pytest

import electra
from electra.data.corpus import Corpus
from helpers import write_corpus

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.usefixtures("forked_looks")


def story(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.timeout(480)
def test_own_language(shared_data, tmp_path):
    """Korean: syllables stay whole, and the encoder is one of transformers'."""
    documents = islice(Corpus([shared_data / "ko" / "ko_wiki.jsonl.zst"]).read(), 60)
    lines = [json.dumps({"text": document.text[:2000]}, ensure_ascii=False) for document in documents]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "ko.jsonl").write_text("\n".join(lines), "utf-8")
    arguments = tmp_path / "text", tmp_path / "out", "tiny", 4, 600
    folder = story("own_language")(*arguments)
    assert folder == story("own_language")(*arguments)
    model = electra.load(folder)
    tokens = model.detect("한국어 문장입니다.")
    assert "".join(token.token.removeprefix("##") for token in tokens).startswith("한국")
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoModel.from_pretrained(folder).config.vocab_size == model.tokenizer.get_vocab_size()


@pytest.mark.timeout(480)
@pytest.mark.parametrize("start", ["run", pytest.param("folder of transformers", marks=pytest.mark.slow)])
def test_own_field(start, finished_run, toy_model, recipe, tmp_path):
    """The encoder goes on from where it was: it is near the model it started from, and not that model."""
    text = write_corpus(tmp_path / "field.txt", documents=80)
    model = finished_run if start == "run" else toy_model
    folder = story("own_field")(model, text, tmp_path / "out", str(recipe), 3)
    before, after = (electra.load(path).encoder.embeddings.table for path in (model, folder))
    assert before.shape == after.shape
    assert 0 < (before - after).abs().max() < 0.05
    assert electra.load(folder).network.length is None


@pytest.mark.timeout(480)
def test_own_labels(toy_model, tmp_path):
    rows = [f"the barak {'walks' if row % 2 else 'reads'} {row},{1 + row % 2}" for row in range(60)]
    (tmp_path / "table.csv").write_text("review,stars\n" + "\n".join(rows) + "\n")
    (tmp_path / "new.csv").write_text("review\nthe barak walks 99\nthe barak reads 98\n")
    arguments = toy_model, tmp_path / "table.csv", tmp_path / "new.csv", tmp_path / "answers.csv"
    (answers,) = story("own_labels")(*arguments, text="review", label="stars", seeds=2, epochs=1)
    header, *lines = answers.read_text().splitlines()
    assert header == "review,prediction,probability_1,probability_2" and len(lines) == 2


@pytest.mark.timeout(480)
def test_the_notebook_runs_from_its_first_cell_to_its_last(toy_model, tmp_path, monkeypatch):
    """As it is, but for one epoch."""
    rows = [f"the barak {'walks' if row % 2 else 'reads'} {row},{1 + row % 2}" for row in range(60)]
    (tmp_path / "my-table.csv").write_text("review,stars\n" + "\n".join(rows) + "\n")
    (tmp_path / "new-rows.csv").write_text("review\nthe barak walks 99\nthe barak reads 98\n")
    (tmp_path / "my-model").symlink_to(toy_model)
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "own_labels.ipynb").read_text("utf-8"))
    assert notebook["nbformat"] == 4 and len(notebook["cells"]) == 10
    names: dict = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            exec("".join(cell["source"]).replace("seeds=2", "seeds=2, epochs=1"), names)
    assert names["answer"]["prediction"] in ("1", "2") and names["predicted"].rows == 2
    assert {"majority", "words"} <= names["result"]["baselines"]["dev"].keys()
    assert (tmp_path / "answers.csv").read_text().startswith("review,prediction,probability_1,probability_2\n")
