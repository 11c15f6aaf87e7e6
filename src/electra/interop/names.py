"""One table of tensor names: ours, transformers', Google's.

Patterns: `{n}` is the layer and `{p}` weight or bias. Google's checkpoints of TensorFlow 1 call the weight of a product
`kernel`, stored the other way round, and those of a norm `gamma` and `beta`: `{dense}` and `{norm}`.

BERT and RoBERTa have the names of ELECTRA's encoder behind a prefix of their own; what is named here beside it are their token heads.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

ATTENTION_PARTS = ("query", "key", "value")
_PATTERNS = {"n": r"\d{1,4}", "p": "weight|bias", "dense": "kernel|bias", "norm": "gamma|beta"}
_GOOGLE_PARTS = {"kernel": "weight", "gamma": "weight", "bias": "bias", "beta": "bias"}


class Name(NamedTuple):
    """Google's is "" where it has no such tensor."""

    ours: str
    transformers: str
    google: str = ""


LAYER, GOOGLE_LAYER = "encoder.layer.{n}", "encoder/layer_{n}"
ELECTRA_ENCODER = (
    Name("embeddings.words.weight", "embeddings.word_embeddings.weight", "embeddings/word_embeddings"),
    Name("embeddings.positions.weight", "embeddings.position_embeddings.weight", "embeddings/position_embeddings"),
    Name("embeddings.types.weight", "embeddings.token_type_embeddings.weight", "embeddings/token_type_embeddings"),
    Name("embeddings.norm.{p}", "embeddings.LayerNorm.{p}", "embeddings/LayerNorm/{norm}"),
    Name("project.{p}", "embeddings_project.{p}", "embeddings_project/{dense}"),
    *(
        Name(f"layers.{{n}}.{part}.{{p}}", f"{LAYER}.attention.self.{part}.{{p}}", f"{GOOGLE_LAYER}/attention/self/{part}/{{dense}}")
        for part in ATTENTION_PARTS
    ),
    Name("layers.{n}.attention_output.{p}", f"{LAYER}.attention.output.dense.{{p}}", f"{GOOGLE_LAYER}/attention/output/dense/{{dense}}"),
    Name("layers.{n}.attention_norm.{p}", f"{LAYER}.attention.output.LayerNorm.{{p}}", f"{GOOGLE_LAYER}/attention/output/LayerNorm/{{norm}}"),
    Name("layers.{n}.expand.{p}", f"{LAYER}.intermediate.dense.{{p}}", f"{GOOGLE_LAYER}/intermediate/dense/{{dense}}"),
    Name("layers.{n}.contract.{p}", f"{LAYER}.output.dense.{{p}}", f"{GOOGLE_LAYER}/output/dense/{{dense}}"),
    Name("layers.{n}.output_norm.{p}", f"{LAYER}.output.LayerNorm.{{p}}", f"{GOOGLE_LAYER}/output/LayerNorm/{{norm}}"),
)  # fmt: skip
MODERNBERT_ENCODER = (
    Name("embeddings.words.{p}", "embeddings.tok_embeddings.{p}"),
    Name("norm.{p}", "embeddings.norm.{p}"),
    Name("layers.{n}.attention_norm.{p}", "layers.{n}.attn_norm.{p}"),
    Name("layers.{n}.query_key_value.{p}", "layers.{n}.attn.Wqkv.{p}"),
    Name("layers.{n}.attention_output.{p}", "layers.{n}.attn.Wo.{p}"),
    Name("layers.{n}.feed_forward_norm.{p}", "layers.{n}.mlp_norm.{p}"),
    Name("layers.{n}.expand.{p}", "layers.{n}.mlp.Wi.{p}"),
    Name("layers.{n}.contract.{p}", "layers.{n}.mlp.Wo.{p}"),
    Name("final_norm.{p}", "final_norm.{p}"),
)
_MODERNBERT_LABELS = (
    Name("label.dense.{p}", "head.dense.{p}"),
    Name("label.norm.{p}", "head.norm.{p}"),
    Name("label.output.{p}", "classifier.{p}"),
)
HEADS: Mapping[str, tuple[Name, ...]] = {
    "ElectraModel": (),
    "ElectraForPreTraining": (
        Name("dense.{p}", "discriminator_predictions.dense.{p}", "discriminator_predictions/dense/{dense}"),
        Name("output.{p}", "discriminator_predictions.dense_prediction.{p}", "discriminator_predictions/dense_1/{dense}"),
    ),
    "ElectraForMaskedLM": (
        Name("dense.{p}", "generator_predictions.dense.{p}", "generator_predictions/dense/{dense}"),
        Name("norm.{p}", "generator_predictions.LayerNorm.{p}", "generator_predictions/LayerNorm/{norm}"),
        Name("bias", "generator_lm_head.bias", "generator_predictions/output_bias"),
    ),
    "ElectraForSequenceClassification": (
        Name("label.dense.{p}", "classifier.dense.{p}"),
        Name("label.output.{p}", "classifier.out_proj.{p}"),
    ),
    "ElectraForTokenClassification": (Name("label.output.{p}", "classifier.{p}"),),
    "ElectraForQuestionAnswering": (Name("label.output.{p}", "qa_outputs.{p}"),),
    "BertForMaskedLM": (
        Name("dense.{p}", "cls.predictions.transform.dense.{p}", "cls/predictions/transform/dense/{dense}"),
        Name("norm.{p}", "cls.predictions.transform.LayerNorm.{p}", "cls/predictions/transform/LayerNorm/{norm}"),
        Name("bias", "cls.predictions.bias", "cls/predictions/output_bias"),
    ),
    "RobertaForMaskedLM": (
        Name("dense.{p}", "lm_head.dense.{p}"),
        Name("norm.{p}", "lm_head.layer_norm.{p}"),
        Name("bias", "lm_head.bias"),
    ),
    "ModernBertModel": (),
    "ModernBertForMaskedLM": (
        Name("dense.{p}", "head.dense.{p}"),
        Name("norm.{p}", "head.norm.{p}"),
        Name("bias", "decoder.bias"),
    ),
    "ModernBertForTokenClassification": _MODERNBERT_LABELS,
    "ModernBertForSequenceClassification": _MODERNBERT_LABELS,
    "ModernBertForQuestionAnswering": _MODERNBERT_LABELS,
}  # fmt: skip
"""By the class of transformers that reads them; the output matrix of a token head is the word table, which is stored once."""


def our_names(names: Iterable[Name]) -> dict[str, str]:
    """Ours -> transformers'."""
    return {name.ours: name.transformers for name in names}


def rename(name: str, table: Mapping[str, str]) -> str | None:
    for before, after in table.items():
        if (parts := placeholders(name, before)) is not None:
            return after.format(**parts)
    return None


def placeholders(name: str, pattern: str) -> dict[str, str] | None:
    """What stands in the places of a pattern; None where the name is not of it."""
    expression = re.escape(pattern)
    for key, values in _PATTERNS.items():
        expression = expression.replace(rf"\{{{key}\}}", f"(?P<{key}>{values})")
    match = re.fullmatch(expression, name)
    return match.groupdict() if match else None


def from_google(name: str, names: Iterable[Name]) -> tuple[str, bool] | None:
    """transformers' name of a tensor of Google's, and whether it is stored the other way round."""
    for _, theirs, pattern in names:
        parts = placeholders(name, pattern) if pattern else None
        if parts is not None:
            part = parts.get("dense") or parts.get("norm") or ""
            return theirs.format(**parts, p=_GOOGLE_PARTS.get(part, "")), part == "kernel"
    return None


def renamed(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """To transformers' names; every name must have one."""
    names = {name: rename(name, table) for name in tensors}
    assert None not in names.values(), f"no transformers name for one of {list(tensors)}"
    return {str(names[name]): tensor for name, tensor in tensors.items()}


def renamed_back(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """To our names. What has no place here is left out; what is missing shows when the module loads."""
    inverse = {after: before for before, after in table.items()}
    return {ours: tensor for name, tensor in tensors.items() if (ours := rename(name, inverse))}
