"""Exports any model to the formats of others: transformers, sentence-transformers, ONNX. An export is kept only if a fresh process
reads it with the same ids and the same numbers (fresh.py)."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.config import Settings
from electra.base.errors import SettingsError
from electra.finetuning import merit
from electra.finetuning.folder import TASK_FILE, TaskModel, load_task_folder, task_folder, write_task_folder
from electra.finetuning.plan import read_answered
from electra.finetuning.question_heads import JointHead
from electra.finetuning.training import infer
from electra.inspector.embed import EmbedSettings, vectors_of
from electra.inspector.fresh import SENTENCE_MODULES, VECTOR_PROBE, VECTORS, FreshProcess
from electra.interop.card import CARD, LIMITS, UNSAID, Publication, usage, with_header, with_section
from electra.interop.formats import FORMATS
from electra.interop.onnx import GRAPH, INT8_GRAPH, NOTES, OnnxGraphs, OnnxNetwork, OnnxSession, make_graphs
from electra.interop.read import Pretrained
from electra.interop.write import (
    Manner,
    PretrainedNetwork,
    answers_of,
    network_folder,
    whole_or_absent,
    write_files,
    write_network,
)
from electra.model.heads import Pooling
from electra.pretraining.card import run_sections
from electra.pretraining.load import (
    CONFIG,
    EXPORTS,
    Exported,
    export_run,
    heldout_metrics,
    load_network,
    load_settings,
    run_card,
)

log = logging.getLogger(__name__)

POOLING_FOLDER = "1_Pooling"
INT8_LOSS = 0.03
"""The fraction of a score that a quantized copy may lose before a warning."""


class ExportSettings(Settings):
    """`int8` adds a quantized copy to an ONNX graph, and `dev` are rows with answers to measure what it costs a fine-tuned model.
    `pooling` and `length` are for sentence-transformers: how vectors are made and where texts are cut. Weights larger than
    `shard_size` are split into several files with an index."""

    format: Literal["transformers", "onnx", "sentence-transformers"] = "transformers"
    int8: bool = False
    dev: Path | None = None
    pooling: Pooling = "mean"
    length: int | None = Field(None, ge=3, le=1_000_000)
    shard_size: str = Field("5GB", pattern=r"^[0-9]{1,6}(KB|MB|GB)$")

    @property
    def shard_bytes(self) -> int:
        return int(self.shard_size[:-2]) * {"KB": 10**3, "MB": 10**6, "GB": 10**9}[self.shard_size[-2:]]

    @model_validator(mode="after")
    def belongs_to_its_format(self) -> "ExportSettings":
        if self.format != "onnx" and (self.int8 or self.dev):
            raise ValueError(f"int8 and dev are for ONNX, not {self.format}: set format to onnx")
        if self.dev and not self.int8:
            raise ValueError("dev rows say what int8 costs: set int8 too")
        if self.format != "sentence-transformers" and (self.length or self.pooling != "mean"):
            raise ValueError(f"pooling and length are for sentence-transformers, not {self.format}")
        return self


def export_model(model: Path, out: Path, settings: ExportSettings, publication: Publication = UNSAID) -> list[Exported]:
    """Exports the networks of a run in transformers' format to folders in `out`; for other models and formats the main network to `out`."""
    with FreshProcess() as fresh:
        manner = Manner(fresh.check, settings.shard_bytes)
        if settings.format == "transformers" and (model / CONFIG).is_file():
            return export_run(model, out, publication, manner)
        return [Exported(out, export_one(model, out, settings, publication, manner))]


def export_one(model: Path, out: Path, settings: ExportSettings, publication: Publication, manner: Manner) -> str:
    """Exports the main network; returns how it was checked."""
    finetuned = load_task_folder(model) if (model / TASK_FILE).is_file() else None
    network = finetuned.pretrained if finetuned else load_network(model)
    card = with_header(source_card(model, network), publication.entries())
    match settings.format:
        case "transformers" if finetuned:
            return write_task_folder(out, finetuned, {CARD: card.encode()}, manner)
        case "transformers":
            return write_network(out, network, card, manner=manner)
        case "onnx":
            return write_onnx(out, network, finetuned, settings, manner, card)
        case "sentence-transformers":
            if finetuned:  # the head is dropped, and what the card says about it
                card = with_section(with_section(card, "Scores", ""), "Limits", LIMITS)
            return write_sentence_transformers(out, network, settings, manner, card)


def source_card(model: Path, network: Pretrained) -> str:
    """The model's card: made from its run, or the card that it has, or one that says its origin is unknown."""
    if (model / CONFIG).is_file():
        settings = load_settings(model)
        return run_card(settings, network, run_sections(model, settings, heldout_metrics(model)), UNSAID)
    cards = [folder / CARD for folder in (model, *(model / name for name in EXPORTS)) if (folder / CARD).is_file()]
    if cards:
        return cards[0].read_text("utf-8", "replace")
    form = FORMATS[network.encoder.settings.kind]
    title = f"# {form.title} {network.kind}\n\nWhere it is from, its folder did not say."
    return with_header(with_section(title, "Use", usage("")), {"library_name": "transformers", "tags": ["electra"]})


# ONNX


def write_onnx(
    out: Path, network: Pretrained, finetuned: TaskModel | None, settings: ExportSettings, manner: Manner, card: str
) -> str:
    module: nn.Module = finetuned.model if finetuned else PretrainedNetwork(network)
    encoder = network.encoder
    longest = finetuned.task.length if finetuned else encoder.settings.positions
    # the beam of the joint head has a fixed width; shorter rows are padded to it
    head = finetuned.model.head if finetuned else None
    shortest = head.beam if isinstance(head, JointHead) else 1
    folder = task_folder(finetuned, {}) if finetuned else network_folder(network, {})
    with whole_or_absent(out) as temporary:
        graphs = make_graphs(OnnxNetwork(module.eval(), network.tokenizer, shortest, longest), settings.int8)
        notes = dict(graphs.notes)
        if settings.dev:
            if not finetuned:
                raise SettingsError("dev rows are for a fine-tuned model. Leave them out.", ("dev",))
            notes["int8"] = {**notes["int8"], "dev": scores_of_graphs(finetuned, graphs, settings.dev, shortest)}
        content = {**folder.description(), **graphs.files, NOTES: (json.dumps(notes, indent=1) + "\n").encode()}
        write_files(temporary, {**content, CARD: onnx_card(card, notes).encode()})
        assert manner.check
        manner.check(temporary, "", network.tokenizer, answers_of(module))
    return f"{graph_note(notes)}; and in a process of its own"


def scores_of_graphs(trained: TaskModel, graphs: OnnxGraphs, file: Path, shortest: int) -> dict[str, Any]:
    """The task's metrics on a file with answers, with each of the two graphs in place of the network."""
    task = trained.task
    rows = read_answered(task, file)
    examples, _ = task.encode(rows)
    scores = {}
    method = trained.method.model_copy(update={"device": "cpu"})
    for name, graph in {"float32": graphs.files[GRAPH], "int8": graphs.files[INT8_GRAPH]}.items():
        outputs = infer(OnnxSession(graph, shortest), task, examples, method)
        scores[name] = task.scores(rows, task.predict(rows, examples, outputs))
    metric, whole = next(iter(scores["float32"].items()))
    quantized = scores["int8"][metric]
    if merit(metric, whole) - merit(metric, quantized) > INT8_LOSS * abs(whole):
        log.warning(
            "int8 costs a lot: %s %.4f where float32 has %.4f. Use the float32 graph.", metric, quantized, whole
        )
    return {"rows": len(rows), **scores}


def graph_note(notes: Mapping[str, Any]) -> str:
    shapes = [" x ".join(map(str, it["shape"])) for it in notes["checked"]]
    difference = max(it["largest_difference"] for it in notes["checked"])
    text = (
        f"opset {notes['opset']}, same logits as ours in onnxruntime at {', '.join(shapes)} (within {difference:.1e})"
    )
    if "int8" not in notes:
        return text
    int8 = notes["int8"]
    lost = ", ".join(
        f"{name} {it:.2g} of {int8['largest'][name]:.2g}" for name, it in int8["largest_difference"].items()
    )
    text += f"; int8 has {int8['bytes'] / int8['of']:.0%} of the bytes, largest difference on the probe: {lost}"
    if dev := int8.get("dev"):
        metric = next(iter(dev["float32"]))
        text += f"; {metric} on {dev['rows']:,} dev rows {dev['float32'][metric]:.4f}, int8 {dev['int8'][metric]:.4f}"
    return text


def onnx_card(card: str, notes: Mapping[str, Any]) -> str:
    named = ", ".join(f'"{name}"' for name in notes["inputs"])
    use = f"""```python
import onnxruntime
from transformers import AutoTokenizer
inputs = AutoTokenizer.from_pretrained(".")(["some text"], return_tensors="np")   # in this folder
session = onnxruntime.InferenceSession("{GRAPH}")
print(session.run(None, {{name: inputs[name] for name in [{named}]}}))   # {", ".join(notes["outputs"])}
```

An ONNX graph: {graph_note(notes)}. `{NOTES}` has all of it."""
    return with_section(with_header(card, {"library_name": "onnx"}), "Use", use)


# sentence-transformers


class WithVectors(nn.Module):
    """An encoder whose outputs also have the vectors of the probe, whatever the input."""

    def __init__(self, network: Pretrained, vectors: Tensor):
        super().__init__()
        self.network, self.vectors = PretrainedNetwork(network), vectors

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {**self.network(batch), VECTORS: self.vectors}


def write_sentence_transformers(
    out: Path, network: Pretrained, settings: ExportSettings, manner: Manner, card: str
) -> str:
    """Writes the encoder, and how its states become a vector. By default texts are cut at the length of pre-training: positions
    beyond it may never have been trained."""
    encoder, positions = network.encoder, network.encoder.settings.positions
    length = min(settings.length or network.length or positions, positions)
    alone = replace(network, head=None, kind="encoder")
    kinds = {"0": ("", "Transformer"), "1": (POOLING_FOLDER, "Pooling")}
    modules = [
        {"idx": int(name), "name": name, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for name, (path, kind) in kinds.items()
    ]
    files = {
        SENTENCE_MODULES: modules,
        "sentence_bert_config.json": {"max_seq_length": length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    pooling = {
        "word_embedding_dimension": encoder.settings.hidden,
        "pooling_mode_cls_token": settings.pooling == "cls",
        "pooling_mode_mean_tokens": settings.pooling == "mean",
    }
    encoded = {name: json.dumps(content, indent=1).encode() for name, content in files.items()}
    pooled = vectors_of(alone, VECTOR_PROBE, EmbedSettings(pooling=settings.pooling, length=length))
    folder = network_folder(alone, {**encoded, CARD: sentence_card(card, length, settings.pooling).encode()})
    with whole_or_absent(out) as temporary:
        write_files(temporary, folder.content(manner.shard_bytes))
        write_files(temporary / POOLING_FOLDER, {"config.json": json.dumps(pooling, indent=1).encode()})
        assert manner.check
        ours = answers_of(WithVectors(alone, torch.from_numpy(pooled)))
        readers = manner.check(temporary, folder.architecture, network.tokenizer, ours)
    return f"same ids, states and vectors ({settings.pooling}, {length} tokens) as ours, read back by {readers}"


def sentence_card(card: str, length: int, pooling: Pooling) -> str:
    """The card without scores: the head that they belong to is not part of this model."""
    use = f"""```python
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(".")   # this folder, or its name on the Hub
print(model.encode(["some text", "another"]))
```

The encoder alone. A vector is the {"mean of the last layer's states" if pooling == "mean" else "state of [CLS]"}, of the first {length} tokens of a text. Not trained
for similarity: a start for that, or features for another model."""
    entries = {"library_name": "sentence-transformers", "pipeline_tag": "feature-extraction"}
    return with_section(with_header(card, {**entries, "metrics": None, "model-index": None}), "Use", use)
