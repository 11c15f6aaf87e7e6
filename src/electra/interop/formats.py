"""ELECTRA and ModernBERT in transformers' format: a table of tensor names (ours, transformers', Google's), and conversions of
config.json and tensors in both directions.

In patterns of names, `{n}` is the layer and `{p}` weight or bias. Google's TensorFlow 1 checkpoints call the weight of a linear layer
`kernel`, stored transposed, and those of a norm `gamma` and `beta`: `{dense}` and `{norm}`. BERT and RoBERTa have the names of
ELECTRA's encoder with a prefix of their own; only their token heads are listed here.

Two things do not map one to one. Our queries, keys and values are one matrix; transformers' ELECTRA has three. And an encoder whose word
table has another width than its layers has a projection, which ModernBERT lacks. It is multiplied into the table: words * projection is
a table of ModernBERT's width that gives the same states, and a tied token head is a head on that table. Reading it back gives an encoder
without a projection. A narrow token head on a table of another width has no such form (`has_form`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from electra.base.batch import SpecialIds
from electra.base.errors import DataError
from electra.model import Encoder, EncoderSettings
from electra.model.electra import TYPES, ElectraEncoderSettings
from electra.model.heads import Pooling
from electra.model.modern import NORM_EPS, ModernDetectionHead, ModernEncoderSettings

ATTENTION_PARTS = ("query", "key", "value")
_PATTERNS = {"n": r"\d{1,4}", "p": "weight|bias", "dense": "kernel|bias", "norm": "gamma|beta"}
_GOOGLE_PARTS = {"kernel": "weight", "gamma": "weight", "bias": "bias", "beta": "bias"}


class Name(NamedTuple):
    """The names of one tensor; Google's is "" if it has no such tensor."""

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
"""By the transformers class that reads them. The output matrix of a token head is the word table, which is stored once."""


def our_names(names: Iterable[Name]) -> dict[str, str]:
    """Ours -> transformers'."""
    return {name.ours: name.transformers for name in names}


def rename(name: str, table: Mapping[str, str]) -> str | None:
    for before, after in table.items():
        if (parts := placeholders(name, before)) is not None:
            return after.format(**parts)
    return None


def placeholders(name: str, pattern: str) -> dict[str, str] | None:
    """The values of a pattern's placeholders in a name; None if the name does not match."""
    expression = re.escape(pattern)
    for key, values in _PATTERNS.items():
        expression = expression.replace(rf"\{{{key}\}}", f"(?P<{key}>{values})")
    match = re.fullmatch(expression, name)
    return match.groupdict() if match else None


def has_name(tensor: str, names: Iterable[Name]) -> bool:
    """Whether `tensor` is transformers' name of one of them."""
    return any(placeholders(tensor, name.transformers) is not None for name in names)


def from_google(name: str, names: Iterable[Name]) -> tuple[str, bool] | None:
    """transformers' name of a tensor of Google's, and whether it is stored transposed."""
    for _, theirs, pattern in names:
        parts = placeholders(name, pattern) if pattern else None
        if parts is not None:
            part = parts.get("dense") or parts.get("norm") or ""
            return theirs.format(**parts, p=_GOOGLE_PARTS.get(part, "")), part == "kernel"
    return None


def renamed(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors under transformers' names; every name must have one."""
    names = {name: rename(name, table) for name in tensors}
    assert None not in names.values(), f"no transformers name for one of {list(tensors)}"
    return {str(names[name]): tensor for name, tensor in tensors.items()}


def renamed_back(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors under our names. Unknown names are left out; missing ones raise an error when the module loads them."""
    inverse = {after: before for before, after in table.items()}
    return {ours: tensor for name, tensor in tensors.items() if (ours := rename(name, inverse))}


# Encoders

NetworkKind = Literal["discriminator", "generator", "encoder"]
OWN_HEAD = "head."
"""Prefix of the tensor names of a head that no transformers class has."""
DETECTOR_OUTPUTS = ("label.output.weight", "label.output.bias")
SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "positions": "max_position_embeddings",
}
ANGLES = {"full_attention": "global_theta", "sliding_attention": "local_theta"}


@dataclass(frozen=True)
class ModelFormat:
    """How transformers stores one kind of encoder."""

    title: str
    family: str
    """The beginning of its class names."""
    discriminator: str
    """The class that reads a discriminator."""
    prefix: str
    """The prefix of the encoder's tensor names in a class with a head."""
    inputs: tuple[str, ...]
    encoder: Mapping[str, str]
    options: Mapping[str, str]
    """Names in config.json of our settings other than SIZES; one that is missing there has the same default in both."""
    fixed: Mapping[str, Any]
    """Values that config.json must have if it names the key, because we compute nothing else."""
    discriminator_labels: tuple[str, ...] = ()
    """The names of the discriminator's two outputs; empty if it has one logit, which needs none."""
    detector: str = ""
    """The folder beside the encoder's files that holds the discriminator with its head; "" if the encoder's own folder
    does. Other transformers classes ignore ELECTRA's head, but would take ModernBERT's for their own."""


FORMATS = {
    "electra": ModelFormat(
        title="ELECTRA",
        family="Electra",
        discriminator="ElectraForPreTraining",
        prefix="electra.",
        inputs=("input_ids", "token_type_ids", "attention_mask"),
        encoder=our_names(ELECTRA_ENCODER),
        options={
            "embedding": "embedding_size",
            "dropout": "hidden_dropout_prob",
            "attention_dropout": "attention_probs_dropout_prob",
            "norm_eps": "layer_norm_eps",
        },
        fixed={"hidden_act": "gelu"},
    ),
    "modernbert": ModelFormat(
        title="ModernBERT",
        family="ModernBert",
        discriminator="ModernBertForTokenClassification",
        discriminator_labels=("original", "replaced"),
        detector="detector",
        prefix="model.",
        inputs=("input_ids", "attention_mask"),
        encoder=our_names(MODERNBERT_ENCODER),
        options={
            "dropout": "mlp_dropout",
            "attention_dropout": "attention_dropout",
            "window": "local_attention",
            "global_every": "global_attn_every_n_layers",
            "global_theta": "global_rope_theta",
            "local_theta": "local_rope_theta",
        },
        fixed={
            "hidden_activation": "gelu",
            "classifier_activation": "gelu",
            "norm_eps": NORM_EPS,
            "norm_bias": False,
            "attention_bias": False,
            "mlp_bias": False,
            "classifier_bias": False,
            "decoder_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


def network_class(settings: EncoderSettings, kind: NetworkKind) -> str:
    """The transformers class that reads a network of this kind."""
    form = FORMATS[settings.kind]
    bodies = {"generator": f"{form.family}ForMaskedLM", "encoder": f"{form.family}Model"}
    return form.discriminator if kind == "discriminator" else bodies[kind]


def has_form(settings: EncoderSettings, kind: NetworkKind) -> bool:
    """Whether transformers has a class for it: ModernBERT's token head is as wide as its layers, so a narrow one, for words of
    another width, does not fit."""
    return (
        kind != "generator"
        or settings.kind == "electra"
        or (settings.token_head == "tied" or settings.embedding == settings.hidden)
    )


def task_class(settings: EncoderSettings, suffix: str, pooling: Pooling) -> str:
    """The transformers class with the task head of that `suffix`; "" if there is none, as for an ELECTRA classifier that does
    not read [CLS]."""
    is_known = suffix and (pooling == "cls" or settings.kind == "modernbert")
    return f"{FORMATS[settings.kind].family}{suffix}" if is_known else ""


# config.json


def config_json(
    settings: EncoderSettings, vocab_size: int, special: SpecialIds, architecture: str, pooling: Pooling = "cls"
) -> dict[str, Any]:
    form = FORMATS[settings.kind]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": settings.kind,
        "vocab_size": vocab_size,
        "initializer_range": 0.02,
        "pad_token_id": special.pad,
        "dtype": "float32",
        "tie_word_embeddings": True,
        **{theirs: getattr(settings, ours) for ours, theirs in {**SIZES, **form.options}.items()},
        **form.fixed,
    }
    match settings:
        case ElectraEncoderSettings():
            config["type_vocab_size"] = TYPES
        case ModernEncoderSettings():
            # layer types and rotary angles under the keys of transformers 5; `form.options` has those of transformers 4
            is_local = map(settings.is_local, range(settings.layers))
            angles = {kind: getattr(settings, ours) for kind, ours in ANGLES.items()}
            config |= {
                "layer_types": ["sliding_attention" if local else "full_attention" for local in is_local],
                "rope_parameters": {kind: {"rope_type": "default", "rope_theta": it} for kind, it in angles.items()},
                "embedding_dropout": settings.dropout,
                "classifier_dropout": settings.dropout,
                "classifier_pooling": pooling,
                "cls_token_id": special.cls,
                "sep_token_id": special.sep,
                "bos_token_id": special.cls,
                "eos_token_id": special.sep,
            }
    if form.discriminator_labels and architecture == form.discriminator:
        labels = {name: number for number, name in enumerate(form.discriminator_labels)}
        config |= {"id2label": {str(number): name for name, number in labels.items()}, "label2id": labels}
    return config


ENCODER_ONLY = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
"""What any config.json of the older families may say that makes it another network of the same tensors, or of more."""


def settings_from_config(config: Mapping[str, Any]) -> EncoderSettings:
    """The settings of a config.json, through an allow-list of keys; options that we lack are refused rather than ignored."""
    form = FORMATS[config["model_type"]]
    only = {**form.fixed, **ENCODER_ONLY}
    other = [f"{key}={config[key]}" for key, value in only.items() if config.get(key, value) != value]
    angles = config.get("rope_parameters") or {}
    if not all(is_known_angle(*item) for item in angles.items()):
        other.append(f"rope_parameters={angles}")
    if scaling := config.get("rope_scaling"):
        other.append(f"rope_scaling={scaling}")
    if other:
        raise DataError(
            f"{form.title} with {', '.join(other)} is not supported: loaded here it would be a different network. Its tokenizer can be used for "
            "a new one."
        )
    values = {ours: config[theirs] for ours, theirs in SIZES.items()}
    values |= {ours: config[theirs] for ours, theirs in form.options.items() if theirs in config}
    if config["model_type"] == "electra":
        return ElectraEncoderSettings(**values)
    return modernbert_settings(values, angles, config.get("layer_types"))


def is_known_angle(key: str, entry: Any) -> bool:
    """Whether an item of rope_parameters is supported: it has an entry per layer type, and perhaps a type that all layers share."""
    kind = (entry or {}).get("rope_type", "default") if key in ANGLES else entry
    return (key in ANGLES or key == "rope_type") and kind == "default"


def modernbert_settings(
    values: dict[str, Any], angles: Mapping[str, Any], layer_types: Sequence[str] | None
) -> ModernEncoderSettings:
    """ModernBERT's settings. Besides `attention_dropout` only `mlp_dropout` is read: other values of `embedding_dropout` and
    `classifier_dropout` are lost. An odd `local_attention` reaches as far as the even number below it, which we use.
    `local_rope_theta` of null means `global_rope_theta` in transformers 4."""
    values |= {"embedding": values["hidden"], "window": values.get("window", 128) // 2 * 2}
    values |= {ours: angles[it]["rope_theta"] for it, ours in ANGLES.items() if "rope_theta" in (angles.get(it) or {})}
    if values.get("local_theta", 0) is None:
        values["local_theta"] = values.get("global_theta", 160_000.0)
    if layer_types:
        whole = [number for number, kind in enumerate(layer_types) if kind == "full_attention"]
        every = values["global_every"] = whole[1] - whole[0] if len(whole) > 1 else values["layers"]
        values["global_from"] = "first" if whole[:1] == [0] else "last"
        first = 0 if whole[:1] == [0] else (values["layers"] - 1) % every
        if whole != list(range(first, values["layers"], every)):
            which = "only every n-th, the first or the last included, can here"
            raise DataError(f"layers {whole} attend to whole rows: {which}.")
    return ModernEncoderSettings(**values)


# Tensors


def own_tensors(encoder: Encoder) -> dict[str, Tensor]:
    """The encoder's tensors by our names. A word table that is a sum (gradient-disentangled sharing) is added up."""
    tensors = encoder.state_dict() | {"embeddings.words.weight": encoder.embeddings.table.detach()}
    tensors.pop("embeddings.delta", None)
    return tensors


def network_tensors(encoder: Encoder, head: nn.Module | None, architecture: str) -> dict[str, Tensor]:
    """The tensors of a network by transformers' names; with `architecture` "" (no class has such a head) the head keeps ours. The one
    logit of ModernBERT's detector becomes two, for a softmax that gives its probabilities: the logit of "original" is 0."""
    form = FORMATS[encoder.settings.kind]
    body = encoder_to_transformers(encoder.settings, own_tensors(encoder))
    if head is None:
        return body
    top = head.state_dict()
    if isinstance(head, ModernDetectionHead):
        top |= {name: torch.cat((torch.zeros_like(top[name]), top[name])) for name in DETECTOR_OUTPUTS}
    top = renamed(top, our_names(HEADS[architecture])) if architecture else {f"{OWN_HEAD}{it}": top[it] for it in top}
    return {f"{form.prefix}{name}": tensor for name, tensor in body.items()} | top


def head_tensors(tensors: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """The head's tensors, back under our names."""
    if architecture:
        return renamed_back(tensors, our_names(HEADS[architecture]))
    return {name.removeprefix(OWN_HEAD): tensor for name, tensor in tensors.items() if name.startswith(OWN_HEAD)}


def one_logit(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A detector's head with one logit, the difference of its two; older exports have one already."""
    outputs = {name: tensors[name] for name in DETECTOR_OUTPUTS if len(tensors[name]) == 2}
    return {**tensors, **{name: tensor[1:] - tensor[:1] for name, tensor in outputs.items()}}


def encoder_to_transformers(settings: EncoderSettings, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    others = dict(tensors)
    match settings:
        case ElectraEncoderSettings():
            for name in [name for name in tensors if ".query_key_value." in name]:
                pieces = zip(ATTENTION_PARTS, others.pop(name).chunk(3), strict=True)
                others |= {name.replace("query_key_value", part): piece for part, piece in pieces}
        case ModernEncoderSettings():
            if (projection := others.pop("project.weight", None)) is not None:
                words = others["embeddings.words.weight"]
                others["embeddings.words.weight"] = (words.double() @ projection.double().T).to(words.dtype)
    return renamed(others, FORMATS[settings.kind].encoder)


def encoder_from_transformers(settings: EncoderSettings, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The encoder's tensors of any class by our names, whatever head it has; a class without a head stores no prefix. Unknown
    names (a pooler, position ids) are left out; missing ones raise an error when the module loads them."""
    form = FORMATS[settings.kind]
    body = {name.removeprefix(form.prefix): t for name, t in tensors.items() if name.startswith(form.prefix)}
    ours = renamed_back(body or tensors, form.encoder)
    for name in [name for name in ours if ".query." in name]:
        parts = [ours.pop(name.replace(".query.", f".{part}.")) for part in ATTENTION_PARTS]
        ours[name.replace(".query.", ".query_key_value.")] = torch.cat(parts)
    return ours
