"""A small real corpus, prepared once a test session, and a recipe that trains on it in seconds."""

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar
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


@contextlib.contextmanager
def who_asks():
    """Variables that send whoever asks for the network to a proxy which answers nobody, and what was asked of it."""
    proxy, asked, stop = socket.create_server(("127.0.0.1", 0)), [], threading.Event()
    proxy.settimeout(0.1)

    def answer() -> None:
        while not stop.is_set():
            try:
                connection, _ = proxy.accept()
                asked.append(connection.recv(200))
                connection.close()
            except TimeoutError:
                pass

    thread = threading.Thread(target=answer)
    thread.start()
    address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    try:
        yield dict.fromkeys([*names, *map(str.lower, names[:2])], address), asked
    finally:
        stop.set()
        thread.join()
        proxy.close()


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


def electra(
    *words: object, cwd: Path | None = None, stdin: str | bytes = "", afresh: bool = False
) -> subprocess.CompletedProcess:
    """The command line in this process: importing torch once is enough for most tests. So is it for the process that looks at an
    export, which is forked from this one unless it must be a fresh one (`afresh`)."""
    from electra.commands import run

    out, err = io.StringIO(), io.StringIO()
    is_forked = words[0] == "export" and not afresh
    with (
        mock.patch.multiple("electra.inspector.fresh.FreshProcess", **FORKED_LOOKS)
        if is_forked
        else contextlib.nullcontext(),
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin))),
    ):
        try:
            run([str(word) for word in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def electra_process(*words: object, env: dict[str, str] | None = None, **more) -> subprocess.CompletedProcess:
    """The command line as people use it: another process, which costs three seconds more."""
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=240, env=environment(env), **more)


PRELOADED = (
    *(f"electra.{name}" for name in ("commands", "pretraining.run", "finetuning.run")),
    *("torch._dynamo", "torch.utils.tensorboard", "matplotlib.pyplot", "sklearn.metrics"),
    *(f"transformers.models.electra.{name}_electra" for name in ("modeling", "tokenization")),
)


class Forked:
    """The command line in a process of its own, as subprocess.Popen has it: what ends it is real. It is forked from this one, so
    that nothing has to be imported again, which is most of the time of a small command."""

    started: ClassVar[list["Forked"]] = []

    def __init__(self, *words: object, call: Callable[[list[str]], None] | None = None, **variables: str):
        for name in PRELOADED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        self.folder = tempfile.TemporaryDirectory()
        self.output = Path(self.folder.name) / "said.txt"
        arguments = [str(word) for word in words], variables, self.output, call
        self.process = multiprocessing.get_context("fork").Process(target=run_command, args=arguments)
        self.process.start()
        self.pid = self.process.pid or 0
        Forked.started.append(self)

    @property
    def said(self) -> str:
        """On standard output and standard error so far."""
        return self.output.read_text("utf-8") if self.output.exists() else ""

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float = 180) -> int:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"it still runs after {timeout} s: {self.said[-500:]}"
        return self.process.exitcode

    def wait_for(self, text: str, timeout: float = 90) -> None:
        until = time.monotonic() + timeout
        while text not in self.said:
            assert self.poll() is None and time.monotonic() < until, f"it never said {text!r}: {self.said[-500:]}"
            time.sleep(0.01)


def run_command(
    words: list[str], variables: Mapping[str, str], output: Path, call: Callable[[list[str]], None] | None = None
) -> None:
    """In a forked process. What it says goes into `output`."""
    import torch

    from electra.commands import main

    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(variables)
    torch.set_num_threads(1)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    (call or main)(words)


def electra_forked(*words: object) -> subprocess.CompletedProcess:
    """`electra` in a process of its own, to its end; both of its outputs are one."""
    process = Forked(*words)
    code = process.wait(240)
    return subprocess.CompletedProcess(words, code, process.said, process.said)


def ask_forked(fresh, question: str) -> dict[str, str]:
    from electra.inspector.fresh import answer_questions

    path = Path(fresh.scratch.name) / "answer.json"

    def look(_: list[str]) -> None:
        with path.open("w") as answers:
            answer_questions([question], answers)

    process = Forked(call=look)
    assert process.wait() == 0, process.said
    return json.loads(path.read_text())


FORKED_LOOKS = {"start": lambda fresh: None, "stop": lambda fresh: None, "ask": ask_forked}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "electra", *map(str, words)]


def write_table(path: Path, rows: list[dict]) -> Path:
    from electra.data.tables import TableWriter

    with TableWriter(path) as writer:
        writer.write(rows)
    return path


def decoded(folder: Path, split: str) -> list[str]:
    """The documents of prepared shards, as text."""
    import numpy as np

    from electra.data.shards import open_data
    from electra.data.tokenizer import load_tokenizer

    tokenizer, shards = load_tokenizer(folder), open_data(folder, split).shards
    documents = (part for shard in shards for part in np.split(shard.tokens, shard.documents[:-1]))
    return [tokenizer.decode(document.tolist()) for document in documents]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but its lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(more or {})}


def our_logits(encoder, head, batch):
    """What a network says of a batch, on the host; its states where it has no head."""
    from electra.interop.read import Pretrained
    from electra.interop.write import PretrainedNetwork, answers_of
    from electra.model.modern import ModernDetectionHead

    network = PretrainedNetwork(Pretrained(encoder, head, "encoder", None))
    answers = answers_of(network)(batch)
    if head is None:
        return answers["last_hidden_state"]
    return answers["logits"][..., 1] if isinstance(head, ModernDetectionHead) else answers["logits"]
