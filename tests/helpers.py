"""A small real corpus, prepared once a test session, and a recipe that trains on it in seconds."""

import contextlib
import io
import os
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

SETTINGS = """
seed = 3
[encoder]
layers = 2
hidden = 32
heads = 2
intermediate = 64
embedding = 16
positions = 32
[generator]
width = 0.5
[rows]
kind = "segments"
length = 24
[train]
steps = 40
batch = 8
log_every = 5
evaluate_every = 10
evaluate_rows = 32
save_every = 4
[optimizer]
lr = 1e-3
[schedule]
warmup = 4
"""


def write_corpus(path: Path, documents: int = 300) -> Path:
    """Sentences of a made-up grammar: enough structure to learn from, nobody's text."""
    rng = random.Random(1)
    nouns = [f"{a}{b}" for a in ("bar", "lon", "tim", "gor", "sel") for b in ("ak", "ute", "in", "owa", "e")]
    verbs = [f"{a}{b}s" for a in ("wal", "jum", "rea", "coo") for b in ("k", "p", "d", "l")]
    lines = []
    for _ in range(documents):
        for _ in range(rng.randint(1, 6)):
            subject, verb, thing = rng.choice(nouns), rng.choice(verbs), rng.choice(nouns)
            lines.append(f"The {subject} {verb} the {thing}, and the {thing} {verb} back.")
        lines.append("")
    path.write_text("\n".join(lines), "utf-8")
    return path


def shipped_sizes() -> list[str]:
    """Recipes that say how large the network is: those that others are added to by +."""
    from electra.base import config

    return [name for name in config.recipe_names() if "layers" in config.read_recipe(name).get("encoder", {})]


def shipped_additions() -> list[str]:
    """The other recipes: objectives, generators, an encoder, an optimizer. A new one is tested with all of these."""
    from electra.base import config

    sizes = shipped_sizes()
    return [name for name in config.recipe_names() if name not in sizes]


def words_of(addition: str, masked_lm: object = "x", discriminator_run: object = "x") -> list[str]:
    """What an addition cannot do without: the runs that frozen generators come from."""
    match addition:
        case "two-stage":
            return [f"generator.source={masked_lm}", f"start={masked_lm}"]
        case "frozen-generator":
            return [f"generator.source={discriminator_run}"]
    return []


def electra(*words: object, cwd: Path | None = None, stdin: str | bytes = "") -> subprocess.CompletedProcess:
    """The command line in this process: importing torch once is enough for most tests."""
    from electra.commands import main

    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin))),
    ):
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def electra_process(*words: object, env: dict[str, str] | None = None, **more) -> subprocess.CompletedProcess:
    """The command line as people use it: another process, which costs three seconds more."""
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=240, env=environment(env), **more)


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "electra", *map(str, words)]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but its lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(more or {})}
