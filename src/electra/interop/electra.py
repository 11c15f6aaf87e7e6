"""ELECTRA in transformers' words: config.json and tensor names, ours on the left.

Our queries, keys and values are one matrix; transformers has three. Everything else is one to one.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from electra.base.batch import SpecialIds
from electra.base.errors import DataError
from electra.interop.names import renamed, renamed_back
from electra.model.electra import LAYER_NORM_EPS, TYPES, EncoderSettings

CLASS, DISCRIMINATOR = "Electra", "ElectraForPreTraining"
DISCRIMINATOR_LABELS: dict[str, str] = {}
PREFIX = "electra."
INPUTS = ("input_ids", "token_type_ids", "attention_mask")
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
# By the class that reads them. The output matrix of a token head is the word table, which is stored once.
HEADS: dict[str, dict[str, str]] = {
    "ElectraModel": {},
    DISCRIMINATOR: {
        "dense.{p}": "discriminator_predictions.dense.{p}",
        "output.{p}": "discriminator_predictions.dense_prediction.{p}",
    },
    "ElectraForMaskedLM": {
        "dense.{p}": "generator_predictions.dense.{p}",
        "norm.{p}": "generator_predictions.LayerNorm.{p}",
        "bias": "generator_lm_head.bias",
    },
    "ElectraForSequenceClassification": {
        "dense.{p}": "classifier.dense.{p}",
        "output.{p}": "classifier.out_proj.{p}",
    },
    "ElectraForTokenClassification": {"classifier.{p}": "classifier.{p}"},
    "ElectraForQuestionAnswering": {"qa_outputs.{p}": "qa_outputs.{p}"},
}
ATTENTION_PARTS = ("query", "key", "value")


def config_json(
    settings: EncoderSettings, vocab_size: int, special: SpecialIds, architecture: str
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "electra",
        "vocab_size": vocab_size,
        "embedding_size": settings.embedding,
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "intermediate_size": settings.intermediate,
        "max_position_embeddings": settings.positions,
        "type_vocab_size": TYPES,
        "hidden_act": "gelu",
        "hidden_dropout_prob": settings.dropout,
        "attention_probs_dropout_prob": settings.attention_dropout,
        "layer_norm_eps": LAYER_NORM_EPS,
        "initializer_range": 0.02,
        "pad_token_id": special.pad,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def settings_from_config(config: Mapping[str, Any]) -> EncoderSettings:
    """Through an allow-list of keys."""
    if config.get("hidden_act", "gelu") != "gelu":
        raise DataError(
            f"ELECTRA with hidden_act {config['hidden_act']!r} is not supported; only gelu is read."
        )
    return EncoderSettings(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        embedding=config["embedding_size"],
        positions=config["max_position_embeddings"],
        dropout=config.get("hidden_dropout_prob", 0.1),
        attention_dropout=config.get("attention_probs_dropout_prob", 0.1),
    )


def encoder_to_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stacked = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"layers\.(\d+)\.query_key_value\.(weight|bias)", name):
            for part, piece in zip(ATTENTION_PARTS, tensor.chunk(3), strict=True):
                stacked[f"encoder.layer.{match[1]}.attention.self.{part}.{match[2]}"] = piece
    others = {name: tensor for name, tensor in tensors.items() if ".query_key_value." not in name}
    return stacked | renamed(others, ENCODER)


def encoder_from_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names that have no place here (a pooler, position ids) are left out; missing ones show when the module loads."""
    found = renamed_back(tensors, ENCODER)
    for name in tensors:
        if match := re.fullmatch(r"encoder\.layer\.(\d+)\.attention\.self\.query\.(weight|bias)", name):
            parts = [tensors[name.replace(".query.", f".{part}.")] for part in ATTENTION_PARTS]
            found[f"layers.{match[1]}.query_key_value.{match[2]}"] = torch.cat(parts)
    return found
