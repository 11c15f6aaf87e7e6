"""A command in a process of its own that need not import torch again: forked from one that has."""

import multiprocessing
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from faults.world import run_words

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["faults.forked", "torch._dynamo", "torch.utils.tensorboard", "matplotlib.pyplot", "sklearn.metrics"]
    + [f"electra.{name}" for name in ("commands", "pretraining.run", "pretraining.load", "finetuning.run", "inspector.compare")]
    + ["transformers.models.electra.modeling_electra", "transformers.models.electra.tokenization_electra"]
)  # fmt: skip


def start(words: str, folder: Path) -> BaseProcess:
    process = CONTEXT.Process(target=run_and_exit, args=(words, folder))
    process.start()
    return process


def run_and_exit(words: str, folder: Path) -> None:
    done = run_words(words, folder)
    (folder / "stderr").write_text(done.stderr)
    sys.exit(done.returncode)
