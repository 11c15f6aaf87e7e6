"""Every format is read as it was written, whatever it is packed in, and what is broken is refused with its row."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from electra.base.errors import DataError, SettingsError
from electra.data.tables import (
    TableWriter,
    comma_number,
    csv_separator,
    guess_columns,
    guess_kind,
    label_list,
    label_name,
    parquet_schema,
    read_conll,
    read_rows,
    stem,
)

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


def test_every_line_end_inside_a_csv_cell_survives(tmp_path):
    rows = [
        {"text": "a\rb", "x": "1"},
        {"text": "c", "x": "2\r"},
        {"text": "d\r\ne", "x": "3\n"},
        {"text": "f", "x": ""},
    ]
    with TableWriter(tmp_path / "a.csv") as writer:
        writer.write(rows)
    assert list(read_rows(tmp_path / "a.csv")) == rows
    assert (tmp_path / "a.csv").read_bytes().endswith(b"\nf,\n")  # what needs no quotes has none


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


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_a_semicolon_separates_cells_where_the_first_line_has_no_comma(tmp_path, packing):
    path = tmp_path / f"a.csv{packing}"
    content = '\ufeffText;"Ergebnis, kurz"\r\n"gut; und, ja";1\r\n0,5;2\r\n'.encode()
    path.write_bytes(gzip.compress(content) if packing else content)
    rows = [{"Text": "gut; und, ja", "Ergebnis, kurz": "1"}, {"Text": "0,5", "Ergebnis, kurz": "2"}]
    assert list(read_rows(path)) == rows
    assert csv_separator(path) == ";"
    with TableWriter(tmp_path / "b.csv", separator=";") as writer:
        writer.write(rows)
    assert (tmp_path / "b.csv").read_text() == 'Text;Ergebnis, kurz\n"gut; und, ja";1\n0,5;2\n'


def test_a_csv_whose_first_line_has_tabs_alone_is_separated_by_tabs(tmp_path):
    (tmp_path / "a.csv").write_text('text\tlabel\n"gut; und\tja, ja"\t1\n')
    assert list(read_rows(tmp_path / "a.csv")) == [{"text": "gut; und\tja, ja", "label": "1"}]
    assert csv_separator(tmp_path / "a.csv") == "\t"


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.csv", 'a,"b;c"\n1,2\n'), ("a.csv", '"a;b"\n1,2\n'), ("a.csv", "a;b,c\n1,2\n"), ("a.tsv", "a;b\tc\n1\t2\n")],
)
def test_a_semicolon_in_a_name_or_beside_a_comma_separates_nothing(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert csv_separator(tmp_path / name) == ","


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.csv", "a,b\n1,2\n1,2,3\n", "row 2 has 3 cells"),
        ("a.csv", "a,a\n1,2\n", "two columns 'a'"),
        ("a.csv", "", "is empty"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "row 2 is not valid JSON"),
        ("a.jsonl", '{"a": 1}\n[3]\n', "row 2 is list"),
        ("a.json", '[{"a": 1}, {"a": ', "row 2 is not valid JSON"),
        ("a.json", '[{"a": 1} {"a": 2}]', "neither a comma nor the end of the list follows row 1"),
        ("a.json", '[{"a": 1},, {"a": 2}]', "row 2 is not valid JSON"),
        ("a.json", '[{"a": 1}', "neither a comma nor the end of the list follows row 1"),
        ("a.json", '[{"a": 1}]\n[{"a": 2}]', "continues after the end of its list, after row 1"),
        (
            "a.csv",
            b"a,b\n1,2\n\xff\xfe,2\n",
            "row 2 has bytes that are not UTF-8.*iconv -f CP1252 -t UTF-8 .*a.csv > utf8-a.csv",
        ),
        ("a.tsv", b"a\tb\n1\t\xe4\n", "row 1 has bytes that are not UTF-8"),
        ("a.csv", b"a,b\xe4\n1,2\n", "first line has bytes that are not UTF-8.*iconv -f CP1252"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), "iconv -f UTF-16"),
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
    with pytest.raises(SettingsError, match="does not show its format"):
        TableWriter(Path("a.xlsx"))
    with pytest.raises(SettingsError, match=r"a.parquet.gz: parquet is compressed inside. Write a.parquet."):
        TableWriter(Path("a.parquet.gz"))


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
    assert guess_columns([{"premise": "a", "hypothesis": "b", "gold_label": "x"}] * 4)[0] == ("premise", "hypothesis")
    with pytest.raises(DataError, match="text and label"):
        guess_columns([{"a": 1}])


def test_columns_that_are_as_likely_the_label_are_named_and_none_is_taken():
    rows = [{"nr": n, "note": f"text of row {n}", "town": "xy"[n % 2], "result": "ab"[n // 10]} for n in range(20)]
    with pytest.raises(DataError, match="label\\? town and result have 2 different values each. Name one") as error:
        guess_columns(rows)
    assert error.value.parameters == ("label",)
    assert guess_columns(rows, label="result") == (("note",), "result")
    assert guess_columns(rows, texts=["town"]) == (("town",), "result")
    assert guess_columns([{**row, "town": "xyz"[row["nr"] % 3]} for row in rows]) == (("note",), "result")
    assert guess_columns([{"text": row["town"], "result": row["result"]} for row in rows]) == (("text",), "result")


def test_kinds_are_guessed_from_the_labels():
    assert guess_kind(["1", "0", "1"]) == "classification"
    assert guess_kind([1, 2.5]) == "regression"
    assert guess_kind([["a"], []]) == "multilabel"
    assert guess_kind(["good", "1"]) == "classification"
    assert guess_kind(['["a", "b"]', '["a"]']) == guess_kind(["['a', 'b']", "[]"]) == "multilabel"
    assert guess_kind(["[laughs]", "[music", "it['a']"]) == "classification"


def test_one_label_has_one_name_in_every_format():
    assert {label_name(value) for value in (1, 1.0, "1")} == {"1"}
    assert label_list('["a", "b"]', "|") == label_list("a | b", "|") == label_list(["a", "b"], "|") == ["a", "b"]
    assert label_list("['a', \"b's\", 3]", "|") == ["a", "b's", "3"] and label_list("[]", "|") == []
    for no_list in ("[laughs]", "['a', ['b']]", "['a'] + x", "['a'", "[" * 9999):
        assert label_list(no_list, "|") == [no_list]


def test_an_empty_cell_is_a_row_where_there_is_one_column(tmp_path):
    for name, text in (("a.csv", 'text\nx\n""\ny\n'), ("a.tsv", "text\nx\n\ny\n")):
        (tmp_path / name).write_text(text)
        assert [row["text"] for row in read_rows(tmp_path / name)] == ["x", "", "y"]
    (tmp_path / "b.csv").write_text('text,label\nx,1\n""\n\ny,2\n')
    assert [row["text"] for row in read_rows(tmp_path / "b.csv")] == ["x", "y"]


def test_columns_of_a_parquet_file_keep_their_types(tmp_path):
    """Also where the first rows say nothing about them, or too little."""
    kinds = pa.schema([("n", pa.int32()), ("list", pa.list_(pa.int64())), ("real", pa.float64())])
    rows = [{"n": None, "list": [], "real": 1}, {"n": 7, "list": [3], "real": 1.5}]
    pq.write_table(pa.Table.from_pylist(rows, schema=kinds), tmp_path / "a.parquet")
    with TableWriter(tmp_path / "b.parquet", schema=parquet_schema(tmp_path / "a.parquet")) as writer:
        for row in read_rows(tmp_path / "a.parquet"):
            writer.write([{**row, "prediction": "x"}])
    written = pq.read_table(tmp_path / "b.parquet")
    assert written.schema.field("n").type == pa.int32() and written.select(kinds.names).to_pylist() == rows


def test_parquet_that_cannot_hold_the_rows_names_the_way_round(tmp_path):
    with pytest.raises(DataError, match=r"rows 2 to 2 .* a\.jsonl"), TableWriter(tmp_path / "a.parquet") as writer:
        writer.write([{"n": 1}])
        writer.write([{"n": "one"}])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_a_column_is_never_dropped(tmp_path, kind):
    with TableWriter(tmp_path / f"a.{kind}") as writer:
        writer.write([{"a": "1"}, {"a": "2", "b": "3"}])
    assert [row["b"] or None for row in read_rows(tmp_path / f"a.{kind}")] == [None, "3"]
    with pytest.raises(DataError, match=r"'b' .* c\.jsonl"), TableWriter(tmp_path / f"c.{kind}") as writer:
        writer.write([{"a": "1"}])
        writer.write([{"a": "2", "b": "3"}])


def test_numbers_of_the_file_are_written_exactly_and_ours_with_six_digits(tmp_path):
    with TableWriter(tmp_path / "a.csv") as writer:
        writer.write([{"id": 1234567.25, "probability": 0.123456789}], answers={"probability"})
    assert list(read_rows(tmp_path / "a.csv")) == [{"id": "1234567.25", "probability": "0.123457"}]


def test_names_with_a_separator_between_them_are_several_labels():
    assert guess_kind(["a|b", "a", None]) == "multilabel"
    assert guess_kind(["a;b", "a"]) == guess_kind(["|", "a|"]) == "classification"
    assert guess_kind(["a;b", "a"], ";") == "multilabel"
    assert guess_kind(["rent|lease", *["rent", "lease"] * 200]) == "classification"  # a slip, or a name
    assert guess_kind(["a|b", *["a", "b"] * 10]) == "classification" != guess_kind(["a|b", *["a", "b"] * 4])
    assert guess_kind([*["a|b"] * 4, *["a", "b"] * 150]) == "multilabel"
    assert guess_kind([*["a|b"] * 3, *["a", "b"] * 200]) == "classification"


def test_numbers_with_a_comma_are_noticed_where_they_are_the_rule():
    assert comma_number(["3,40", "12,5", "1.234,50", "7", "", None]) == "3,40"
    assert comma_number(["1,234", "2,000"]) == "1,234"
    for others in (["3.40", "1"], ["3,40", "1", "2"], ["3,40", "a", "5,10"], ["a,b", "1,b"], [["3,40"]], []):
        assert comma_number(others) == ""


NER = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

# # I-NP O
{ ( O O


\u00a0Peter\u00a0B. NNP B-NP B-PER
"""
SENTENCES = [
    {"tokens": ["EU", "rejects"], "ner": ["B-ORG", "O"]},
    {"tokens": ["#", "{"], "ner": ["O", "O"]},
    {"tokens": ["\u00a0Peter\u00a0B."], "ner": ["B-PER"]},
]
COLUMNS = {"tokens": 0, "ner": -1}


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress, zstd])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_sentences_are_read_whatever_the_packing(tmp_path: Path, pack, end: str) -> None:
    (tmp_path / "eng.train").write_bytes(pack(NER.replace("\n", end).encode()))
    assert read_conll(tmp_path / "eng.train", COLUMNS) == SENTENCES


def test_a_byte_order_mark_and_a_missing_last_line_end_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbf{ O\nb B-X")
    assert read_conll(tmp_path / "file", COLUMNS) == [{"tokens": ["{", "b"], "ner": ["O", "B-X"]}]


def test_conll_u_has_comments_ranges_and_empty_nodes(tmp_path: Path) -> None:
    def line(*cells: str) -> str:
        return "\t".join([*cells, *["_"] * (10 - len(cells))])

    lines = [
        "# newdoc", "# text = don't # go", line("1-2", "don't"), line("1", "do", "do", "AUX"),
        line("2", "n't", "not", "PART"), line("2.1", "ghost", "_", "VERB"), line("3", "New York", "_", "PROPN"), "",
        line("1", "#", "#", "SYM"),
    ]  # fmt: skip
    (tmp_path / "en.conllu").write_text("\n".join(lines), "utf-8")
    assert read_conll(tmp_path / "en.conllu", {"tokens": 1, "upos": 3}) == [
        {"tokens": ["do", "n't", "New York"], "upos": ["AUX", "PART", "PROPN"]},
        {"tokens": ["#"], "upos": ["SYM"]},
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"EU B-ORG\nrejects\n", r"file:2 has 1 column, the first word 2 \('rejects'\). Repair it"),
        (b"EU B-ORG\nrejects VBZ O\n", "file:2 has 3 columns, the first word 2"),
        (b"EU\nrejects\n", "has 1 column .'EU'., not 2"),
        (b"-DOCSTART- O\n\n  \n", "has no words"),
        (b"", "has no words"),
        (b"EU O\n\xff\xfe O\n", "file:2 has bytes that are not UTF-8"),
        (gzip.compress(NER.encode(), mtime=0)[:-20], "cut off or damaged"),
        (b"PAR1 and so on", "is a table"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_conll(tmp_path / "file", {"tokens": 0, "tags": 1})


def test_a_file_that_is_not_there_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a file"):
        read_conll(tmp_path / "nowhere", COLUMNS)


def test_conll_2003_survives_being_written_as_columns(shared_data: Path, tmp_path: Path) -> None:
    with pa.CompressedInputStream(str(shared_data / "tokens" / "conll2003-dev.jsonl.zst"), "zstd") as stream:
        rows = [json.loads(line) for line in stream.read().splitlines()]
    wanted = [{"tokens": row["tokens"], "ner": row["ner_tags"]} for row in rows]
    sentences = ["\n".join(map(" ".join, zip(row["tokens"], row["ner"], strict=True))) for row in wanted]
    (tmp_path / "eng.testa").write_text("\n\n".join(sentences), "utf-8")
    assert read_conll(tmp_path / "eng.testa", COLUMNS) == wanted
