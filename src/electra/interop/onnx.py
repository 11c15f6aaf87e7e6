"""Exports any of our networks as one ONNX graph with dynamic batch and length, checked in onnxruntime at several shapes before it is
kept; and an int8 copy whose loss of precision is measured.

Dynamic quantization: weights of the matrix products and the tables have eight bits, with one scale per column; activations are
quantized at run time, so no calibration text is needed. onnxruntime's own shape inference fails on the shapes that torch has
annotated, so these annotations are removed first.
"""

import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.errors import CorruptError, MachineError
from electra.data.tokenizer import special_ids, vocabulary_size
from electra.interop.write import answers_of, largest_differences, probe_batch, require_equal

GRAPH, INT8_GRAPH, NOTES = "model.onnx", "model_int8.onnx", "onnx.json"
OPSET = 20
"""The newest that onnxruntime runs with our masks: from 23 on attention is one operator, which refuses a mask shared by all queries."""
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
LARGEST_GRAPH = 1 << 31
"""The limit of a protobuf in bytes: larger weights would need files of their own."""
LONGEST_CHECK = 512
UNUSED_OUTPUTS = ("allowed",)
"""Outputs that a head returns only for its own loss."""


@dataclass(frozen=True)
class OnnxNetwork:
    """A network to export: a module that maps a `Batch` to outputs by name, and the range of lengths that it is used with."""

    network: nn.Module
    tokenizer: Tokenizer
    shortest: int
    longest: int


@dataclass(frozen=True)
class OnnxGraphs:
    """The exported files, by name, and what was measured of them."""

    files: Mapping[str, bytes]
    notes: Mapping[str, Any]


class GraphInputs(nn.Module):
    """Takes transformers' inputs, makes a batch of them, and returns the network's outputs in the order of `names`."""

    def __init__(self, network: nn.Module, names: Sequence[str]):
        super().__init__()
        self.network, self.names = network, names

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        batch = Batch(input_ids, segments, attention_mask.bool(), input_ids[:, 0], seed=0, padded=True)
        outputs = self.network(batch)
        return tuple(outputs[name] for name in self.names)


class OnnxSession(nn.Module):
    """A graph in onnxruntime, with the interface of the network that it was made from. Rows are padded to the shortest length
    that the graph accepts."""

    def __init__(self, graph: bytes, shortest: int = 1):
        super().__init__()
        runtime = require("onnxruntime")
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self.inputs = [it.name for it in self.session.get_inputs()]
        self.outputs = [it.name for it in self.session.get_outputs()]
        self.shortest = shortest

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        rows = zip(INPUTS, (batch.ids, batch.is_real.long(), batch.segments), strict=True)
        more = max(0, self.shortest - batch.ids.shape[1])
        feed = {name: np.pad(tensor.numpy(), ((0, 0), (0, more))) for name, tensor in rows if name in self.inputs}
        return dict(zip(self.outputs, map(torch.from_numpy, self.session.run(None, feed)), strict=True))


def require(module: str) -> Any:
    """onnxruntime reports to its makers unless it is told not to, since 1.31 on Linux too."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise MachineError(f"{name} is not installed. Install it from the clone: pip install '.[onnx]'.") from None


def make_graphs(source: OnnxNetwork, int8: bool) -> OnnxGraphs:
    """The checked graph and, with `int8`, its measured int8 copy."""
    for module in ("onnx", "onnxscript", "onnxruntime"):
        require(module)
    probe = probe_batch(source.tokenizer, source.longest)
    ours = answers_of(source.network)
    expected = {name: it for name, it in ours(probe).items() if name not in UNUSED_OUTPUTS}
    names = list(expected)
    other = ours(replace(probe, segments=1 - probe.segments))
    reads_segments = not all(other[name].equal(it) for name, it in expected.items())  # ModernBERT has none
    graph = exported_graph(source, names, INPUTS if reads_segments else INPUTS[:2])
    session = OnnxSession(graph, source.shortest)
    shapes = [check_shape(batch, ours, session) for batch in (probe, *other_shapes(source))]
    notes: dict[str, Any] = {
        "format": 1, "opset": OPSET, "inputs": session.inputs, "outputs": names, "shortest": source.shortest,
        "longest": source.longest, "checked": shapes,
    }  # fmt: skip
    files = {GRAPH: graph}
    if int8:
        files[INT8_GRAPH] = quantized(graph)
        answers = session_answers(OnnxSession(files[INT8_GRAPH], source.shortest), probe, expected)
        lost = largest_differences(probe, floating(expected), answers)
        if not all(np.isfinite(list(lost.values()))):
            raise CorruptError("the int8 graph gives numbers that are not finite. It was not kept.")
        scale = {name: expected[name].abs().max().item() for name in lost}
        sizes = {"bytes": len(files[INT8_GRAPH]), "of": len(graph)}
        notes["int8"] = {**sizes, "largest_difference": lost, "largest": scale}
    return OnnxGraphs(files, notes)


def exported_graph(source: OnnxNetwork, names: Sequence[str], inputs: Sequence[str]) -> bytes:
    onnx = require("onnx")
    length = max(8, source.shortest + 1)
    ids = torch.full((2, length), special_ids(source.tokenizer).unk)
    values = (ids, torch.ones_like(ids), torch.zeros_like(ids))[: len(inputs)]
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", min=source.shortest, max=source.longest)}
    with quiet_logger("torch.onnx"), warnings.catch_warnings():  # about vision operators and names of axes
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            GraphInputs(source.network, names).eval(), values, dynamo=True, verbose=False, opset_version=OPSET,
            input_names=inputs, output_names=names, dynamic_shapes=(axes,) * len(inputs),
        )  # fmt: skip
    assert program is not None
    model = program.model_proto
    if model.ByteSize() >= LARGEST_GRAPH:
        raise MachineError(f"the graph has {model.ByteSize():,} bytes, more than one ONNX file can hold.")
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


@contextmanager
def quiet_logger(name: str | None) -> Iterator[None]:
    """Silences a logger except for errors: what matters is checked afterwards. None is the root logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def other_shapes(source: OnnxNetwork) -> Iterator[Batch]:
    """Batches of random tokens, from one short row to several long ones; with several rows, half of the last one is padding."""
    pad, size = special_ids(source.tokenizer).pad, vocabulary_size(source.tokenizer)
    generator = torch.Generator().manual_seed(1)
    long = min(source.longest, LONGEST_CHECK)
    for rows, length in ((1, source.shortest), (3, min(source.shortest + 4, long)), (2, long)):
        ids = torch.randint(0, size, (rows, length), generator=generator)
        is_real = torch.ones_like(ids, dtype=torch.bool)
        is_real[-1, max(1, length // 2) :] = rows == 1
        ids[~is_real] = pad
        segments = (torch.arange(length) >= length // 3).long().expand_as(ids).clone()
        yield Batch.of_rows(ids, segments, is_real)


def check_shape(batch: Batch, ours: Any, session: OnnxSession) -> dict[str, Any]:
    expected = floating(ours(batch), session.outputs)
    answers = session_answers(session, batch, expected)
    require_equal(batch, expected, answers, f"onnxruntime at {tuple(batch.ids.shape)}")
    largest = max(largest_differences(batch, expected, answers).values())
    return {"shape": list(batch.ids.shape), "largest_difference": largest}


def session_answers(session: OnnxSession, batch: Batch, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a session, without the columns by which a short batch was padded."""
    outputs, length = session(batch), batch.ids.shape[1]
    answers = {name: outputs[name] for name in expected if name in outputs}
    return {name: it[:, :length] if it.shape != expected[name].shape else it for name, it in answers.items()}


def floating(outputs: Mapping[str, Tensor], names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The outputs to compare. The positions of a beam are left out: they may change if two are equally good; their scores may not."""
    chosen = outputs if names is None else names
    return {name: outputs[name] for name in chosen if name not in ("starts", "ends")}


def quantized(graph: bytes) -> bytes:
    onnx, quantization = require("onnx"), require("onnxruntime.quantization")
    model = onnx.load_model_from_string(graph)
    del model.graph.value_info[:]
    with tempfile.TemporaryDirectory() as scratch, quiet_logger(None):  # it always advises preprocessing
        before, after = Path(scratch) / "before.onnx", Path(scratch) / "after.onnx"
        onnx.save_model(model, before)
        quantization.quantize_dynamic(before, after, per_channel=True, weight_type=quantization.QuantType.QInt8)
        return after.read_bytes()
