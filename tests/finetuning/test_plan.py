"""What is wrong with the rows of a plan: numbered as in the file, and not held against official sets."""

import json
from pathlib import Path

import pytest

from electra.base.errors import DataError
from electra.data.tables import stem
from electra.data.tokenizer import load_tokenizer
from electra.finetuning import Problem
from electra.finetuning.plan import find_files, make_plan, plan_problems, refuse

SENTENCES = [{"text": f"the barak walks {number}", "label": "ab"[number % 2]} for number in range(6)]


@pytest.mark.parametrize(("official_rows", "refused"), [(4, False), (5, True)])
def test_rows_that_official_sets_share_are_said_and_not_refused(toy_model, tmp_path, caplog, official_rows, refused):
    for name, rows in (("train", SENTENCES[:4]), ("dev", SENTENCES[3:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "official.toml"
    recipe.write_text(f'kind = "classification"\nrows = {{ train = {official_rows}, dev = 3 }}\n')
    plan = make_plan(str(recipe), {"data": str(tmp_path)}, {})
    problems = plan_problems(plan, plan.task.build(load_tokenizer(toy_model), 24, plan.splits))
    shared = "dev row 1 is also train row 4"
    assert list(map(str, problems)) == ([shared] if refused else [])
    assert (shared in caplog.text) is not refused


def test_rows_that_were_split_off_are_numbered_as_in_their_file():
    numbers = {"train": [1, 4], "dev": [2, 3]}
    twice = Problem("dev", 1, "is also", ("train", 2)).renumbered(numbers)
    assert str(twice) == "train row 2 is also train row 4"
    same = Problem("dev", 2, "has the id 'x' of", ("dev", 1)).renumbered(numbers)
    assert str(same) == "train row 3 has the id 'x' of train row 2"
    whole = Problem("dev", 0, "no column 'text'").renumbered(numbers)
    assert str(whole) == "dev: no column 'text'"
    assert str(Problem("test", 2, "no text").renumbered(numbers)) == "test row 2: no text"


def test_what_is_wrong_with_a_whole_split_is_told_before_its_rows():
    rows = [Problem("dev", number, f"label 'c{number}' was not seen in train") for number in range(1, 40)]
    with pytest.raises(DataError, match=r"problems\):\n  train: 300 different labels in 310 rows\n  dev row 1: "):
        refuse([*rows, Problem("train", 0, "300 different labels in 310 rows")])


@pytest.mark.parametrize("ending", ["conll", "conll.gz", "iob2", "txt", "conllu"])
def test_column_files_are_named_without_their_endings(tmp_path, ending):
    for name in ("train", "train_small", "dev"):
        (tmp_path / f"{name}.{ending}").write_text("a O\n")
    files = find_files("x", str(tmp_path), {}, any_file=True)
    assert {split: path.name for split, path in files.items()} == {"train": f"train.{ending}", "dev": f"dev.{ending}"}
    assert stem(Path(f"my.{ending}")) == "my" and stem(Path("eng.train")) == "eng.train"


def test_only_files_that_were_named_are_looked_for_in_the_current_folder(tmp_path, monkeypatch):
    """`test` and `dev` may be anything there, a script for example."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("sst.csv", "test", "dev", "data/sst.csv", "data/train.csv", "data/dev"):
        (tmp_path / name).write_text("text,label\na,0\n")
    train, dev = Path("sst.csv"), Path("dev")
    assert find_files("x", "sst.csv", {}, any_file=False) == {"train": train}
    assert make_plan("sst.csv", {"files.dev": "dev"}, {}).files == {"train": train, "dev": dev}
    folder = {"train": Path("data/train.csv"), "dev": Path("data/dev")}
    assert find_files("x", "data", {}, any_file=False) == folder
    assert find_files("x", "data", {"dev": "dev"}, any_file=False) == folder  # as a shipped task names it
    assert find_files("x", "data", {"dev": "dev"}, any_file=False, own={"dev"}) == folder | {"dev": dev}


def test_a_folder_of_column_files_says_what_is_missing(tmp_path):
    (tmp_path / "train.conll").write_text("a O\n")
    with pytest.raises(DataError, match="A file with one word per line needs kind=tagging"):
        find_files("x", str(tmp_path), {}, any_file=False)


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        (["DET", "NOUN"], "none, a plain tag for each word"),
        (["S-PER", "O"], "bioes"),
        (["B-PER", "I-PER"], None),
        (["O", "O"], None),
        (["B-PER", "PER"], None),  # a slip, which is refused later, and no other scheme
    ],
)
def test_the_scheme_of_a_table_of_tags_is_guessed_and_said(tmp_path, tags, said):
    table = tmp_path / "t.jsonl"
    table.write_text("".join(json.dumps({"tokens": ["a", "b"], "pos": row}) + "\n" for row in (["O", "O"], tags)))
    for words in ({}, {"kind": "tagging", "label": "pos"}):
        plan = make_plan(str(table), words, {})
        assert [note for note in plan.notes if "scheme" in note] == (
            [f"scheme (guessed from the tags): {said}"] if said else []
        )
        assert plan.task.scheme == (said.partition(",")[0] if said else "iob2")
    assert make_plan(str(table), {"scheme": "iob1"}, {}).task.scheme == "iob1"


def test_a_table_of_which_no_row_can_be_read_says_why_and_does_not_ask_for_columns(tmp_path):
    lines = "".join(f"schön {number};{number % 2}\n" for number in range(20))
    (tmp_path / "excel.csv").write_bytes(f"Text;Ergebnis\n{lines}".encode("cp1252"))
    with pytest.raises(DataError, match=r"train rows 1, 2.* more: has bytes that are not UTF-8\. .*iconv -f CP1252"):
        make_plan(str(tmp_path / "excel.csv"), {}, {})
