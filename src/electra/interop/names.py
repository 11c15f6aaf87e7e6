"""One table: our tensor names <-> transformers'. Ours on the left; `{n}` is the layer.

Our queries, keys and values are one matrix; transformers has three. Everything else is one to one.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from electra.model.encoder import Encoder

ENCODER = {
    "embeddings.words.weight": "embeddings.word_embeddings.weight",
    "embeddings.positions.weight": "embeddings.position_embeddings.weight",
    "embeddings.types.weight": "embeddings.token_type_embeddings.weight",
    "embeddings.norm.{p}": "embeddings.LayerNorm.{p}",
    "project.{p}": "embeddings_project.{p}",
    "layers.{n}.attention_output.{p}": "encoder.layer.{n}.attention.output.dense.{p}",
    "layers.{n}.attention_norm.{p}": "encoder.layer.{n}.attention.output.LayerNorm.{p}",
    "layers.{n}.expand.{p}": "encoder.layer.{n}.intermediate.dense.{p}",
    "layers.{n}.contract.{p}": "encoder.layer.{n}.output.dense.{p}",
    "layers.{n}.output_norm.{p}": "encoder.layer.{n}.output.LayerNorm.{p}",
}
DETECTION_HEAD = {"dense.{p}": "dense.{p}", "output.{p}": "dense_prediction.{p}"}
TOKEN_HEAD = {
    "dense.{p}": "generator_predictions.dense.{p}",
    "norm.{p}": "generator_predictions.LayerNorm.{p}",
    "bias": "generator_lm_head.bias",
}
# Heads of fine-tuned models by the class that reads them. Tagging and span heads carry transformers' names themselves.
TASK_HEADS: dict[str, dict[str, str]] = {
    "ElectraForSequenceClassification": {
        "dense.{p}": "classifier.dense.{p}",
        "output.{p}": "classifier.out_proj.{p}",
    },
    "ElectraForTokenClassification": {},
    "ElectraForQuestionAnswering": {},
}
OWN_HEAD = "head."
ATTENTION_PARTS = ("query", "key", "value")


def rename(name: str, table: Mapping[str, str]) -> str | None:
    for ours, theirs in table.items():
        pattern = re.escape(ours).replace(r"\{n\}", r"(?P<n>\d+)").replace(r"\{p\}", r"(?P<p>weight|bias)")
        if match := re.fullmatch(pattern, name):
            return theirs.format(**match.groupdict())
    return None


def encoder_tensors(encoder: Encoder) -> dict[str, Tensor]:
    """A word table that is a sum (gradient-disentangled sharing) is given as what it adds up to."""
    tensors = encoder.state_dict() | {"embeddings.words.weight": encoder.embeddings.table.detach()}
    tensors.pop("embeddings.delta", None)
    return tensors


def encoder_to_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"layers\.(\d+)\.query_key_value\.(weight|bias)", name):
            for part, piece in zip(ATTENTION_PARTS, tensor.chunk(3), strict=True):
                renamed[f"encoder.layer.{match[1]}.attention.self.{part}.{match[2]}"] = piece
        else:
            theirs = rename(name, ENCODER)
            assert theirs is not None, f"no transformers name for {name}"
            renamed[theirs] = tensor
    return renamed


def encoder_from_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names that have no place here (a pooler, position ids) are left out; missing ones show when the module loads."""
    inverse = {theirs: ours for ours, theirs in ENCODER.items()}
    renamed = {ours: tensor for name, tensor in tensors.items() if (ours := rename(name, inverse))}
    for name in tensors:
        if match := re.fullmatch(r"encoder\.layer\.(\d+)\.attention\.self\.query\.(weight|bias)", name):
            parts = [tensors[name.replace(".query.", f".{part}.")] for part in ATTENTION_PARTS]
            renamed[f"layers.{match[1]}.query_key_value.{match[2]}"] = torch.cat(parts)
    return renamed


def head_to_transformers(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    return {rename(name, table) or name: tensor for name, tensor in tensors.items()}


def head_from_transformers(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    inverse = {theirs: ours for ours, theirs in table.items()}
    return {ours: tensor for name, tensor in tensors.items() if (ours := rename(name, inverse))}
