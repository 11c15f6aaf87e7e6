"""Checks exports in a process that knows nothing but their folders: what loads only because something is still in memory, in the
environment or cached does not load there. It reads a folder with every installed library that can (electra, transformers,
onnxruntime, sentence-transformers) and compares ids and outputs on the probe with those of the exported network.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from electra.base.batch import Batch
from electra.base.errors import CorruptError, ElectraError
from electra.base.files import read_object
from electra.finetuning.folder import TASK_FILE, load_task_folder
from electra.interop.onnx import GRAPH, OnnxSession, floating, session_answers
from electra.interop.read import read_network
from electra.interop.write import (
    POSITIONS,
    PROBE,
    TOLERANCE,
    Answers,
    PretrainedNetwork,
    answers_of,
    check_by_transformers,
    probe_batch,
    require_equal,
)

LONGEST_LOOK = 900
SENTENCE_MODULES = "modules.json"
"""The file that marks a folder of sentence-transformers."""
VECTORS = "vectors"
VECTOR_PROBE = (*PROBE[:-1], " ".join(PROBE[:-1] * 200))
"""The probe without the text that transformers reads as a special token and `embed` as words; the last text is longer than any network."""


class FreshProcess:
    """One process for all folders of an export. It starts at once, to import while a network is read and written here. It ends when
    its input is closed, even if this process is killed, because the input is a pipe from here."""

    def __enter__(self) -> "FreshProcess":
        self.scratch = tempfile.TemporaryDirectory()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.scratch.cleanup()

    def start(self) -> None:
        places = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": places, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.errors = (Path(self.scratch.name) / "errors").open("w+")
        words, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
        self.process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=self.errors, text=True, cwd=self.scratch.name, env=env
        )

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()

    def check(self, folder: Path, architecture: str, tokenizer: Tokenizer, ours: Answers) -> str:
        """Implements `interop.write.Check`."""
        probe = probe_batch(tokenizer, read_object(folder / "config.json")[POSITIONS])
        expected = {"ids": probe.ids, "segments": probe.segments, "is_real": probe.is_real}
        expected |= {f"output.{name}": tensor.contiguous() for name, tensor in ours(probe).items()}
        path = Path(self.scratch.name) / "expected.safetensors"
        save_file(expected, path)
        answer = self.ask(json.dumps([str(folder.absolute()), architecture, str(path)]))
        if "error" in answer:
            raise CorruptError(f"in a process of its own: {answer['error']}")
        return f"{answer['readers']} in a process of its own"

    def ask(self, question: str) -> dict[str, str]:
        assert self.process.stdin and self.process.stdout
        limit = threading.Timer(LONGEST_LOOK, self.process.kill)
        limit.start()
        try:
            self.process.stdin.write(f"{question}\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            limit.cancel()
        if answer:
            return dict(json.loads(answer))
        code = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return {"error": f"it ended with exit code {code}{f' ({lines[-1][:300]})' if lines else ''}"}


def look(folder: Path, architecture: str, expected: Mapping[str, Tensor]) -> str:
    """Reads a folder with all readers in turn and compares; returns their names."""
    probe = Batch.of_rows(expected["ids"], expected["segments"], expected["is_real"].bool())
    ours = {name.removeprefix("output."): it for name, it in expected.items() if name.startswith("output.")}
    vectors = ours.pop(VECTORS, None)
    positions = read_object(folder / "config.json")[POSITIONS]
    read = probe_batch(Tokenizer.from_file(str(folder / "tokenizer.json")), positions)
    if not read.ids.equal(probe.ids):
        raise CorruptError("tokenizer.json gives different ids from the network's tokenizer. The folder was not kept.")
    if (folder / GRAPH).is_file():
        compared = floating({name: it for name, it in ours.items() if name != "allowed"})
        session = OnnxSession((folder / GRAPH).read_bytes(), read_object(folder / "onnx.json")["shortest"])
        require_equal(probe, compared, session_answers(session, probe, ours), "onnxruntime")
    else:
        is_task = (folder / TASK_FILE).is_file()
        module = load_task_folder(folder).model if is_task else PretrainedNetwork(read_network(folder))
        require_equal(probe, ours, answers_of(module)(probe), "electra")
    readers = check_by_transformers(folder, architecture, probe, ours)
    if vectors is not None and find_spec("sentence_transformers"):
        look_with_sentence_transformers(folder, vectors)
    return readers


def look_with_sentence_transformers(folder: Path, vectors: Tensor) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    theirs = model.encode(list(VECTOR_PROBE), show_progress_bar=False)
    difference = float(np.abs(theirs - vectors.numpy()).max())
    if not difference <= TOLERANCE:
        raise CorruptError(f"sentence-transformers gets different vectors (largest difference {difference:.2g}).")


def answer_questions(questions: Iterable[str], answers: IO[str]) -> None:
    for line in questions:
        folder, architecture, expected = json.loads(line)
        try:
            answer: dict[str, Any] = {"readers": look(Path(folder), architecture, load_file(expected))}
        except ElectraError as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    alone = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep what libraries print out of the answers
    answer_questions(sys.stdin, alone)
