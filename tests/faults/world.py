"""A small world that faults are done to: text, tokenizer, shards, a run, its export, a table, a fine-tuned folder, a comparison.
Made once; each case has a copy of its own. And the ways to damage a file."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from helpers import SETTINGS, electra, write_corpus

STEPS = 6
SHORT = SETTINGS.replace("steps = 40", f"steps = {STEPS}").replace("save_every = 4", "save_every = 2")
PRETRAIN = "pretrain recipe.toml data=shards run=run"
FINETUNE = "finetune export table.csv epochs=1 batch=16 length=24 evaluations=1 --out tasks"
COMPARE = 'compare recipe.toml data=shards --seeds 1 --budget "2 steps" --out compared'


def make_world(folder: Path) -> Path:
    write_corpus(folder / "text.txt", documents=60)
    (folder / "recipe.toml").write_text(
        SHORT.replace("log_every = 5", "log_every = 1").replace("evaluate_every = 10", "evaluate_every = 3")
    )
    (folder / "electric.toml").write_text(SHORT)
    rows = [f"the tim{'ak' if n % 2 else 'owa'} walks number {n},{'yes' if n % 2 else 'no'}" for n in range(40)]
    (folder / "table.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    for words in (
        "tokenizer tokenizer text.txt --vocab-size 300",
        "prepare shards text.txt --tokenizer tokenizer --heldout 0.1 --workers 1 --unit-bytes 3000",
        PRETRAIN,
        "export run exported",
        FINETUNE.replace("export ", "exported/discriminator "),
        COMPARE,
    ):
        done = run_words(words, folder)
        assert done.returncode == 0, f"{words}: {done.stderr}"
    (folder / "exported" / "discriminator").rename(folder / "export")
    shutil.rmtree(folder / "exported")
    return folder


def run_words(words: str, folder: Path, stdin: bytes = b"") -> Any:
    import shlex

    return electra(*shlex.split(words), cwd=folder, stdin=stdin)


# Damage


def flip(path: Path, place: float = 0.5) -> None:
    """One bit of a byte."""
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def cut(path: Path, share: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])


def swap(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text, f"{path} has no {old}"
    path.write_text(text.replace(old, new, 1), "utf-8")


def put(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """The JSON of a file; `change` may edit it in place or return another."""
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(change(content) or content), "utf-8")


def tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    content = load_file(path)
    change(content)
    save_file(content, path, metadata={"format": "pt"})


def reseal(folder: Path, name: str = "MANIFEST.json") -> None:
    """A manifest that agrees with what the files are now: what somebody would do who damages on purpose."""
    manifest = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != name:
            data = path.read_bytes()
            manifest[path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / name).write_text(json.dumps(manifest))


def spoil(key: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(content: dict[str, torch.Tensor]) -> None:
        name = next(name for name in content if key in name)
        content[name].view(-1)[0] = value

    return change


def cast(key: str, kind: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(content: dict[str, torch.Tensor]) -> None:
        name = next(name for name in content if key in name)
        content[name] = content[name].to(kind)

    return change


def last_checkpoint(world: Path) -> Path:
    return world / "run" / "checkpoints" / f"step-{STEPS:09d}"


def long_word(size: int) -> str:
    letters = np.random.default_rng(0).integers(97, 123, size, dtype=np.uint8)
    return letters.tobytes().decode()
