"""GLUE as it is handed out: its folders, its file names, its columns, its flaws; and what its server wants back."""

import math
from pathlib import Path

import pytest

from electra.finetuning.plan import make_plan
from helpers import electra

MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
)
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
# task: (folder, {file: (header, row)}, labels, submissions); {n} is the row's number, {label} its label
OFFICIAL = {
    "cola": (
        "CoLA",
        {"train": ("", "gj04\t{label}\t\tthe barak {n}"), "test": ("index\tsentence", "{n}\tthe lonute {n}")},
        ("0", "1"),
        {"CoLA.tsv"},
    ),
    "sst2": (
        "SST-2",
        {"train": ("sentence\tlabel", "the barak {n} \t{label}"), "test": ("index\tsentence", "{n}\tthe lonute {n}")},
        ("0", "1"),
        {"SST-2.tsv"},
    ),
    "mrpc": (
        "MRPC",
        {
            "train": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", '{label}\t1\t2\t"the barak {n}\tthe back'),
            "test": ("index\t#1 ID\t#2 ID\t#1 String\t#2 String", "{n}\t1\t2\tthe lonute {n}\tthe back"),
        },
        ("0", "1"),
        {"MRPC.tsv"},
    ),
    "stsb": (
        "STS-B",
        {
            "train": (f"{STSB}\tscore", "{n}\tg\tf\t2012\t1\ts\ts\tthe barak {n}\tthe back\t{label}"),
            "test": (STSB, "{n}\tg\tf\t2012\t1\ts\ts\tthe lonute {n}\tthe back"),
        },
        ("0.000", "3.200"),
        {"STS-B.tsv"},
    ),
    "qqp": (
        "QQP",
        {
            "train": (
                "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
                "{n}\t1\t2\tthe barak {n}\tthe back\t{label}",
            ),
            "test": ("id\tquestion1\tquestion2", "{n}\tthe lonute {n}\tthe back"),
        },
        ("0", "1"),
        {"QQP.tsv"},
    ),
    "mnli": (
        "MNLI",
        {
            "train": (
                f"{MNLI}\tsentence1\tsentence2\tlabel1\tgold_label",
                "{n}\tp\tq\tg\ta\tb\tc\td\tthe barak {n}\tthe back\t{label}\t{label}",
            ),
            "dev_matched": (
                f"{MNLI}\tsentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
                "{n}\tp\tq\tg\ta\tb\tc\td\tthe timin {n}\tback\t" + "{label}\t" * 5 + "{label}",
            ),
            "dev_mismatched": (
                f"{MNLI}\tsentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
                "{n}\tp\tq\tg\ta\tb\tc\td\tthe selin {n}\tback\t" + "{label}\t" * 5 + "{label}",
            ),
            "test_matched": (f"{MNLI}\tsentence1\tsentence2", "{n}\tp\tq\tg\ta\tb\tc\td\tthe lonute {n}\tthe back"),
            "test_mismatched": (f"{MNLI}\tsentence1\tsentence2", "{n}\tp\tq\tg\ta\tb\tc\td\tthe lonak {n}\tthe back"),
            "../diagnostic/diagnostic": ("index\tsentence1\tsentence2", "{n}\tthe lonute {n}\tthe back"),
        },
        ("entailment", "neutral", "contradiction"),
        {"MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"},
    ),
    "qnli": (
        "QNLI",
        {
            "train": ("index\tquestion\tsentence\tlabel", '{n}\tWhat is the "barak" {n}?\tIt is "the back\t{label}'),
            "test": ("index\tquestion\tsentence", "{n}\tthe lonute {n}\tthe back"),
        },
        ("entailment", "not_entailment"),
        {"QNLI.tsv"},
    ),
    "rte": (
        "RTE",
        {
            "train": ("index\tsentence1\tsentence2\tlabel", "{n}\tthe barak {n}\tthe back\t{label}"),
            "test": ("index\tsentence1\tsentence2", "{n}\tthe lonute {n}\tthe back"),
        },
        ("entailment", "not_entailment"),
        {"RTE.tsv"},
    ),
    "wnli": (
        "WNLI",
        {
            "train": ("index\tsentence1\tsentence2\tlabel", "{n}\tthe barak {n}\tthe back\t{label}"),
            "test": ("index\tsentence1\tsentence2", "{n}\tthe lonute {n}\tthe back"),
        },
        ("0", "1"),
        {"WNLI.tsv"},
    ),
}  # fmt: skip


def write(path: Path, header: str, row: str, labels: tuple[str, ...], first: int, count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row.format(n=first + place, label=labels[place % len(labels)]) for place in range(count)]
    path.write_text("\n".join([*([header] if header else []), *rows]) + "\n", "utf-8")


@pytest.mark.parametrize("task", OFFICIAL)
def test_official_files_are_read_and_their_submissions_written(toy_model, tmp_path, task):
    folder, files, labels, submissions = OFFICIAL[task]
    for name, (header, row) in files.items():
        write(tmp_path / "glue" / folder / f"{name}.tsv", header, row, labels, 0, 12)
    if "dev_matched" not in files:
        write(tmp_path / "glue" / folder / "dev.tsv", *files["train"], labels, 100, 6)
    if task == "qqp":
        with (tmp_path / "glue" / folder / "train.tsv").open("a") as file:
            file.write("400\t1\t2\ta question that\n")
    words = ("epochs=1", "length=32", "batch=8", "evaluations=1", "--out", tmp_path / "out")
    done = electra("finetune", toy_model, task, f"data={tmp_path / 'glue'}", *words)
    assert done.returncode == 0, done.stderr
    assert f"{task}: train: train.tsv, 12 rows, NOT the official set" in done.stderr
    assert ("train: 1 broken rows are left out" in done.stderr) == (task == "qqp")
    found = {path.name: path.read_text().splitlines() for path in (tmp_path / "out" / "submission").iterdir()}
    assert found.keys() == submissions
    for lines in found.values():
        assert lines[0] == "index\tprediction" and [line.split("\t")[0] for line in lines[1:]] == [*map(str, range(12))]
        answers = {line.split("\t")[1] for line in lines[1:]}
        assert task == "stsb" or answers <= set(labels)
        assert task != "stsb" or all(map(math.isfinite, map(float, answers)))
    model = tmp_path / "out" / task / "seed-0"
    dev = "dev_mismatched.tsv" if task == "mnli" else "dev.tsv"
    assert electra("evaluate", model, tmp_path / "glue" / folder / dev).returncode == 0


def test_a_broken_row_of_a_submission_is_not_left_out(tmp_path):
    _, files, labels, _ = OFFICIAL["qqp"]
    for name in ("train", "dev", "test"):
        write(tmp_path / "QQP" / f"{name}.tsv", *files["test" if name == "test" else "train"], labels, 0, 6)
        with (tmp_path / "QQP" / f"{name}.tsv").open("a") as file:
            file.write("400\ta question that\n" + files["test" if name == "test" else "train"][1] + "\n")
    plan = make_plan("qqp", {"data": str(tmp_path)}, {})
    assert {split: len(rows) for split, rows in plan.splits.items()} == {"train": 7, "dev": 7, "test": 8}
    assert plan.malformed["test"].keys() == {7}, "the answers after it would have the numbers of other rows"


def test_a_tenth_is_split_off_also_where_columns_have_two_names(toy_model, tmp_path):
    write(tmp_path / "RTE" / "train.tsv", *OFFICIAL["rte"][1]["train"], OFFICIAL["rte"][2], 0, 30)
    words = ("text=['premise|sentence1', 'hypothesis|sentence2']", "epochs=1", "length=32", "--out", tmp_path / "out")
    done = electra("finetune", toy_model, "rte", f"data={tmp_path}", *words)
    assert done.returncode == 0, done.stderr
    assert "dev: a tenth of train, 3 rows" in done.stderr


def test_a_header_is_told_from_a_first_row(tmp_path):
    from electra.data.tables import read_rows

    names = ("source", "label", "star", "sentence")
    for text in ("gj\t1\t\tA row.\n", "source\tlabel\tstar\tsentence\ngj\t1\t\tA row.\n"):
        (tmp_path / "a.tsv").write_text(text)
        (row,) = read_rows(tmp_path / "a.tsv", names)
        assert row == {"source": "gj", "label": "1", "star": "", "sentence": "A row."}


@pytest.mark.parametrize(("name", "bad"), [("t.csv", "a,b,c"), ("t.jsonl", "{'a': 1}"), ("t.jsonl", "[1]")])
def test_rows_that_cannot_be_read_are_told_with_all_other_problems(toy_model, tmp_path, name, bad):
    good = [f"the barak {n},{'xy'[n % 2]}" for n in range(30)]
    if name.endswith("jsonl"):
        good = [f'{{"text": "the barak {n}", "label": "{"xy"[n % 2]}"}}' for n in range(30)]
    head = ["text,label"] if name.endswith("csv") else []
    nothing = ",x" if head else '{"text": "", "label": "x"}'
    lines = [*head, *good[:3], bad, *good[3:7], nothing, *good[7:], bad]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    done = electra(
        "finetune", toy_model, tmp_path / name, "--text", "text", "--label", "label", "--out", tmp_path / "o"
    )
    assert done.returncode == 3 and not (tmp_path / "o").exists()
    assert "(3 problems)" in done.stderr, done.stderr
    for number in (4, 33):
        assert f"train row {number}: " in done.stderr
    assert "train row 9: no text in 'text'" in done.stderr
