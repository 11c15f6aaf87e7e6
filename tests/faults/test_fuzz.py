"""Every reader against seeded mutations of its file: what was read before, or an ElectraError; nothing else, ever. Where a file
has no hash of its own (a table, a recipe), another content may be read, but nothing may crash."""

import gzip
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from electra.base import config
from electra.base.errors import ElectraError
from electra.base.files import read_or_set_aside
from electra.data.corpus import Corpus
from electra.data.shards import open_data, read_manifest
from electra.data.tables import read_conll, read_rows
from electra.data.tokenizer import load_tokenizer
from electra.finetuning.folder import load_task_folder
from electra.finetuning.questions import read_squad
from electra.interop.read import read_folder
from electra.pretraining.load import load_settings
from electra.train.checkpoint import newest_checkpoint
from electra.train.log import read_metrics

MANY, FEW = 2000, 100
TOKENS = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"NaN",
    b"1e999",
    b"-1",
    b"null",
    b"true",
    b"\\ud800",
    b"\xff",
    b"\0",
    b"9" * 5000,
    b"[" * 2000,
    b"../",
    b"\n",
]
SQUAD = '{"data": [{"paragraphs": [{"context": "the timak", "qas": [{"id": "1", "question": "who", "answers": [{"text": "timak", "answer_start": 4}]}]}]}]}'


class Kind(NamedTuple):
    file: str
    read: Callable[[Path], Any]
    verified: bool = False


def tensors_digest(tensors: Any) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].numpy().tobytes())
    return digest.hexdigest()


def read_export(world: Path) -> Any:
    stored = read_folder(world / "export")
    return stored.settings, stored.vocab_size, tensors_digest(stored.tensors), stored.tokenizer.to_str()


def read_unsealed(world: Path) -> Any:
    (world / "export" / "MANIFEST.json").unlink(missing_ok=True)
    return read_export(world)


def read_task(world: Path) -> Any:
    loaded = load_task_folder(world / "tasks/table/seed-0")
    return loaded.task.settings, tensors_digest(loaded.model.state_dict())


def read_checkpoint(world: Path) -> Any:
    """An earlier one where the newest is damaged is right, and said."""
    newest = newest_checkpoint(world / "run/checkpoints")
    assert newest
    return newest.step if newest.step < 6 else (newest.state, tensors_digest(newest.tensors("model")))


def read_shards(world: Path) -> Any:
    return [shard.tokens.tobytes() for shard in open_data(world / "shards").shards]


def text_of(name: str) -> Callable[[Path], Any]:
    return lambda world: [document.text for document in Corpus([world / name]).read()]


def rows_of(name: str) -> Callable[[Path], Any]:
    """With a list of what is wrong, and by the first error."""

    def read(world: Path) -> Any:
        list(read_rows(world / name, malformed={}))
        return list(read_rows(world / name))

    return read


STEP = "run/checkpoints/step-000000006"
KINDS = {
    "export weights": Kind("export/model.safetensors", read_export, True),
    "export config": Kind("export/config.json", read_export, True),
    "export tokenizer": Kind("export/tokenizer.json", read_export, True),
    "export manifest": Kind("export/MANIFEST.json", read_export, True),
    "foreign weights": Kind("export/model.safetensors", read_unsealed),
    "foreign config": Kind("export/config.json", read_unsealed),
    "foreign tokenizer": Kind("export/tokenizer.json", read_unsealed),
    "task": Kind("tasks/table/seed-0/task.json", read_task, True),
    "checkpoint weights": Kind(f"{STEP}/model.safetensors", read_checkpoint),
    "checkpoint state": Kind(f"{STEP}/state.json", read_checkpoint),
    "checkpoint manifest": Kind(f"{STEP}/manifest.json", read_checkpoint),
    "metrics": Kind("run/metrics.jsonl", lambda world: read_metrics(world / "run")),
    "environment": Kind("run/environment.json", lambda world: read_or_set_aside(world / "run/environment.json")),
    "settings of a run": Kind("run/config.toml", lambda world: load_settings(world / "run")),
    "shard": Kind("shards/train-00000.safetensors", read_shards, True),
    "manifest of shards": Kind("shards/manifest.json", lambda world: read_manifest(world / "shards").vocab_size),
    "tokenizer": Kind("tokenizer/tokenizer.json", lambda world: load_tokenizer(world / "tokenizer").encode("the timak", add_special_tokens=False).ids),
    "recipe": Kind("recipe.toml", lambda world: config.read_recipe(str(world / "recipe.toml"))),
    "csv": Kind("table.csv", rows_of("table.csv")),
    "tsv": Kind("table.tsv", rows_of("table.tsv")),
    "json lines": Kind("rows.jsonl", rows_of("rows.jsonl")),
    "json list": Kind("rows.json", rows_of("rows.json")),
    "parquet": Kind("rows.parquet", rows_of("rows.parquet")),
    "columns": Kind("words.conll", lambda world: read_conll(world / "words.conll", {"tokens": 0, "tags": -1})),
    "squad": Kind("squad.json", lambda world: read_squad(world / "squad.json")),
    "text": Kind("text.txt", text_of("text.txt")),
    "compressed text": Kind("text.txt.gz", text_of("text.txt.gz")),
    "json text": Kind("rows.jsonl", text_of("rows.jsonl")),
    "parquet text": Kind("rows.parquet", text_of("rows.parquet")),
}  # fmt: skip


@pytest.fixture(scope="module")
def files(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world, and a file of every format that people bring."""
    folder = tmp_path_factory.mktemp("fuzz") / "world"
    shutil.copytree(world, folder)
    rows = [{"text": f"the timak walks {n} \U0001f642", "label": n, "more": [1.5, None, {"a": "b"}]} for n in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.json").write_text(json.dumps(rows))
    pq.write_table(
        pa.Table.from_pylist([{"text": row["text"], "label": row["label"]} for row in rows]), folder / "rows.parquet"
    )
    (folder / "table.tsv").write_text((folder / "table.csv").read_text().replace(",", "\t"))
    (folder / "words.conll").write_text("the O\ntimak B-X\n\nwalks O\n" * 10)
    (folder / "squad.json").write_text(SQUAD)
    (folder / "text.txt.gz").write_bytes(gzip.compress((folder / "text.txt").read_bytes()))
    return folder


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to three small changes: a bit, a byte, a cut, a piece twice, a piece gone, zeros, a word that parsers trip over."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed) + 1)
        end = min(len(changed), at + rng.randint(1, 64))
        match rng.randrange(8):
            case 0 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[min(at, len(changed) - 1)] = rng.randrange(256)
            case 2:
                del changed[at:]
            case 3:
                changed[at:at] = changed[at:end]
            case 4:
                del changed[at:end]
            case 5:
                changed[at:end] = bytes(end - at)
            case _:
                changed[at : at + rng.choice((0, 1, 4))] = rng.choice(TOKENS)
    return bytes(changed)


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_a_mutated_file_is_read_as_before_or_refused(name: str, count: int, files: Path, tmp_path: Path) -> None:
    kind, rng = KINDS[name], random.Random(f"{name} {count}")
    folder = tmp_path / "world"
    shutil.copytree(files, folder)
    whole, path = (folder / kind.file).read_bytes(), folder / kind.file
    before, refused = kind.read(folder), 0
    for number in range(count):
        path.write_bytes(data := mutated(whole, rng))
        try:
            read = kind.read(folder)
        except ElectraError as error:
            refused += 1
            assert len(str(error)) < 3000, f"mutation {number}: a message of {len(str(error))} characters"
            continue
        except BaseException as error:
            keep = Path(os.environ.get("FUZZ_KEEP", tmp_path)) / f"{name.replace(' ', '-')}-{number}"
            keep.write_bytes(data)
            raise AssertionError(f"mutation {number} of {name} ({keep}): {type(error).__name__}: {error}") from error
        assert not kind.verified or read == before, f"mutation {number} of {name} was read as something else"
    assert refused or name in (
        "metrics",
        "environment",
        "text",
        "checkpoint weights",
        "checkpoint state",
        "checkpoint manifest",
    )
