"""Every format is read as it was written, whatever it is packed in, and what is broken is refused with its row."""

import json
from pathlib import Path

import pytest

from electra.base.errors import DataError, SettingsError
from electra.data.columns import guess_columns, guess_kind, label_list, label_name
from electra.data.table_writer import TableWriter
from electra.data.tables import read_rows, stem

ROWS = [
    {"id": "1", "text": 'a "quoted", comma', "label": "yes"},
    {"id": "2", "text": "두 번째 줄 – ünïcode", "label": "no"},
    {"id": "3", "text": "", "label": "yes"},
]
FORMATS = ["csv", "tsv", "jsonl", "json", "parquet"]


@pytest.mark.parametrize("packing", ["", ".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_written_is_read_back(tmp_path, kind, packing):
    if kind == "parquet" and packing:
        pytest.skip("parquet is compressed inside")
    path = tmp_path / f"table.{kind}{packing}"
    with TableWriter(path) as writer:
        writer.write(ROWS[:2])
        writer.write(ROWS[2:])
    assert list(read_rows(path)) == ROWS
    assert stem(path) == "table"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_format_is_told_by_content_and_not_by_name(tmp_path):
    path = tmp_path / "data.csv"
    with TableWriter(tmp_path / "x.jsonl.gz") as writer:
        writer.write(ROWS)
    path.write_bytes((tmp_path / "x.jsonl.gz").read_bytes())
    assert list(read_rows(path)) == ROWS


def test_a_json_list_longer_than_a_block_is_read_item_by_item(tmp_path, monkeypatch):
    monkeypatch.setattr("electra.data.tables._BLOCK", 7)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS, indent=3, ensure_ascii=False))
    assert list(read_rows(path)) == ROWS


def test_csv_cells_may_hold_line_breaks_and_tsv_quotes_mean_themselves(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\n"two\nlines",1\n')
    assert list(read_rows(tmp_path / "a.csv")) == [{"text": "two\nlines", "label": "1"}]
    (tmp_path / "a.tsv").write_text('text\tlabel\n"open quote\t1\nfine\t0\n')
    assert [row["text"] for row in read_rows(tmp_path / "a.tsv")] == ['"open quote', "fine"]


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_the_cells(tmp_path):
    for name, text in (("a.csv", "text,label\r\nx,1\r\n"), ("a.tsv", "text\tlabel\r\nx\t1\r\n")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert list(read_rows(tmp_path / name)) == [{"text": "x", "label": "1"}]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.csv", "a,b\n1,2\n1,2,3\n", "row 2 has 3 cells"),
        ("a.csv", "a,a\n1,2\n", "two columns 'a'"),
        ("a.csv", "", "is empty"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "row 2 is not valid JSON"),
        ("a.jsonl", '{"a": 1}\n[3]\n', "row 2 is list"),
        ("a.json", '[{"a": 1}, {"a": ', "row 2 is not valid JSON"),
        ("a.csv", b"a,b\n\xff\xfe,2\n", "not UTF-8"),
    ],
)
def test_broken_tables_are_refused_with_the_place(tmp_path, name, content, part):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=part):
        list(read_rows(path))


def test_a_cut_off_archive_is_refused(tmp_path):
    with TableWriter(tmp_path / "a.jsonl.gz") as writer:
        writer.write(ROWS * 50)
    content = (tmp_path / "a.jsonl.gz").read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="cut off or damaged"):
        list(read_rows(tmp_path / "b.jsonl.gz"))


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), TableWriter(tmp_path / "a.csv") as writer:
        writer.write(ROWS)
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with pytest.raises(SettingsError, match="does not say what it is"):
        TableWriter(Path("a.xlsx"))


def test_parquet_is_told_what_lists_hold_that_are_empty_at_first(tmp_path):
    rows = [{"id": 1, "spans": []}, {"id": 2, "spans": [{"type": "PER", "start": 0}]}]
    with TableWriter(tmp_path / "a.parquet", {"spans": [{"type": "", "start": 0}]}) as writer:
        writer.write(rows[:1])
        writer.write(rows[1:])
    assert list(read_rows(tmp_path / "a.parquet")) == rows


def test_columns_are_guessed_by_name_and_then_by_what_they_hold():
    long = "a long text of many words that differs "
    rows = [{"n": i, "body_of_it": f"{long}{i}", "group": "ab"[i % 2]} for i in range(20)]
    assert guess_columns(rows) == (("body_of_it",), "group")
    assert guess_columns([{"premise": "a", "hypothesis": "b", "gold_label": "x"}] * 4)[0] == (
        "premise",
        "hypothesis",
    )
    with pytest.raises(DataError, match="--text and --label"):
        guess_columns([{"a": 1}])


def test_kinds_are_guessed_from_the_labels():
    assert guess_kind(["1", "0", "1"]) == "classification"
    assert guess_kind([1, 2.5]) == "regression"
    assert guess_kind([["a"], []]) == "multilabel"
    assert guess_kind(["good", "1"]) == "classification"


def test_one_label_has_one_name_in_every_format():
    assert {label_name(value) for value in (1, 1.0, "1")} == {"1"}
    assert (
        label_list('["a", "b"]', "|") == label_list("a | b", "|") == label_list(["a", "b"], "|") == ["a", "b"]
    )
