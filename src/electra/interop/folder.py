"""Reading folders in transformers' format: settings, tensors, tokenizer. No transformers needed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from electra.data.tokenizer import adopt_vocabulary, load_tokenizer
from electra.errors import CorruptError, DataError, ElectraError
from electra.interop import names
from electra.model.encoder import EncoderSettings

WEIGHTS = "model.safetensors"


def read_folder(folder: Path) -> tuple[EncoderSettings, int, dict[str, Tensor], Tokenizer]:
    """config.json through an allow-list of keys (nothing in it can name code), weights from safetensors only."""
    vocabulary = folder / "vocab.txt"
    for name in ("config.json", WEIGHTS, "tokenizer.json"):
        if not (folder / name).is_file() and not (name == "tokenizer.json" and vocabulary.is_file()):
            raise DataError(
                f'{folder} is not a model folder: it has no {name}. "electra export" writes such folders.'
            )
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_bytes())
        if config.get("model_type") != "electra":
            raise DataError(f"{folder} holds a model of type {config.get('model_type')!r}, not electra.")
        if config.get("hidden_act", "gelu") != "gelu":
            raise DataError(f"{folder} has hidden_act {config['hidden_act']!r}; only gelu is read.")
        settings = EncoderSettings(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            intermediate=config["intermediate_size"],
            embedding=config["embedding_size"],
            positions=config["max_position_embeddings"],
            dropout=config.get("hidden_dropout_prob", 0.1),
            attention_dropout=config.get("attention_probs_dropout_prob", 0.1),
        )
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


def encoder_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The encoder of any ELECTRA class by our names, whatever head it has; ElectraModel stores no prefix."""
    body = {name.removeprefix("electra."): t for name, t in tensors.items() if name.startswith("electra.")}
    try:
        return names.encoder_from_transformers(body or tensors)
    except KeyError as error:
        raise CorruptError(f"{folder}/{WEIGHTS} has no {error}.") from None
