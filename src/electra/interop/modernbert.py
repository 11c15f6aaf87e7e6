"""ModernBERT in transformers' words: config.json and tensor names, ours on the left.

An encoder whose word table is of another width than its layers has a projection that ModernBERT lacks. It goes into
the table: words * projection is a table of ModernBERT's width with the same states. Reading that back gives an encoder
without a projection. A token head on a table of another width has no such form (hf.has_form).
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from electra.base.batch import SpecialIds
from electra.base.errors import DataError
from electra.interop.names import renamed, renamed_back
from electra.model.modern import NORM_EPS, ModernBertSettings

CLASS, DISCRIMINATOR = "ModernBert", "ModernBertForTokenClassification"
DISCRIMINATOR_LABELS = {"0": "replaced"}
PREFIX = "model."
INPUTS = ("input_ids", "attention_mask")
KINDS = ("full_attention", "sliding_attention")
ENCODER = {
    "embeddings.words.{p}": "embeddings.tok_embeddings.{p}",
    "norm.{p}": "embeddings.norm.{p}",
    "layers.{n}.attention_norm.{p}": "layers.{n}.attn_norm.{p}",
    "layers.{n}.query_key_value.{p}": "layers.{n}.attn.Wqkv.{p}",
    "layers.{n}.attention_output.{p}": "layers.{n}.attn.Wo.{p}",
    "layers.{n}.feed_forward_norm.{p}": "layers.{n}.mlp_norm.{p}",
    "layers.{n}.expand.{p}": "layers.{n}.mlp.Wi.{p}",
    "layers.{n}.contract.{p}": "layers.{n}.mlp.Wo.{p}",
    "final_norm.{p}": "final_norm.{p}",
}
FIXED = {
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
LABELS = {
    "label.dense.{p}": "head.dense.{p}",
    "label.norm.{p}": "head.norm.{p}",
    "label.output.{p}": "classifier.{p}",
}
# By the class that reads them. A discriminator is a classifier of tokens with one label. The output matrix of a token
# head is the word table, which is stored once.
HEADS: dict[str, dict[str, str]] = {
    "ModernBertModel": {},
    "ModernBertForMaskedLM": {
        "dense.{p}": "head.dense.{p}",
        "norm.{p}": "head.norm.{p}",
        "bias": "decoder.bias",
    },
    DISCRIMINATOR: LABELS,
    "ModernBertForSequenceClassification": LABELS,
    "ModernBertForQuestionAnswering": LABELS,
}


def config_json(
    settings: ModernBertSettings, vocab_size: int, special: SpecialIds, architecture: str
) -> dict[str, Any]:
    """The layers' kinds and angles in the words of transformers 5, and in those of transformers 4 and other readers."""
    angles = {"full_attention": settings.global_theta, "sliding_attention": settings.local_theta}
    kinds = [
        "sliding_attention" if settings.is_local(n) else "full_attention" for n in range(settings.layers)
    ]
    config = {
        "architectures": [architecture],
        "model_type": "modernbert",
        "vocab_size": vocab_size,
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "intermediate_size": settings.intermediate,
        "max_position_embeddings": settings.positions,
        "layer_types": kinds,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in angles.items()
        },
        "global_attn_every_n_layers": settings.global_every,
        "global_rope_theta": settings.global_theta,
        "local_rope_theta": settings.local_theta,
        "local_attention": settings.window,
        "embedding_dropout": settings.dropout,
        "mlp_dropout": settings.dropout,
        "attention_dropout": settings.attention_dropout,
        "initializer_range": 0.02,
        "pad_token_id": special.pad,
        "cls_token_id": special.cls,
        "sep_token_id": special.sep,
        "bos_token_id": special.cls,
        "eos_token_id": special.sep,
        "classifier_pooling": "cls",
        "classifier_dropout": settings.dropout,
        "dtype": "float32",
    } | FIXED
    one_label = {"id2label": DISCRIMINATOR_LABELS, "label2id": {"replaced": 0}}
    return config | one_label if architecture == DISCRIMINATOR else config


def settings_from_config(config: Mapping[str, Any]) -> ModernBertSettings:
    """Through an allow-list of keys; what we have no place for is refused rather than dropped.

    One dropout is read, `mlp_dropout`: an `embedding_dropout` or `classifier_dropout` of another value is not kept. An odd
    `local_attention` reaches as far as the even number below it, which is what we have. `local_rope_theta` of null means
    `global_rope_theta` in transformers 4."""
    other = [f"{key}={config[key]}" for key, value in FIXED.items() if config.get(key, value) != value]
    angles = config.get("rope_parameters") or {}
    if any(key not in KINDS and (key, value) != ("rope_type", "default") for key, value in angles.items()):
        other.append(f"rope_parameters={angles}")
    if scaling := config.get("rope_scaling"):
        other.append(f"rope_scaling={scaling}")
    if other:
        raise DataError(f"ModernBERT with {', '.join(other)} is not supported.")
    layers = config["num_hidden_layers"]
    every = config.get("global_attn_every_n_layers", 3)
    if kinds := config.get("layer_types"):
        whole = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
        every = whole[1] if len(whole) > 1 else layers
        if whole != list(range(0, layers, every)):
            raise DataError(
                f"layers {whole} attend to whole rows: only every n-th, the first included, can here."
            )
    global_theta = theta(angles, "full_attention", config.get("global_rope_theta", 160_000.0))
    local_theta = config.get("local_rope_theta", 10_000.0)
    return ModernBertSettings(
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


def encoder_to_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    whole = dict(tensors)
    if (projection := whole.pop("project.weight", None)) is not None:
        words = whole["embeddings.words.weight"]
        whole["embeddings.words.weight"] = (words.double() @ projection.double().T).to(words.dtype)
    return renamed(whole, ENCODER)


def encoder_from_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return renamed_back(tensors, ENCODER)
