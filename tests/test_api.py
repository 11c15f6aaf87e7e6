"""The Python API: light to import, and every example of its docstrings and of docs/api.md runs."""

import doctest
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import electra
from electra.base.errors import counted
from helpers import write_corpus

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
IN_ORDER = (
    "train_tokenizer",
    "prepare",
    "pretrain",
    "extend_tokenizer",
    "finetune",
    "predict",
    "evaluate",
    "import_model",
    "export",
    "compare",
    "load",
)


@pytest.fixture
def workplace(tmp_path, monkeypatch, forked_looks):
    """A folder with the files that the examples speak of."""
    write_corpus(tmp_path / "my-text.txt", documents=60)
    rows = [f"the barak {'walks' if row % 2 else 'reads'} {row},{1 + row % 2}" for row in range(60)]
    (tmp_path / "my-field.txt").write_text("the barakwalks reads the barakwalks\n")
    (tmp_path / "my-table.csv").write_text("review,stars\n" + "\n".join(rows) + "\n")
    shutil.copytree(Path(__file__).parent / "interop" / "tensorflow" / "bert", tmp_path / "their-bert")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_importing_it_is_light_and_its_names_are_there():
    code = (
        "import sys, electra; print([name for name in ('torch', 'numpy', 'pydantic', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
    assert {*IN_ORDER, "Model", "ElectraError", "__version__"} <= set(electra.__all__)
    for name in electra.__all__:
        assert getattr(electra, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        electra.nonsense  # noqa: B018


def test_numbers_of_numpy_and_a_name_alone_are_what_they_look_like(tmp_path, monkeypatch):
    with pytest.raises(electra.ElectraError, match=r"^unknown key train.stepz. Did you mean train.steps\?$"):
        electra.pretrain("tiny", "train.stepz=2", data=tmp_path, run=tmp_path / "run")
    numbers = {
        "train.batch": np.int64(32),
        "optimizer.lr": np.float64(0.1),
        "optimizer.eps": np.float32(0.5),
        "seed": -1,
    }
    with pytest.raises(electra.ElectraError, match=r"^seed: [^\n]*$"):
        electra.pretrain("tiny", numbers, data=tmp_path, run=tmp_path / "run")
    monkeypatch.setattr("electra.inspector.export.export_model", lambda *words: words[-1])
    card = electra.export("my-run", tmp_path, language="en", datasets="squad")
    assert (card.language, card.datasets) == (["en"], ["squad"])
    assert counted(np.int64(2), "seed") == "2 seeds"
    with pytest.raises(electra.ElectraError, match="0 seeds train nothing"):
        electra.finetune("my-run", "my-table.csv", tmp_path / "out", seeds=0)


def test_the_version_is_written_once():
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in pyproject and electra.__version__ not in pyproject


def test_it_is_typed():
    assert (Path(electra.__file__).parent / "py.typed").is_file()


@pytest.mark.timeout(240)
def test_every_docstring_example_runs(workplace):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    for name in IN_ORDER:
        (example,) = doctest.DocTestFinder(recurse=False).find(getattr(electra, name), name, globs={"electra": electra})
        assert example.examples, f"{name} has no example"
        runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.timeout(240)
def test_every_snippet_of_the_page_runs(workplace, capsys):
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(snippet, names)
    for name in IN_ORDER:
        assert any(f"electra.{name}(" in snippet for snippet in snippets), f"{name} is not in {PAGE.name}"
    assert "discriminator" in capsys.readouterr().out
    assert (workplace / "answers.csv").is_file() and (workplace / "my-model/generator").is_dir()


def test_a_launched_run_without_held_out_text_has_no_metrics(tmp_path, monkeypatch):
    """The processes that were started write the run folder; this one reads what they measured."""
    monkeypatch.setattr("electra.train.distributed.launch", lambda words, settings, folder: None)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 4, "loss": 2.5}\n')
    assert electra.pretrain("tiny", {"train.processes": 2}, data="x", run=tmp_path) == (tmp_path, {})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "heldout", "step": 2, "auc": 0.5}\n{"kind": "heldout", "step": 4, "auc": 0.75}\n')
    assert electra.pretrain("tiny", {"train.processes": 2}, data="x", run=tmp_path).metrics == {"auc": 0.75}
