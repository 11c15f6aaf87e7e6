"""Classifiers that somebody else fine-tuned with transformers: save_pretrained folders of ELECTRA and ModernBERT with a head for rows,
tokens or answers. What task.json says of ours is taken from config.json: labels and their order, the kind of problem, the pooling."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from electra.base import config
from electra.base.errors import DataError, SettingsError
from electra.base.files import read_object
from electra.finetuning import TaskSettings
from electra.finetuning.classification import PROBLEM_TYPES, ClassificationSettings
from electra.finetuning.folder import TaskModel, architecture
from electra.finetuning.plan import MethodSettings
from electra.finetuning.questions import SpanSettings
from electra.finetuning.tagging import Scheme, TaggingSettings, fits
from electra.finetuning.training import Finetuned
from electra.interop.formats import FORMATS, head_tensors
from electra.interop.read import Stored, read_folder, says_discriminator
from electra.model import readable_length

LONGEST_ROW = 512
"""Tokens of a row, unless the tokenizer's settings say fewer. More would be of no use to most, and costs memory."""
SCHEMES: tuple[Scheme, ...] = ("iob2", "bioes")
CLASSES = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def is_classifier(folder: Path) -> bool:
    """Whether its config.json names a class with a head for labels or answers; a ModernBERT that detects names one too."""
    path = folder / "config.json"
    return path.is_file() and class_name(read_object(path)).endswith(CLASSES)


def class_name(content: Mapping[str, Any]) -> str:
    named = content.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def adopt_classifier(folder: Path, columns: Mapping[str, Any]) -> TaskModel:
    """`columns` say how many texts a row has, which nobody else does: one, unless two are named."""
    stored = read_folder(folder)
    name = class_name(stored.config)
    suffix = name.removeprefix(FORMATS[stored.settings.kind].family)
    if suffix not in CLASSES or (FORMATS[stored.settings.kind].discriminator == name and says_discriminator(stored)):
        listed = ", ".join(f"{FORMATS[stored.settings.kind].family}{it}" for it in CLASSES)
        raise DataError(
            f"{folder} holds no fine-tuned model: neither task.json, which electra finetune writes, nor one of {listed} "
            f"(its config.json says {name or 'nothing'})."
        )
    length = readable_length(stored.settings, longest(folder))
    tree = {"length": length, **adopted_settings(stored, name, suffix, columns)}
    if suffix == "ForQuestionAnswering":
        tree["max_query_length"] = min(64, length // 4)
    kinds: dict[str, type[TaskSettings]] = dict(
        zip(CLASSES, (ClassificationSettings, TaggingSettings, SpanSettings), strict=True)
    )
    try:
        settings = config.validate(kinds[suffix], tree)
    except SettingsError as error:
        raise DataError(f"{folder / 'config.json'}: its labels cannot be used ({error}).") from None
    task = settings.build(stored.tokenizer, settings.length, {})
    head = task.head(stored.settings)
    encoder = stored.build(head, architecture(stored.settings, task))
    note = {"model": str(folder)}
    return TaskModel(Finetuned(encoder, head).eval(), task, MethodSettings(), stored.tokenizer, note, stored.length)


def longest(folder: Path) -> int:
    path = folder / "tokenizer_config.json"
    said = read_object(path).get("model_max_length") if path.is_file() else None
    return min(LONGEST_ROW, said) if isinstance(said, int) and said >= 8 else LONGEST_ROW


def adopted_settings(stored: Stored, name: str, suffix: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    if suffix == "ForQuestionAnswering":
        return {}
    outputs = len(head_tensors(stored.settings, stored.tensors, name).get("label.output.weight", ()))
    labels = labels_of(stored.config, outputs)
    if suffix == "ForTokenClassification":
        scheme = next((it for it in SCHEMES if all(fits(label, it) for label in labels)), "none")
        return {"labels": labels, "scheme": scheme}
    kind = {theirs: ours for ours, theirs in PROBLEM_TYPES.items()}.get(str(stored.config.get("problem_type")))
    kind = kind or ("regression" if outputs == 1 else "classification")
    pooling = stored.config.get("classifier_pooling", "cls") if stored.settings.kind == "modernbert" else "cls"
    return {
        "kind": kind,
        "text": columns.get("text", ("text",)),
        "labels": () if kind == "regression" else labels,
        "pooling": pooling,
    }


def labels_of(content: Mapping[str, Any], outputs: int) -> tuple[str, ...]:
    """In the order of the outputs. transformers writes none where they are LABEL_0 and LABEL_1."""
    named = content.get("id2label")
    if not isinstance(named, dict):
        return tuple(f"LABEL_{number}" for number in range(outputs))
    if set(named) != {str(number) for number in range(outputs)}:
        raise DataError(f"config.json names {len(named)} labels (id2label), the head has {outputs} outputs.")
    return tuple(str(named[str(number)]) for number in range(outputs))
