"""Column files as people have them, plain and packed."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pytest

from electra.base.errors import DataError
from electra.data.conll import read_conll

NER = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

# # I-NP O
{ ( O O


\u00a0Peter\u00a0B. NNP B-NP B-PER
"""
ROWS = [
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
    assert read_conll(tmp_path / "eng.train", COLUMNS) == ROWS


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
        (b"EU B-ORG\nrejects\n", r"file:2 has 1 columns, the first word 2 \('rejects'\). Repair it"),
        (b"EU B-ORG\nrejects VBZ O\n", "file:2 has 3 columns, the first word 2"),
        (b"EU\nrejects\n", "has 1 columns .'EU'., not 2"),
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
