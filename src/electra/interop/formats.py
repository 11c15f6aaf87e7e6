"""ELECTRA and ModernBERT in transformers' words: config.json and tensor names, ours <-> theirs.

Names are tables of patterns, ours on the left: `{n}` is the layer, `{p}` weight or bias. Two things are not one to one.
Our queries, keys and values are one matrix; transformers' ELECTRA has three. And an encoder whose word table is of another
width than its layers has a projection that ModernBERT lacks; it goes into the table: words * projection is a table of
ModernBERT's width with the same states. Reading that back gives an encoder without a projection. A token head on a table
of another width has no such form (`has_form`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from electra.base.batch import SpecialIds
from electra.base.errors import DataError
from electra.model import Encoder, EncoderSettings
from electra.model.electra import LAYER_NORM_EPS, TYPES, ElectraEncoderSettings
from electra.model.modern import NORM_EPS, ModernEncoderSettings

NetworkKind = Literal["discriminator", "generator", "encoder"]
OWN_HEAD = "head."
"""Before the names of a head that no class of transformers has."""
ATTENTION_PARTS = ("query", "key", "value")
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class ModelFormat:
    """How transformers writes one kind of encoder. `heads` are by the class that reads them; the output matrix of a token
    head is the word table, which is stored once."""

    family: str
    """What the names of its classes begin with."""
    discriminator: str
    """The class that reads one."""
    prefix: str
    """Before the encoder's names in a class with a head."""
    inputs: tuple[str, ...]
    encoder: Mapping[str, str]
    heads: Mapping[str, Mapping[str, str]]
    discriminator_labels: Mapping[str, str] = field(default_factory=dict)


MODERNBERT_LABELS = {
    "label.dense.{p}": "head.dense.{p}",
    "label.norm.{p}": "head.norm.{p}",
    "label.output.{p}": "classifier.{p}",
}
FORMATS = {
    "electra": ModelFormat(
        family="Electra",
        discriminator="ElectraForPreTraining",
        prefix="electra.",
        inputs=("input_ids", "token_type_ids", "attention_mask"),
        encoder={
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
        },
        heads={
            "ElectraModel": {},
            "ElectraForPreTraining": {
                "dense.{p}": "discriminator_predictions.dense.{p}",
                "output.{p}": "discriminator_predictions.dense_prediction.{p}",
            },
            "ElectraForMaskedLM": {
                "dense.{p}": "generator_predictions.dense.{p}",
                "norm.{p}": "generator_predictions.LayerNorm.{p}",
                "bias": "generator_lm_head.bias",
            },
            "ElectraForSequenceClassification": {
                "label.dense.{p}": "classifier.dense.{p}",
                "label.output.{p}": "classifier.out_proj.{p}",
            },
            "ElectraForTokenClassification": {"label.output.{p}": "classifier.{p}"},
            "ElectraForQuestionAnswering": {"label.output.{p}": "qa_outputs.{p}"},
        },
    ),
    "modernbert": ModelFormat(
        family="ModernBert",
        discriminator="ModernBertForTokenClassification",  # with one label
        discriminator_labels={"0": "replaced"},
        prefix="model.",
        inputs=("input_ids", "attention_mask"),
        encoder={
            "embeddings.words.{p}": "embeddings.tok_embeddings.{p}",
            "norm.{p}": "embeddings.norm.{p}",
            "layers.{n}.attention_norm.{p}": "layers.{n}.attn_norm.{p}",
            "layers.{n}.query_key_value.{p}": "layers.{n}.attn.Wqkv.{p}",
            "layers.{n}.attention_output.{p}": "layers.{n}.attn.Wo.{p}",
            "layers.{n}.feed_forward_norm.{p}": "layers.{n}.mlp_norm.{p}",
            "layers.{n}.expand.{p}": "layers.{n}.mlp.Wi.{p}",
            "layers.{n}.contract.{p}": "layers.{n}.mlp.Wo.{p}",
            "final_norm.{p}": "final_norm.{p}",
        },
        heads={
            "ModernBertModel": {},
            "ModernBertForMaskedLM": {
                "dense.{p}": "head.dense.{p}",
                "norm.{p}": "head.norm.{p}",
                "bias": "decoder.bias",
            },
            "ModernBertForTokenClassification": MODERNBERT_LABELS,
            "ModernBertForSequenceClassification": MODERNBERT_LABELS,
            "ModernBertForQuestionAnswering": MODERNBERT_LABELS,
        },
    ),
}
MODERNBERT_FIXED = {
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
    "norm_eps": NORM_EPS,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "tie_word_embeddings": True,
}


def network_class(settings: EncoderSettings, kind: NetworkKind) -> str:
    """The class of transformers that reads it."""
    form = FORMATS[settings.kind]
    match kind:
        case "discriminator":
            return form.discriminator
        case "generator":
            return f"{form.family}ForMaskedLM"
        case "encoder":
            return f"{form.family}Model"


def has_form(settings: EncoderSettings, kind: NetworkKind) -> bool:
    """Whether transformers has a class for it: ModernBERT's token head is as wide as its layers, and one on a word table
    of another width has no place there."""
    projects = isinstance(settings, ModernEncoderSettings) and settings.embedding != settings.hidden
    return kind != "generator" or not projects


# config.json


def config_json(settings: EncoderSettings, vocab_size: int, special: SpecialIds, architecture: str) -> dict[str, Any]:
    common = {
        "architectures": [architecture],
        "model_type": settings.kind,
        "vocab_size": vocab_size,
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "intermediate_size": settings.intermediate,
        "max_position_embeddings": settings.positions,
        "initializer_range": 0.02,
        "pad_token_id": special.pad,
        "dtype": "float32",
    }
    match settings:
        case ElectraEncoderSettings():
            return common | {
                "embedding_size": settings.embedding,
                "type_vocab_size": TYPES,
                "hidden_act": "gelu",
                "hidden_dropout_prob": settings.dropout,
                "attention_probs_dropout_prob": settings.attention_dropout,
                "layer_norm_eps": LAYER_NORM_EPS,
                "tie_word_embeddings": True,
            }
        case ModernEncoderSettings():
            return common | modernbert_config(settings, special, architecture)


def modernbert_config(settings: ModernEncoderSettings, special: SpecialIds, architecture: str) -> dict[str, Any]:
    """The layers' types and angles in the words of transformers 5, and in those of transformers 4 and other readers."""
    angles = {"full_attention": settings.global_theta, "sliding_attention": settings.local_theta}
    config = {
        "layer_types": [
            "sliding_attention" if settings.is_local(n) else "full_attention" for n in range(settings.layers)
        ],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in angles.items()},
        "global_attn_every_n_layers": settings.global_every,
        "global_rope_theta": settings.global_theta,
        "local_rope_theta": settings.local_theta,
        "local_attention": settings.window,
        "embedding_dropout": settings.dropout,
        "mlp_dropout": settings.dropout,
        "attention_dropout": settings.attention_dropout,
        "cls_token_id": special.cls,
        "sep_token_id": special.sep,
        "bos_token_id": special.cls,
        "eos_token_id": special.sep,
        "classifier_pooling": "cls",
        "classifier_dropout": settings.dropout,
    } | MODERNBERT_FIXED
    form = FORMATS["modernbert"]
    if architecture == form.discriminator:
        config |= {"id2label": form.discriminator_labels, "label2id": {"replaced": 0}}
    return config


def settings_from_config(config: Mapping[str, Any]) -> EncoderSettings:
    """Through an allow-list of keys."""
    if config["model_type"] == "modernbert":
        return modernbert_settings(config)
    if config.get("hidden_act", "gelu") != "gelu":
        raise DataError(f"ELECTRA with hidden_act {config['hidden_act']!r} is not supported; only gelu is read.")
    return ElectraEncoderSettings(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        embedding=config["embedding_size"],
        positions=config["max_position_embeddings"],
        dropout=config.get("hidden_dropout_prob", 0.1),
        attention_dropout=config.get("attention_probs_dropout_prob", 0.1),
    )


def modernbert_settings(config: Mapping[str, Any]) -> ModernEncoderSettings:
    """What we have no place for is refused rather than dropped.

    One dropout is read, `mlp_dropout`: an `embedding_dropout` or `classifier_dropout` of another value is not kept. An odd
    `local_attention` reaches as far as the even number below it, which is what we have. `local_rope_theta` of null means
    `global_rope_theta` in transformers 4."""
    other = [f"{key}={config[key]}" for key, value in MODERNBERT_FIXED.items() if config.get(key, value) != value]
    angles = config.get("rope_parameters") or {}
    if any(key not in LAYER_TYPES and (key, value) != ("rope_type", "default") for key, value in angles.items()):
        other.append(f"rope_parameters={angles}")
    if scaling := config.get("rope_scaling"):
        other.append(f"rope_scaling={scaling}")
    if other:
        raise DataError(f"ModernBERT with {', '.join(other)} is not supported.")
    layers = config["num_hidden_layers"]
    every = config.get("global_attn_every_n_layers", 3)
    if types := config.get("layer_types"):
        whole = [number for number, kind in enumerate(types) if kind == "full_attention"]
        every = whole[1] if len(whole) > 1 else layers
        if whole != list(range(0, layers, every)):
            raise DataError(f"layers {whole} attend to whole rows: only every n-th, the first included, can here.")
    global_theta = theta(angles, "full_attention", config.get("global_rope_theta", 160_000.0))
    local_theta = config.get("local_rope_theta", 10_000.0)
    return ModernEncoderSettings(
        layers=layers,
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        embedding=config["hidden_size"],
        positions=config["max_position_embeddings"],
        dropout=config.get("mlp_dropout", 0.0),
        attention_dropout=config.get("attention_dropout", 0.0),
        window=config.get("local_attention", 128) // 2 * 2,
        global_every=every,
        global_theta=global_theta,
        local_theta=theta(angles, "sliding_attention", global_theta if local_theta is None else local_theta),
    )


def theta(angles: Mapping[str, Any], kind: str, otherwise: float) -> float:
    entry = angles.get(kind) or {}
    if entry.get("rope_type", "default") != "default":
        raise DataError(f"ModernBERT with rotary positions of type {entry['rope_type']!r} is not supported.")
    return entry.get("rope_theta", otherwise)


# Tensors


def own_tensors(encoder: Encoder) -> dict[str, Tensor]:
    """By our names. A word table that is a sum (gradient-disentangled sharing) is given as what it adds up to."""
    tensors = encoder.state_dict() | {"embeddings.words.weight": encoder.embeddings.table.detach()}
    tensors.pop("embeddings.delta", None)
    return tensors


def network_tensors(encoder: Encoder, head: nn.Module | None, architecture: str) -> dict[str, Tensor]:
    """By transformers' names. A head that no class there has ("") keeps its own."""
    form = FORMATS[encoder.settings.kind]
    body = encoder_to_transformers(encoder.settings, own_tensors(encoder))
    top = {} if head is None else head.state_dict()
    if architecture:
        top = renamed(top, form.heads[architecture])
    else:
        top = {f"{OWN_HEAD}{name}": tensor for name, tensor in top.items()}
    prefix = "" if head is None else form.prefix
    return {f"{prefix}{name}": tensor for name, tensor in body.items()} | top


def head_tensors(settings: EncoderSettings, tensors: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """Back to our names."""
    if architecture:
        return renamed_back(tensors, FORMATS[settings.kind].heads[architecture])
    return {name.removeprefix(OWN_HEAD): tensor for name, tensor in tensors.items() if name.startswith(OWN_HEAD)}


def encoder_to_transformers(settings: EncoderSettings, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    others, split = dict(tensors), {}
    match settings:
        case ElectraEncoderSettings():
            for name in tensors:
                if match := re.fullmatch(r"layers\.(\d+)\.query_key_value\.(weight|bias)", name):
                    for part, piece in zip(ATTENTION_PARTS, others.pop(name).chunk(3), strict=True):
                        split[f"encoder.layer.{match[1]}.attention.self.{part}.{match[2]}"] = piece
        case ModernEncoderSettings():
            if (projection := others.pop("project.weight", None)) is not None:
                words = others["embeddings.words.weight"]
                others["embeddings.words.weight"] = (words.double() @ projection.double().T).to(words.dtype)
    return split | renamed(others, FORMATS[settings.kind].encoder)


def encoder_from_transformers(settings: EncoderSettings, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The encoder of any class by our names, whatever head it has; a class without one stores no prefix. Names that have
    no place here (a pooler, position ids) are left out; missing ones show when the module loads."""
    form = FORMATS[settings.kind]
    body = {name.removeprefix(form.prefix): t for name, t in tensors.items() if name.startswith(form.prefix)}
    body = body or dict(tensors)
    ours = renamed_back(body, form.encoder)
    if isinstance(settings, ElectraEncoderSettings):
        for name in body:
            if match := re.fullmatch(r"encoder\.layer\.(\d+)\.attention\.self\.query\.(weight|bias)", name):
                parts = [body[name.replace(".query.", f".{part}.")] for part in ATTENTION_PARTS]
                ours[f"layers.{match[1]}.query_key_value.{match[2]}"] = torch.cat(parts)
    return ours


def rename(name: str, table: Mapping[str, str]) -> str | None:
    for before, after in table.items():
        pattern = re.escape(before).replace(r"\{n\}", r"(?P<n>\d+)").replace(r"\{p\}", r"(?P<p>weight|bias)")
        if match := re.fullmatch(pattern, name):
            return after.format(**match.groupdict())
    return None


def renamed(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """To transformers' names; every name must have one."""
    names = {rename(name, table): tensor for name, tensor in tensors.items()}
    assert None not in names and len(names) == len(tensors), f"no transformers name for one of {list(tensors)}"
    return {name: tensor for name, tensor in names.items() if name}


def renamed_back(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """To our names. What has no place here is left out; what is missing shows when the module loads."""
    inverse = {after: before for before, after in table.items()}
    return {ours: tensor for name, tensor in tensors.items() if (ours := rename(name, inverse))}
