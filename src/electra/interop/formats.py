"""ELECTRA and ModernBERT in transformers' words: one table of tensor names (ours, transformers', Google's), config.json and tensors,
ours <-> theirs.

Patterns of names: `{n}` is the layer and `{p}` weight or bias. Google's checkpoints of TensorFlow 1 call the weight of a product
`kernel`, stored the other way round, and those of a norm `gamma` and `beta`: `{dense}` and `{norm}`. BERT and RoBERTa have the names of
ELECTRA's encoder behind a prefix of their own; what is named here beside it are their token heads.

Two things are not one to one. Our queries, keys and values are one matrix; transformers' ELECTRA has three. And an encoder whose word
table is of another width than its layers has a projection that ModernBERT lacks; it goes into the table: words * projection is a table
of ModernBERT's width with the same states, and a tied token head is one on that table. Reading that back gives an encoder without a
projection. A narrow token head on a table of another width has no such form (`has_form`).
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


def has_name(tensor: str, names: Iterable[Name]) -> bool:
    """Whether transformers calls one of them so."""
    return any(placeholders(tensor, name.transformers) is not None for name in names)


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


# Encoders

NetworkKind = Literal["discriminator", "generator", "encoder"]
OWN_HEAD = "head."
"""Before the names of a head that no class of transformers has."""
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
    """How transformers writes one kind of encoder."""

    title: str
    family: str
    """What the names of its classes begin with."""
    discriminator: str
    """The class that reads one."""
    prefix: str
    """Before the encoder's names in a class with a head."""
    inputs: tuple[str, ...]
    encoder: Mapping[str, str]
    options: Mapping[str, str]
    """Our settings in config.json beside the SIZES; one that is left out has the same default here and there."""
    fixed: Mapping[str, Any]
    """What config.json may not say otherwise, because we compute nothing else."""
    discriminator_labels: tuple[str, ...] = ()
    """The names of its two outputs; empty where it has one logit, which needs none."""
    detector: str = ""
    """The folder beside the encoder's files that holds a discriminator with its head; "" where the encoder's own folder
    does. Every other class of transformers drops ELECTRA's head, but would take ModernBERT's for its own."""


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
    """The class of transformers that reads it."""
    form = FORMATS[settings.kind]
    bodies = {"generator": f"{form.family}ForMaskedLM", "encoder": f"{form.family}Model"}
    return form.discriminator if kind == "discriminator" else bodies[kind]


def has_form(settings: EncoderSettings, kind: NetworkKind) -> bool:
    """Whether transformers has a class for it: ModernBERT's token head is as wide as its layers, and one as wide as words of
    another width has no place there."""
    return (
        kind != "generator"
        or settings.kind == "electra"
        or (settings.token_head == "tied" or settings.embedding == settings.hidden)
    )


def task_class(settings: EncoderSettings, suffix: str, pooling: Pooling) -> str:
    """The class of transformers with the task head of that `suffix`, "" where none has it: ELECTRA's classifier reads [CLS]
    alone."""
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
            # layers' types and angles in the words of transformers 5; the options have those of transformers 4
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


def settings_from_config(config: Mapping[str, Any]) -> EncoderSettings:
    """Through an allow-list of keys; what we have no place for is refused rather than dropped."""
    form = FORMATS[config["model_type"]]
    other = [f"{key}={config[key]}" for key, value in form.fixed.items() if config.get(key, value) != value]
    angles = config.get("rope_parameters") or {}
    if not all(is_known_angle(*item) for item in angles.items()):
        other.append(f"rope_parameters={angles}")
    if scaling := config.get("rope_scaling"):
        other.append(f"rope_scaling={scaling}")
    if other:
        raise DataError(
            f"{form.title} with {', '.join(other)} is not supported: read as ours it would be another network. Its tokenizer can be used for "
            "a new one."
        )
    values = {ours: config[theirs] for ours, theirs in SIZES.items()}
    values |= {ours: config[theirs] for ours, theirs in form.options.items() if theirs in config}
    if config["model_type"] == "electra":
        return ElectraEncoderSettings(**values)
    return modernbert_settings(values, angles, config.get("layer_types"))


def is_known_angle(key: str, entry: Any) -> bool:
    """Transformers' rope_parameters have an entry for each type of layer, and perhaps a type that all of them share."""
    kind = (entry or {}).get("rope_type", "default") if key in ANGLES else entry
    return (key in ANGLES or key == "rope_type") and kind == "default"


def modernbert_settings(
    values: dict[str, Any], angles: Mapping[str, Any], layer_types: Sequence[str] | None
) -> ModernEncoderSettings:
    """One dropout is read, `mlp_dropout`: an `embedding_dropout` or `classifier_dropout` of another value is not kept. An odd
    `local_attention` reaches as far as the even number below it, which is what we have. `local_rope_theta` of null means
    `global_rope_theta` in transformers 4."""
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
    """By our names. A word table that is a sum (gradient-disentangled sharing) is given as what it adds up to."""
    tensors = encoder.state_dict() | {"embeddings.words.weight": encoder.embeddings.table.detach()}
    tensors.pop("embeddings.delta", None)
    return tensors


def network_tensors(encoder: Encoder, head: nn.Module | None, architecture: str) -> dict[str, Tensor]:
    """By transformers' names. A head that no class there has ("") keeps its own. The logit of a detector becomes two, so that
    a softmax over them gives its probabilities: that of "original" is 0."""
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
    """Back to our names."""
    if architecture:
        return renamed_back(tensors, our_names(HEADS[architecture]))
    return {name.removeprefix(OWN_HEAD): tensor for name, tensor in tensors.items() if name.startswith(OWN_HEAD)}


def one_logit(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A detector's head with the one logit that its two differ by; older exports have one."""
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
    """The encoder of any class by our names, whatever head it has; a class without one stores no prefix. Names that have
    no place here (a pooler, position ids) are left out; missing ones show when the module loads."""
    form = FORMATS[settings.kind]
    body = {name.removeprefix(form.prefix): t for name, t in tensors.items() if name.startswith(form.prefix)}
    ours = renamed_back(body or tensors, form.encoder)
    for name in [name for name in ours if ".query." in name]:
        parts = [ours.pop(name.replace(".query.", f".{part}.")) for part in ATTENTION_PARTS]
        ours[name.replace(".query.", ".query_key_value.")] = torch.cat(parts)
    return ours
