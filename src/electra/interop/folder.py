"""Folders in transformers' format: which encoders have one, and reading settings, tensors and tokenizer from them. No
transformers needed."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.base.errors import CorruptError, DataError, ElectraError
from electra.data.tokenizer import adopt_vocabulary, load_tokenizer
from electra.interop import electra, modernbert, names
from electra.model.encoders import AnyEncoder, AnySettings

WEIGHTS = "model.safetensors"
FORMATS: dict[str, ModuleType] = {"electra": electra, "modernbert": modernbert}


def read_folder(folder: Path) -> tuple[AnySettings, int, dict[str, Tensor], Tokenizer]:
    """config.json through an allow-list of keys (nothing in it can name code), weights from safetensors only."""
    vocabulary = folder / "vocab.txt"
    for name in ("config.json", WEIGHTS, "tokenizer.json"):
        if not (folder / name).is_file() and not (name == "tokenizer.json" and vocabulary.is_file()):
            raise DataError(
                f'{folder} is not a model folder: it has no {name}. "electra export" writes such folders.'
            )
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_bytes())
        if config.get("model_type") not in FORMATS:
            known = " or ".join(FORMATS)
            raise DataError(f"{folder} holds a model of type {config.get('model_type')!r}, not {known}.")
        settings = FORMATS[config["model_type"]].settings_from_config(config)
        tensors = load_file(folder / WEIGHTS)
        return settings, config["vocab_size"], tensors, folder_tokenizer(folder)
    except ElectraError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CorruptError(f"{folder} cannot be read: {str(error).splitlines()[0]}.") from None


def folder_tokenizer(folder: Path) -> Tokenizer:
    """Older folders have BERT's vocab.txt and say the rest in tokenizer_config.json."""
    if (folder / "tokenizer.json").is_file():
        return load_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    said = json.loads(path.read_bytes()) if path.is_file() else {}
    return adopt_vocabulary(
        folder / "vocab.txt",
        said.get("do_lower_case", True),
        said.get("strip_accents"),
        said.get("tokenize_chinese_chars", True),
    )


def network_tensors(encoder: AnyEncoder, head: nn.Module | None, architecture: str) -> dict[str, Tensor]:
    """By transformers' names. A head that no class there has ("") keeps its own."""
    form = FORMATS[encoder.settings.kind]
    body = form.encoder_to_transformers(names.encoder_tensors(encoder))
    top = {} if head is None else head.state_dict()
    if architecture:
        top = names.renamed(top, form.HEADS[architecture])
    else:
        top = {f"{names.OWN_HEAD}{name}": tensor for name, tensor in top.items()}
    prefix = "" if head is None else form.PREFIX
    return {f"{prefix}{name}": tensor for name, tensor in body.items()} | top


def encoder_tensors(folder: Path, settings: AnySettings, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The encoder of any class by our names, whatever head it has; a class without one stores no prefix."""
    form = FORMATS[settings.kind]
    body = {name.removeprefix(form.PREFIX): t for name, t in tensors.items() if name.startswith(form.PREFIX)}
    try:
        return form.encoder_from_transformers(body or tensors)
    except KeyError as error:
        raise CorruptError(f"{folder}/{WEIGHTS} has no {error}.") from None


def head_tensors(
    settings: AnySettings, tensors: Mapping[str, Tensor], architecture: str
) -> dict[str, Tensor]:
    if architecture:
        return names.renamed_back(tensors, FORMATS[settings.kind].HEADS[architecture])
    own = names.OWN_HEAD
    return {name.removeprefix(own): tensor for name, tensor in tensors.items() if name.startswith(own)}
