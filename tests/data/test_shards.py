"""Shards come back as they were written, or are refused by name."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies

from electra.base.errors import CorruptError, DataError, ElectraError
from electra.data.corpus import Corpus
from electra.data.prepare import PrepareSettings, prepare
from electra.data.shards import ShardEntry, _damaged, _parse, manifest_hash, open_data, token_dtype, verify_shards
from electra.data.tokenizer import (
    SPECIAL_TOKENS,
    TokenizerSettings,
    adopt_vocabulary,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from helpers import write_corpus

DOCUMENTS = ["a b\nc", "b", "c c\n\na"] * 40 + ["only c"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a", "b", "c"]))
    save_tokenizer(adopt_vocabulary(folder / "vocab.txt"), folder / "tokenizer")
    rows = (json.dumps({"text": f"{text}\n{'a ' * n}"}) for n, text in enumerate(DOCUMENTS))
    (folder / "in.jsonl").write_text("\n".join(rows))
    prepare([folder / "in.jsonl"], folder / "out", folder / "tokenizer", PrepareSettings(unit_bytes=2000), 1)
    return folder / "out"


@pytest.fixture
def prepared(template: Path, tmp_path: Path) -> Path:
    for file in template.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def refused(folder: Path, exit_code: int = 4) -> str:
    """The message, from `open_data` and from `verify_shards` alike."""
    with pytest.raises(ElectraError) as error:
        open_data(folder)
    assert error.value.exit_code == exit_code
    message = str(error.value)
    assert "\n" not in message
    assert message in verify_shards(folder)
    return message


def test_tokens_documents_and_lines_come_back(prepared: Path) -> None:
    tokenizer = load_tokenizer(prepared)
    found = []
    for split in ("train", "heldout"):
        data = open_data(prepared, split)
        entry = data.manifest.splits[split]
        assert len(data.shards) == len(entry.shards)
        assert sum(len(shard.tokens) for shard in data.shards) == entry.tokens
        assert sum(len(shard.documents) for shard in data.shards) == entry.documents
        assert sum(len(shard.lines) for shard in data.shards) == entry.lines
        for shard in data.shards:
            assert shard.tokens.dtype == np.uint16
            lines = np.split(shard.tokens, shard.lines[:-1])
            ends = iter(shard.lines)
            for document in np.split(shard.tokens, shard.documents[:-1]):
                left, text = len(document), []
                while left:
                    text.append(lines.pop(0))
                    left -= len(text[-1])
                    next(ends)
                found.append("\n".join(tokenizer.decode(line.tolist()) for line in text))
    expected = []
    for number, text in enumerate(DOCUMENTS):
        lines = [*text.replace("only", "").split("\n"), "a " * number]
        expected.append("\n".join(line.strip() for line in lines if line.strip()))
    assert sorted(found) == sorted(expected)
    assert verify_shards(prepared) == []


def test_shards_are_mapped_and_not_loaded(prepared: Path) -> None:
    shard = open_data(prepared).shards[0]
    base = shard.tokens
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)
    assert not shard.tokens.flags.writeable


def test_a_folder_without_a_manifest_names_the_command(prepared: Path) -> None:
    (prepared / "manifest.json").unlink()
    message = refused(prepared, exit_code=3)
    assert message == f'{prepared} has no manifest.json. Run "electra prepare" to build token shards there.'
    (prepared / "units").mkdir()
    (prepared / "units" / "plan.json").touch()
    message = refused(prepared, exit_code=3)
    assert "its preparation is not finished" in message and "electra prepare-finish" in message


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}', '{"version": 2}', "\xff"])
def test_a_damaged_manifest_is_refused(prepared: Path, text: str) -> None:
    (prepared / "manifest.json").write_bytes(text.encode("latin-1"))
    message = refused(prepared)
    assert "manifest.json is damaged" in message or "manifest.json cannot be read" in message
    assert message.endswith(': remove it and run "electra prepare" again.')


def test_a_manifest_cannot_name_files_elsewhere(prepared: Path) -> None:
    manifest = (prepared / "manifest.json").read_text()
    (prepared / "manifest.json").write_text(manifest.replace("train-00000", "../train-00000"))
    assert "manifest.json is damaged" in refused(prepared)


def test_a_flipped_bit_is_found_wherever_it_is(prepared: Path) -> None:
    path = sorted(prepared.glob("train-*"))[1]
    data = path.read_bytes()
    for position in (0, 20, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        message = refused(prepared)
        assert f"{path} is damaged: expected sha256 " in message and ", found " in message
    path.write_bytes(data)
    assert verify_shards(prepared) == []


def test_a_truncated_or_missing_shard_is_refused_even_without_verifying(prepared: Path) -> None:
    path = prepared / "train-00000.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert f"{path} is damaged: expected {len(data)} bytes, found {len(data) - 1}" in refused(prepared)
    path.unlink()
    assert f"{path} is damaged: the file is missing" in refused(prepared)
    with pytest.raises(CorruptError, match="missing"):
        open_data(prepared, verify=False)


def test_every_problem_is_listed(prepared: Path) -> None:
    (prepared / "train-00000.safetensors").unlink()
    sorted(prepared.glob("train-*"))[0].write_bytes(b"")
    (prepared / "tokenizer.json").write_text("{}")
    assert len(verify_shards(prepared)) == 3


def test_another_tokenizer_is_refused(prepared: Path) -> None:
    path = prepared / "tokenizer.json"
    path.write_text(path.read_text().replace('"lowercase": true', '"lowercase": false'))
    message = refused(prepared)
    assert f"{path} is not the tokenizer of these shards: expected " in message and ", found " in message


def test_the_spelling_of_the_tokenizer_file_does_not_matter(prepared: Path) -> None:
    path = prepared / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    assert verify_shards(prepared) == []


def test_a_token_beyond_the_vocabulary_is_refused_with_its_position(prepared: Path) -> None:
    manifest = json.loads((prepared / "manifest.json").read_text())
    first = int(np.argmax(open_data(prepared).shards[0].tokens >= 7))
    (prepared / "manifest.json").write_text(json.dumps(manifest | {"vocab_size": 7}))
    message = refused(prepared)
    assert f"train-00000.safetensors: token 7 at position {first} is beyond the vocabulary of 7" in message


def test_counts_that_do_not_fit_are_refused(prepared: Path) -> None:
    manifest = json.loads((prepared / "manifest.json").read_text())
    split = manifest["splits"]["train"]
    split["shards"][0]["lines"] += 1
    (prepared / "manifest.json").write_text(json.dumps(manifest))
    assert "lines is not the sum over its shards" in refused(prepared)
    split["lines"] += 1
    (prepared / "manifest.json").write_text(json.dumps(manifest))
    assert "its header does not fit" in refused(prepared)


def test_an_empty_split_is_refused(prepared: Path) -> None:
    manifest = json.loads((prepared / "manifest.json").read_text())
    manifest["splits"]["heldout"] = {"shards": [], "tokens": 0, "documents": 0, "lines": 0}
    (prepared / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="has no heldout documents"):
        open_data(prepared, "heldout")


def test_the_manifest_has_a_hash(prepared: Path) -> None:
    before = manifest_hash(prepared)
    (prepared / "manifest.json").write_text((prepared / "manifest.json").read_text() + " ")
    assert len(before) == 64 and manifest_hash(prepared) != before


def test_sixteen_bits_are_used_as_long_as_they_suffice() -> None:
    assert (token_dtype(65536), token_dtype(65537)) == ("uint16", "uint32")


@pytest.mark.parametrize("moved", [-8, 0, 8])
def test_arrays_outside_the_file_are_refused(moved: int) -> None:
    places = {"tokens": ("U16", 2, 16, 20), "documents": ("I64", 1, 0, 8), "lines": ("I64", 1, 8, 16)}
    header = {
        name: {"dtype": kind, "shape": [count], "data_offsets": [begin + moved, end + moved]}
        for name, (kind, count, begin, end) in places.items()
    }
    text = json.dumps(header).encode()
    data = np.frombuffer(struct.pack("<Q", len(text)) + text + bytes(20), np.uint8)
    entry = ShardEntry(file="train-00000.safetensors", bytes=len(data), sha256="", tokens=2, documents=1, lines=1)
    if moved:
        with pytest.raises(CorruptError, match="its header does not fit"):
            _parse(Path("x"), entry, data, "uint16")
    else:
        assert len(_parse(Path("x"), entry, data, "uint16").tokens) == 2


@given(
    header=strategies.one_of(
        strategies.binary(max_size=80),
        strategies.fixed_dictionaries(
            {
                name: strategies.fixed_dictionaries(
                    {
                        "dtype": strategies.sampled_from(["U16", "I64", "F32", 3]),
                        "shape": strategies.lists(strategies.integers(-5, 5), max_size=2),
                        "data_offsets": strategies.lists(strategies.integers(-9, 1 << 70), min_size=1, max_size=3),
                    }
                )
                for name in ("tokens", "documents", "lines")
            }
        ).map(lambda value: json.dumps(value).encode()),
    ),
    length=strategies.one_of(strategies.none(), strategies.integers(0, (1 << 64) - 1)),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_header_however_broken_gets_past_the_bounds(header: bytes, length: int | None) -> None:
    data = struct.pack("<Q", len(header) if length is None else length) + header + bytes(8)
    entry = ShardEntry(file="train-00000.safetensors", bytes=len(data), sha256="", tokens=2, documents=1, lines=1)
    try:
        shard = _parse(Path("x"), entry, np.frombuffer(data, np.uint8), "uint16")
    except CorruptError as error:
        assert str(error).startswith(str(_damaged(Path("x"), "its header does not fit"))[:30])
    else:
        assert (len(shard.tokens), len(shard.documents), len(shard.lines)) == (2, 1, 1)


def test_more_shards_than_open_files_are_allowed_by_default(tmp_path):
    """Both splits stay mapped, and every map holds its file open."""
    text = write_corpus(tmp_path / "text.txt", documents=400)
    save_tokenizer(train_tokenizer(Corpus([text]), TokenizerSettings(vocab_size=300)), tmp_path)
    many = PrepareSettings(heldout_share=0.4, unit_bytes=800)
    manifest = prepare([text], tmp_path / "shards", tmp_path, many, workers=1)
    assert all(len(split.shards) > 50 for split in manifest.splits.values())
    code = (
        "import resource, sys; from pathlib import Path; from electra.data.shards import open_data\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (60, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "kept = [open_data(Path(sys.argv[1]), split) for split in ('train', 'heldout')]\n"
        "print(sum(len(data.shards) for data in kept))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "shards"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
