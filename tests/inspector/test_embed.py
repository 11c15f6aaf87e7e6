"""A vector for each text, of any file: those of transformers and sentence-transformers, in the order of the file."""

import csv
import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from electra.base.errors import DataError, SettingsError
from electra.inspector import embed, load
from helpers import electra, environment

TEXTS = [
    "The barak walks.",
    "",
    "the timin reads the gorak, and the gorak reads back. " * 3,
    "Äpfel 🙂 日本語",
    "back.",
]


def array_of(path):
    table = pq.read_table(path)
    return np.array(table["embedding"].to_pylist(), np.float32), table


def test_vectors_are_those_of_transformers_with_a_mean_over_the_mask(finished_run):
    transformers = pytest.importorskip("transformers")
    folder = finished_run / "export"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    assert inputs["input_ids"].shape[1] == 32, "one text must be cut, to see that both cut alike"
    with torch.no_grad():
        hidden = network(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None]
    model = load(finished_run)
    np.testing.assert_allclose(model.embed(TEXTS, length=32), (hidden * mask).sum(1) / mask.sum(1), atol=2e-6)
    np.testing.assert_allclose(model.embed(TEXTS, pooling="cls", length=32), hidden[:, 0], atol=2e-6)


def test_batches_come_in_the_order_of_the_texts_and_read_no_further(finished_run, monkeypatch):
    monkeypatch.setattr(embed, "MOST_TEXTS", 2)
    model, taken = load(finished_run), []

    def endless():
        while True:
            taken.append(TEXTS[len(taken) % len(TEXTS)])
            yield taken[-1]

    batches = model.embed_batches(endless())
    parts = [next(batches) for _ in range(3)]
    assert [len(part) for part in parts] == [2, 2, 2] and len(taken) == 6
    np.testing.assert_allclose(np.concatenate(parts), model.embed([*TEXTS, TEXTS[0]]), atol=1e-6)
    assert model.embed([]).shape == (0, 32)


def test_of_a_long_text_cls_is_that_of_its_first_window(finished_run):
    model = load(finished_run)
    long = " ".join(["the barak walks the lonute."] * 12)
    cut = model.embed(long, pooling="cls", length=32)
    np.testing.assert_allclose(model.embed(long, pooling="cls"), cut, atol=1e-6)
    mean, first = embed.text_vectors(model.network, [long])
    np.testing.assert_allclose(first, cut, atol=1e-6)
    assert np.abs(mean - model.embed(long, length=32)).max() > 1e-3


def write_inputs(folder):
    """The same texts in every form that is read."""
    rows = [{"id": number, "review": text, "stars": number % 2} for number, text in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "b.json").write_text(json.dumps(rows))
    with (folder / "c.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["id", "review", "stars"])
        table.writeheader()
        table.writerows(rows)
    (folder / "d.txt").write_text("\n".join(TEXTS) + "\n")
    (folder / "e.txt.gz").write_bytes(gzip.compress(("\n".join(TEXTS) + "\n").encode()))
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist(rows), folder / "f.parquet")
    return sorted(folder.iterdir())


def test_every_kind_of_file_gives_the_same_vectors(finished_run, tmp_path):
    expected = load(finished_run).embed(TEXTS)
    files = write_inputs(tmp_path)
    for path in files:
        done = electra("embed", finished_run, path, "--out", tmp_path / f"{path.name}.npy")
        assert done.returncode == 0, done.stderr
        assert "5 texts, 32 numbers each" in done.stdout
        guessed = path.name[0] not in "de"
        assert ("texts are those of column 'review'" in done.stderr) == guessed
        vectors = np.load(tmp_path / f"{path.name}.npy")
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(vectors, expected, atol=1e-6)
    done = electra("embed", finished_run, *files, "--out", tmp_path / "all.npy")
    np.testing.assert_allclose(np.load(tmp_path / "all.npy"), np.tile(expected, (len(files), 1)), atol=1e-6)


def test_standard_input_is_read_as_lines_or_json(finished_run, tmp_path):
    expected = load(finished_run).embed(TEXTS)
    lines = "".join(f"{text}\n" for text in TEXTS)
    json_lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    for number, stdin in enumerate((lines, json_lines, gzip.compress(lines.encode()))):
        out = tmp_path / f"{number}.npy"
        done = electra("embed", finished_run, "--out", out, stdin=stdin)
        assert done.returncode == 0, done.stderr
        np.testing.assert_allclose(np.load(out), expected, atol=1e-6)
    assert electra("embed", finished_run, stdin=lines).returncode == 2


def test_parquet_keeps_the_text_or_what_is_asked_for(finished_run, tmp_path):
    files, expected = write_inputs(tmp_path), load(finished_run).embed(TEXTS)
    assert electra("embed", finished_run, files[0]).returncode == 0
    vectors, table = array_of(tmp_path / "a.embeddings.parquet")
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert table.column_names == ["review", "embedding"] and table["review"].to_pylist() == TEXTS
    done = electra("embed", finished_run, files[5], "--keep", "id", "--keep", "stars", "--out", tmp_path / "k.parquet")
    assert done.returncode == 0, done.stderr
    vectors, table = array_of(tmp_path / "k.parquet")
    assert table.column_names == ["id", "stars", "embedding"] and table["id"].to_pylist() == list(range(5))
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_texts_of_several_files_are_kept_under_the_name_of_the_first(finished_run, tmp_path):
    table, lines = (path for path in write_inputs(tmp_path) if path.name in ("c.csv", "d.txt"))
    for files, column in (([table, lines], "review"), ([lines, table], "text")):
        done = electra("embed", finished_run, *files, "--out", tmp_path / "all.parquet", "--force")
        assert done.returncode == 0, done.stderr
        assert pq.read_table(tmp_path / "all.parquet")[column].to_pylist() == TEXTS * 2


def test_many_chunks_are_one_array_and_one_table(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(embed, "MOST_TEXTS", 3)
    texts = [f"the barak walks {number}" for number in range(100)]
    (tmp_path / "t.txt").write_text("\n".join(texts))
    for name in ("v.npy", "v.parquet"):
        assert electra("embed", finished_run, tmp_path / "t.txt", "--out", tmp_path / name).returncode == 0
    expected = load(finished_run).embed(texts)
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), expected, atol=1e-6)
    np.testing.assert_allclose(array_of(tmp_path / "v.parquet")[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("content", "words", "code", "says"),
    [
        ("a,b\nx y,z\n", [], 3, "which column is the text? Name one of a, b. Here that is --text"),
        ("a,b\nx y,z\n", ["--text", "c"], 3, "has no column 'c': it has a, b"),
        ("a,b\nx y,z\n", ["--text", "a", "--keep", "c"], 3, "has no column 'c' to keep"),
        ("text,embedding\nx y,z\n", ["--keep", "embedding"], 3, "Rename it"),
        ("a,b\nx y,z\n", ["--text", "a", "--out", "v.csv"], 2, "v.csv: vectors are written as .npy or .parquet"),
        ("a,b\nx y,z\n", ["--text", "a", "--keep", "a", "--out", "v.npy"], 2, "choose a .parquet out"),
        ("a,b\nx y,z\n", ["--text", "a", "--length", "2"], 2, "length"),
        ("text\n", [], 3, "no texts. Give a file with at least one"),
        ("text,n\nx\n", [], 3, "row 1 has 1 cell, the header 2"),
    ],
)
def test_what_cannot_be_embedded_is_said_and_nothing_is_left(finished_run, tmp_path, content, words, code, says):
    (tmp_path / "t.csv").write_text(content)
    done = electra("embed", finished_run, "t.csv", *words, cwd=tmp_path)
    assert done.returncode == code and says in done.stderr, done.stderr
    assert done.stderr.count("electra: ") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_a_row_without_text_and_bytes_that_are_no_text_name_their_place(finished_run, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "x"}\n{"text": null}\n')
    done = electra("embed", finished_run, "t.jsonl", cwd=tmp_path)
    assert done.returncode == 3 and "t.jsonl row 2: 'text' is None, not text" in done.stderr
    (tmp_path / "t.txt").write_bytes(b"x\n\xff\n")
    done = electra("embed", finished_run, "t.txt", cwd=tmp_path)
    assert done.returncode == 3 and "t.txt:2 has bytes that are not UTF-8" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.jsonl", "t.txt"]


def test_only_force_overwrites_and_never_the_input(finished_run, tmp_path):
    (tmp_path / "t.txt").write_text("x\n")
    (tmp_path / "v.npy").write_text("mine")
    done = electra("embed", finished_run, "t.txt", "--out", "v.npy", cwd=tmp_path)
    assert done.returncode == 2 and (tmp_path / "v.npy").read_text() == "mine"
    assert electra("embed", finished_run, "t.txt", "--out", "v.npy", "--force", cwd=tmp_path).returncode == 0
    assert np.load(tmp_path / "v.npy").shape == (1, 32)
    os.link(tmp_path / "t.txt", tmp_path / "t.parquet")
    done = electra("embed", finished_run, "t.txt", "--out", "t.parquet", "--force", cwd=tmp_path)
    assert done.returncode == 2 and "is the input itself" in done.stderr
    assert electra("embed", finished_run, "none.txt", cwd=tmp_path).returncode == 3
    assert electra("embed", finished_run, tmp_path, cwd=tmp_path).returncode == 3


def test_from_python_with_the_same_errors(finished_run, tmp_path):
    import electra as package

    (tmp_path / "t.txt").write_text("x\ny\n")
    result = package.embed(finished_run, tmp_path / "t.txt", pooling="cls")
    assert result.texts == 2 and result.width == 32 and result.out == tmp_path / "t.embeddings.parquet"
    with pytest.raises(SettingsError, match="pooling"):
        package.embed(finished_run, tmp_path / "t.txt", pooling="max", force=True)
    with pytest.raises(DataError, match="a lone surrogate"):
        load(finished_run).embed("\ud800")


def test_a_long_line_from_a_pipe_takes_bounded_memory(finished_run, tmp_path):
    """32 MB in one line: its ids have four bytes each, and the library's 150 bytes for each character are needed for parts. Nor is
    torch's compiler imported, which nobody needs to read a model: half of the start of a command."""
    code = (
        "import sys, electra.commands as c\n"
        "try: c.main(sys.argv[1:])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch._dynamo', 'torch.distributed.tensor'} & sys.modules.keys()\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    words = ["embed", str(finished_run), "-", "--out", str(tmp_path / "v.npy"), "--pooling", "cls"]
    text = "one\n\n" + "the barak walks " * (1 << 21)
    done = subprocess.run(
        [sys.executable, "-c", code, *words], input=text, capture_output=True, text=True, timeout=120, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) * 1024 < 900 << 20, done.stdout
    assert np.load(tmp_path / "v.npy").shape == (3, 32)
