"""A hundred kills: kill -9 at a random moment, the same command again until it ends, and then the same bytes as of one that was
never interrupted. A third of the kills wait for a temporary file or folder, since that is where a moment matters."""

import json
import os
import random
import shutil
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from faults.forked import start

COMMANDS = {
    "pretrain": ("pretrain recipe.toml data=shards run=new train.steps=30", 32),
    "prepare": ("prepare new text.txt --tokenizer tokenizer --workers 1 --unit-bytes 1000", 14),
    "tokenizer": ("tokenizer new text.txt --vocab-size 300", 10),
    "finetune": (
        "finetune export table.csv epochs=4 batch=8 length=24 evaluations=2 keep=best save_minutes=0.000001 --seeds 2 --out new",
        16,
    ),
    "compare": ('compare recipe.toml data=shards --seeds 2 --budget "6 steps" --out new', 16),
    "export": ("export run new", 12),
}
CLOCK = {"seconds", "training_seconds", "tokens_per_second", "pauses", "pid"}
HASHES_OF_CLOCKS = {"state.json", "result.json", "README.md"}  # entries of manifests


def contents(folder: Path) -> dict[str, Any]:
    """Every file by its name, without what a clock or a process id has written. Event files are one for each process."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent.name != "tensorboard")
    skipped = (".lock", "curves.png", "README.md")  # the plot and the card say how long it took
    return {str(path.relative_to(folder)): content(path) for path in files if path.name not in skipped}


def content(path: Path) -> Any:
    if path.suffix == ".jsonl":
        return [timeless(json.loads(line)) for line in path.read_text().splitlines()]
    return timeless(json.loads(path.read_text())) if path.suffix == ".json" else path.read_bytes()


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in CLOCK | HASHES_OF_CLOCKS}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def wait_for_a_temporary(process: BaseProcess, folder: Path) -> None:
    """Something is being written, by this process and not by one killed before."""
    begun = {path for path in folder.rglob(".*") if "tmp" in path.name}
    while process.is_alive():
        for place, folders, names in os.walk(folder):
            for name in (*folders, *names):
                if name.startswith(".") and "tmp" in name and Path(place, name) not in begun:
                    return
        time.sleep(0.0005)


def kill(process: BaseProcess) -> bool:
    """False where it had ended before."""
    process.kill()
    process.join()
    return process.exitcode == -9


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", COMMANDS)
def test_whatever_is_killed_ends_with_the_same_bytes(verb, world, tmp_path):
    words, wanted = COMMANDS[verb]
    rng, kills, aimed, endings = random.Random(verb), 0, 0, 0
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        shutil.copytree(world, folder)
    for _ in range(2):  # the first one waits for imports
        shutil.rmtree(whole / "new", ignore_errors=True)
        began = time.monotonic()
        process = start(words, whole)
        process.join()
        seconds = time.monotonic() - began
        assert process.exitcode == 0, (whole / "stderr").read_text()
    expected, before = contents(whole / "new"), contents(world)

    def require_the_same() -> None:
        assert process.exitcode == 0, (killed / "stderr").read_text()
        found = contents(killed / "new")
        assert [name for name in expected.keys() | found.keys() if found.get(name) != expected.get(name)] == []
        assert not [path for path in killed.rglob(".*") if "tmp" in path.name or ".del" in path.name]
        shutil.rmtree(killed / "new")

    while kills < wanted:
        assert endings < 3 * wanted, "it ends before it can be killed"
        process, aims = start(words, killed), rng.random() < 1 / 3
        if aims:
            wait_for_a_temporary(process, killed)
            time.sleep(rng.uniform(0, 0.003))
        else:
            process.join(rng.uniform(0, seconds))
        if kill(process):
            kills, aimed = kills + 1, aimed + aims
        else:
            endings += 1
            require_the_same()
    process = start(words, killed)
    process.join()
    require_the_same()
    (killed / "stderr").unlink()
    assert contents(killed) == before, "what it read has changed"
    print(f"{verb}: {kills} kills, {aimed} of them while a file was written; {endings + 1} times to the end")
