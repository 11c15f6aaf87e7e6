"""Tables as people have them: many classes, rare ones, few rows, columns that come and go."""

import json
from pathlib import Path
from typing import Any

import pytest

from electra.data.tokenizer import load_tokenizer
from electra.finetune.kinds import build_task
from electra.finetune.plan import make_plan
from electra.finetune.table import read_rows


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def problems(toy_model, tmp_path):
    """What is wrong with a table, without a network."""

    def find(rows: list[dict], **settings: Any) -> list[str]:
        plan, splits = make_plan(str(write(tmp_path / "t.jsonl", rows)), settings, {})
        return build_task(plan.task, load_tokenizer(toy_model), 24, splits).problems(splits)

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


def test_an_empty_cell_is_a_row_where_there_is_one_column(tmp_path):
    for name, text in (("a.csv", 'text\nx\n""\ny\n'), ("a.tsv", "text\nx\n\ny\n")):
        (tmp_path / name).write_text(text)
        assert [row["text"] for row in read_rows(tmp_path / name)] == ["x", "", "y"]
    (tmp_path / "b.csv").write_text('text,label\nx,1\n""\n\ny,2\n')
    assert [row["text"] for row in read_rows(tmp_path / "b.csv")] == ["x", "y"]
