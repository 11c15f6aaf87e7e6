"""An export looked at by a process that knows nothing but the folder: what loads because something is still in memory, set by
an environment or cached does not load there. It reads the folder with all that is installed for it (electra, transformers,
onnxruntime, sentence-transformers) and compares ids and outputs on the probe with those of the network that was exported.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

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
"""What makes a folder one of sentence-transformers."""
VECTORS = "vectors"
VECTOR_PROBE = (*PROBE[:-1], " ".join(PROBE[:-1] * 200))
"""Without the text in which transformers sees a special token and `embed` a word; the last is longer than any network."""


def check_afresh(folder: Path, tokenizer: Tokenizer, ours: Answers) -> None:
    """`interop.write.Check`: raises with what differed."""
    positions = read_object(folder / "config.json")["max_position_embeddings"]
    probe = probe_batch(tokenizer, positions)
    expected = {"ids": probe.ids, "segments": probe.segments, "is_real": probe.is_real}
    expected |= {f"output.{name}": tensor.contiguous() for name, tensor in ours(probe).items()}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "expected.safetensors"
        save_file(expected, path)
        done = run_afresh(folder.absolute(), path)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CorruptError(f"in a process of its own: {reason}")


def run_afresh(folder: Path, expected: Path) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", __name__, str(folder), str(expected)]
    places = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": places, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    how = {"capture_output": True, "text": True, "timeout": LONGEST_LOOK, "check": False}
    return subprocess.run(words, cwd=expected.parent, env=env, **how)  # type: ignore[call-overload]


def look(folder: Path, expected: Mapping[str, Tensor]) -> None:
    """All readers of a folder, one after the other."""
    probe = Batch.of_rows(expected["ids"], expected["segments"], expected["is_real"].bool())
    ours = {name.removeprefix("output."): it for name, it in expected.items() if name.startswith("output.")}
    config = read_object(folder / "config.json")
    positions = config["max_position_embeddings"]
    read = probe_batch(Tokenizer.from_file(str(folder / "tokenizer.json")), positions)
    if not read.ids.equal(probe.ids):
        raise CorruptError("tokenizer.json gives other ids than the network's tokenizer. The folder was not kept.")
    has_graph = (folder / GRAPH).is_file()
    if find_spec("transformers"):
        check_by_transformers(folder, "" if has_graph else config["architectures"][0], probe, ours, positions)
    if has_graph:
        compared = floating({name: it for name, it in ours.items() if name != "allowed"})
        session = OnnxSession((folder / GRAPH).read_bytes(), read_object(folder / "onnx.json")["shortest"])
        require_equal(probe, compared, session_answers(session, probe, ours), "onnxruntime")
    elif (folder / TASK_FILE).is_file():
        require_equal(probe, ours, answers_of(load_task_folder(folder).model)(probe), "electra")
    else:
        found = answers_of(PretrainedNetwork(read_network(folder)))(probe)
        require_equal(probe, {name: it for name, it in ours.items() if name in found}, found, "electra")
    if (folder / SENTENCE_MODULES).is_file() and find_spec("sentence_transformers"):
        look_with_sentence_transformers(folder, ours[VECTORS])


def look_with_sentence_transformers(folder: Path, vectors: Tensor) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    found = model.encode(list(VECTOR_PROBE), show_progress_bar=False)
    difference = float(np.abs(found - vectors.numpy()).max())
    if not difference <= TOLERANCE:
        raise CorruptError(f"sentence-transformers gets other vectors (largest difference {difference:.2g}).")


def check_arguments() -> None:
    folder, expected = map(Path, sys.argv[1:])
    noise = io.StringIO()
    try:
        with contextlib.redirect_stderr(noise):
            look(folder, load_file(expected))
    except ElectraError as error:
        sys.exit(f"{error}")
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    sys.stdout.write(json.dumps("whole") + "\n")


if __name__ == "__main__":
    check_arguments()
