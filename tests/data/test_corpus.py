"""Documents from every kind of file, and one clear line for every kind of bad one."""

import bz2
import gzip
import json
import lzma
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from electra.base.errors import DataError
from electra.data import corpus as corpus_module
from electra.data import files as files_module
from electra.data.corpus import Corpus, CorpusSettings, drop_copies

TEXT = "Café one.\nStill one.\n\nDocument two.\n"
DOCUMENTS = ["Café one.\nStill one.", "Document two."]


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def read(*paths: Path, **settings: Any) -> list[str]:
    return [document.text for document in Corpus(paths, CorpusSettings(**settings)).read()]


def refused(*paths: Path, **settings: Any) -> str:
    with pytest.raises(DataError) as error:
        read(*paths, **settings)
    message = str(error.value)
    assert error.value.exit_code == 3
    assert "\n" not in message and message.endswith(".")
    return message


def zstandard(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress, zstandard])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_compression_and_format_are_recognised_by_content(
    tmp_path: Path, pack: Callable[[bytes], bytes], kind: str
) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    path = write(tmp_path / "named.wrongly", pack((TEXT if kind == "text" else lines).encode()))
    assert read(path) == DOCUMENTS


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstandard])
def test_concatenated_archives_are_read_to_the_end(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    assert read(write(tmp_path / "a", pack(b"one\n\n") + pack(b"two\n"))) == ["one", "two"]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstandard])
def test_a_truncated_archive_is_refused_by_name(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    packed = pack("\n\n".join(map(str, range(9999))).encode())
    message = refused(write(tmp_path / "half.bin", packed[: len(packed) // 2]))
    assert "half.bin is cut off or damaged" in message


def test_tables_give_their_text_column(tmp_path: Path) -> None:
    table = pa.table({"body": DOCUMENTS, "id": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "b.arrow", table.schema) as file:
        file.write_table(table)
    with pa.ipc.new_stream(tmp_path / "c.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        assert read(tmp_path / name, text_key="body") == DOCUMENTS
        assert "has no column 'text' (it has body, id)" in refused(tmp_path / name)
        assert "column 'id' holds int64, not text" in refused(tmp_path / name, text_key="id")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_csv_and_tsv_are_tables_and_never_running_text(tmp_path: Path, name: str) -> None:
    rows = ["id,body\n", '1,"one, and\nmore"\n', "2,two\n"] if "csv" in name else ["id\tbody\n", "1\tone\n", "2\ttwo\n"]
    content = "".join(rows).encode()
    path = write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    assert read(path, text_key="body") == (["one, and\nmore", "two"] if "csv" in name else ["one", "two"])
    assert "has no column 'text' (it has id, body). Set text_key to one of them" in refused(path)
    ragged = write(tmp_path / f"ragged-{name.removesuffix('.gz')}", "".join([*rows, "3\n"]).encode())
    assert "row 3 has 1 cell, the header 2" in refused(ragged, text_key="body")
    assert len(read(ragged, text_key="body", on_bad="skip")) == 2
    assert "every file is empty" in refused(write(tmp_path / "empty.csv", b"\n"))


def test_a_csv_of_semicolons_and_of_windows_is_read_or_told_how_to_convert(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id;text\n1;one, and more\n2;schön\n".encode("cp1252"))
    message = refused(path)
    assert (
        "row 2 has bytes that are not UTF-8" in message and f"iconv -f CP1252 -t UTF-8 {path} > utf8-a.csv" in message
    )
    assert read(path, on_bad="skip") == ["one, and more"]
    assert read(path, on_bad="replace") == ["one, and more", "sch\ufffdn"]


def test_text_of_windows_and_a_spreadsheet_are_told_how_to_convert(tmp_path: Path) -> None:
    path = write(tmp_path / "my folder" / "a.txt", "schön".encode("cp1252"))
    message = refused(path)
    assert f"iconv -f CP1252 -t UTF-8 '{path}' > utf8-a.txt" in message and "set on_bad to skip or replace" in message
    assert "save it as csv (UTF-8)" in refused(write(tmp_path / "a.xlsx", b"PK\x03\x04" + bytes(range(256))))


def test_a_key_that_the_first_row_lacks_is_asked_for(tmp_path: Path) -> None:
    """Skipping such rows would skip all of them."""
    path = write(tmp_path / "a.jsonl", b'{"body": "one"}\n{"body": "two"}\n')
    message = refused(path)
    assert "has no key 'text' (it has 'body'). Set text_key to one of them." in message and "on_bad" not in message


def test_a_damaged_table_is_refused_by_name(tmp_path: Path) -> None:
    assert "a.parquet is cut off or damaged" in refused(write(tmp_path / "a.parquet", b"PAR1" + bytes(100)))
    assert "b.arrow is cut off or damaged" in refused(write(tmp_path / "b.arrow", b"ARROW1\0\0" + bytes(100)))


def test_a_table_inside_an_archive_is_refused(tmp_path: Path) -> None:
    assert "Unpack it first" in refused(write(tmp_path / "a.parquet.gz", gzip.compress(b"PAR1" + bytes(100))))


def test_a_row_without_text_or_with_bad_bytes_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one", None, "three"]}), tmp_path / "null.parquet")
    assert "null.parquet row 2 has NoneType for 'text', not text" in refused(tmp_path / "null.parquet")
    assert read(tmp_path / "null.parquet", on_bad="skip") == ["one", "three"]
    bad = pa.array([b"one", b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": bad}), tmp_path / "bytes.parquet")
    assert "row 2 has bytes that are not UTF-8 at byte 3" in refused(tmp_path / "bytes.parquet")
    assert read(tmp_path / "bytes.parquet", on_bad="replace") == ["one", "caf\ufffd"]


def test_a_datasets_folder_is_read_through_its_list(tmp_path: Path) -> None:
    table = pa.table({"text": DOCUMENTS})
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    for name in ("data-00000-of-00001.arrow", "cache-leftover.arrow"):
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    write(tmp_path / "saved" / "dataset_dict.json", '{"splits": ["train"]}')
    write(folder / "dataset_info.json", "{}")
    state = write(folder / "state.json", '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    assert read(tmp_path / "saved") == DOCUMENTS
    write(state, '{"_data_files": [{"filename": "gone.arrow"}]}')
    assert "lists gone.arrow, which is missing" in refused(tmp_path / "saved")


def test_documents_of_plain_text_end_where_the_setting_says(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\n\n one\ntwo\n \t\n\nthree\n\n")
    assert read(path) == ["one\ntwo", "three"]
    assert read(path, documents="line") == ["one", "two", "three"]
    assert read(path, documents="file") == ["one\ntwo\n \t\n\nthree"]


@pytest.mark.parametrize("documents", ["blank-line", "line", "file"])
def test_windows_text_reads_as_unix_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: str) -> None:
    unix = "".join(f"line {n} é\n" + "\n" * (n % 5 == 0) for n in range(500))
    windows = b"\xef\xbb\xbf" + unix.replace("\n", "\r\n").encode()
    expected = read(write(tmp_path / "unix.txt", unix), documents=documents)
    monkeypatch.setattr(corpus_module, "_TEXT_BLOCK", 7)  # so that blocks end between CR and LF, and inside é
    assert read(write(tmp_path / "windows.txt", windows), documents=documents) == expected


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    text = "a\rb\x85c\u2028d\u2029e\x0bf\x0cg"
    assert read(write(tmp_path / "a.txt", text), documents="line") == ["a b c d e f g"]
    assert read(write(tmp_path / "a.jsonl", json.dumps({"text": text}))) == ["a b c d e f g"]


@pytest.mark.parametrize("block", [1 << 20, 13])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_long_document_comes_in_pieces_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, kind: str
) -> None:
    monkeypatch.setattr(corpus_module, "LONGEST_DOCUMENT", 100)
    monkeypatch.setattr(corpus_module, "_TEXT_BLOCK", block)
    long = " ".join(f"word{n}" for n in range(200)) + "x" * 250
    text = f"{long}\n\nshort"
    lines = "".join(json.dumps({"text": it}) + "\n" for it in (long, "short"))
    path = write(tmp_path / "a", text if kind == "text" else lines)
    reading = Corpus([path]).read()
    *pieces, last = reading
    assert reading.documents == 2
    assert last == ("short", False)
    assert [piece.continues for piece in pieces] == [False] + [True] * (len(pieces) - 1)
    assert all(len(piece.text) <= 100 for piece in pieces)
    expected, rest = [], long
    while len(rest) > 100:
        words = rest[:100].rsplit(" ", 1)
        expected.append(words[0])
        rest = rest[len(words[0]) :].strip()
    assert [piece.text for piece in pieces] == [*expected, rest]
    assert "".join(piece.text for piece in pieces).replace(" ", "") == long.replace(" ", "")


def test_bytes_that_are_not_utf8_are_refused_with_their_offset(tmp_path: Path) -> None:
    data = "é".encode() * 600_000 + b"caf\xe9 au lait"
    for path in (write(tmp_path / "a.txt", data), write(tmp_path / "a.txt.gz", gzip.compress(data))):
        assert f"{path} has bytes that are not UTF-8 at byte 1200003" in refused(path)
    assert "at byte 1" in refused(write(tmp_path / "cut.txt", b"a\xc3"))


def test_bad_bytes_are_skipped_or_replaced_on_request_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"good\n\nbad \xff\xfe end\n\nnul \0 too\n\nfine")
    reading = Corpus([path], CorpusSettings(on_bad="skip")).read()
    assert [document.text for document in reading] == ["good", "fine"]
    assert (reading.documents, reading.skipped, reading.replaced) == (2, 2, 0)
    reading = Corpus([path], CorpusSettings(on_bad="replace")).read()
    assert [document.text for document in reading] == ["good", "bad \ufffd end", "nul \ufffd too", "fine"]
    assert (reading.documents, reading.skipped, reading.replaced) == (4, 0, 2)


def test_nul_bytes_are_refused_with_their_offset(tmp_path: Path) -> None:
    assert "has a NUL byte at byte 2" in refused(write(tmp_path / "a.txt", b"ab\0cd efgh"))
    assert "a NUL character in its text" in refused(write(tmp_path / "a.jsonl", '{"text": "a\\u0000b"}'))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_utf16_is_guessed(tmp_path: Path, encoding: str) -> None:
    assert "looks like UTF-16: convert it with" in refused(write(tmp_path / "a.txt", "plain text".encode(encoding)))


def test_a_lone_surrogate_in_json_never_gets_through(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n{"text": "bad \\ud800 end"}\n')
    assert f"{path}:2 has a lone surrogate (\\ud800)" in refused(path)
    assert read(path, on_bad="skip") == ["one"]
    assert read(path, on_bad="replace") == ["one", "bad \ufffd end"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "cut', "is not valid JSON"),
        ('["text"]', "is list, not a JSON object"),
        ("plain prose", "is not valid JSON"),
        ('{"body": "x"}', "has no key 'text' (it has 'body')"),
        ('{"text": 7}', "has int for 'text', not text"),
        ('{"text": null}', "has NoneType for 'text', not text"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_bad_json_line_is_refused_with_its_number(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"text": "one"}}\n\n{line}\n{{"text": "four"}}\n')
    message = refused(path)
    assert f"{path}:3 {problem}" in message and "set on_bad to skip" in message
    assert read(path, on_bad="skip") == ["one", "four"]
    first = write(tmp_path / "first.jsonl", f'{line}\n{{"text": "two"}}\n')
    assert f"{first}:1 {problem}" in refused(first)


def test_an_endless_json_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "LONGEST_LINE", 1 << 20)
    path = write(tmp_path / "a.jsonl", '{"text": "' + "x" * (1 << 20) + '"}')
    assert f"{path}:1 is longer than 1 MiB" in refused(path)


def test_folders_are_read_recursively_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/a.txt", "c/d/e.txt", ".hidden.txt", ".git/config"):
        write(tmp_path / "in" / name, name)
    (tmp_path / "in" / "c" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "self").symlink_to(tmp_path / "in" / "self")
    (tmp_path / "in" / "nowhere").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "in" / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "in" / "socket"))
        assert read(tmp_path / "in") == ["a/a.txt", "a/z.txt", "b.txt", "c/d/e.txt"]


def test_a_file_that_is_read_twice_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, two = write(tmp_path / "in" / "a.txt", "one"), write(tmp_path / "in" / "b.txt", "two")
    assert read(one, two) == ["one", "two"] and not caplog.text
    assert read(one, tmp_path / "in") == ["one", "one", "two"]
    assert f"{one} is read more than once, by its own name, a folder or a link" in caplog.text
    (tmp_path / "in" / "c.txt").symlink_to(two)
    caplog.clear()
    assert read(one, one, tmp_path / "in") == ["one", "one", "one", "two", "two"]
    assert f"{one} is read more than once (and 1 more file), " in caplog.text and len(caplog.records) == 1


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe, socket or device" in refused(tmp_path / "pipe")


def test_missing_and_empty_inputs_are_refused(tmp_path: Path) -> None:
    assert "gone.txt does not exist" in refused(tmp_path / "gone.txt")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / ".hidden", "x")
    assert "folder has no file to read" in refused(tmp_path / "folder")
    assert "a.txt: no text" in refused(write(tmp_path / "a.txt", ""))
    assert "b.txt: no text" in refused(write(tmp_path / "b.txt", " \n\t\n"))
    assert "c.gz: no text" in refused(write(tmp_path / "c.gz", gzip.compress(b"")))
    message = refused(write(tmp_path / "d.txt", b"\xff\n\n\xfe\n"), on_bad="skip")
    assert "no text left, 2 documents skipped as unusable" in message


def test_empty_files_among_others_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.txt", "text")
    write(tmp_path / "c.txt", "\n \n")
    reading = Corpus([tmp_path]).read()
    assert [document.text for document in reading] == ["text"]
    assert reading.empty == [0, 2]


def test_archives_with_long_windows_open(shared_data: Path) -> None:
    for path in sorted((shared_data / "pretrain_en").glob("*.zst")):
        assert len(next(iter(Corpus([path]).read())).text) > 100


def test_paragraphs_that_repeat_earlier_ones_are_dropped_and_others_stay():
    sentence = "one two three four five six seven eight nine ten"
    other = "this paragraph has nine words and none of before"
    changed = sentence.replace("ten", "eleven")  # two of its three runs of eight words stood there before
    assert list(drop_copies([f"{sentence}\n{other}", f"{sentence.upper()}!\nshort one", changed, "short one"])) == [
        f"{sentence}\n{other}",
        "short one",
        "",
        "",
    ]
    words = [f"w{number}" for number in range(100)]
    mostly_new = [*words[:10], *(f"new{number}" for number in range(90))]  # 3 of its 93 runs
    assert list(drop_copies([" ".join(words), " ".join(mostly_new)])) == [" ".join(words), " ".join(mostly_new)]


def test_the_splits_of_a_datasets_folder_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        with pa.ipc.new_stream(tmp_path / split / "data-0.arrow", pa.schema([("text", pa.string())])) as stream:
            stream.write_table(pa.table({"text": [split]}))
        (tmp_path / split / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    with caplog.at_level("INFO"):
        assert read(tmp_path) == ["test", "train"]
    assert "reading all of its splits (test, train)" in caplog.text
