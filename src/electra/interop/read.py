"""Reads folders in transformers' format: any ELECTRA or ModernBERT, pre-trained, without a head or fine-tuned. transformers is not
needed, and nothing in such a folder can name code: config.json goes through an allow-list of keys, weights are safetensors.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from electra.base.errors import CorruptError, DataError, ElectraError, first_line
from electra.base.files import read_object, refuse_edited, validation_text
from electra.data.tokenizer import adopt_vocabulary, load_tokenizer, vocabulary_size
from electra.interop.foreign import INDEX, WEIGHTS, described, folder_weights, open_safetensors, refuse_more_than_pieces
from electra.interop.formats import (
    FORMATS,
    NetworkKind,
    encoder_from_transformers,
    head_tensors,
    network_class,
    one_logit,
    settings_from_config,
)
from electra.model import (
    DetectionHead,
    Encoder,
    EncoderSettings,
    TokenHead,
    build_detection_head,
    build_token_head,
    encoder_alone,
)
from electra.model.electra import ElectraEncoderSettings
from electra.model.modern import ModernDetectionHead
from electra.train.checkpoint import require_floats

log = logging.getLogger(__name__)
OBJECTIVE, LENGTH = "pretraining_objective", "pretraining_length"
"""Our own keys in the config.json of an export: the objective, and the number of tokens in a pre-training row."""


@dataclass(frozen=True)
class Pretrained:
    """A network ready to use, with the tokenizer and the objective it was trained with. `length` is how many positions it
    was trained on; None if unknown."""

    encoder: Encoder
    head: DetectionHead | TokenHead | None
    kind: NetworkKind
    tokenizer: Tokenizer
    objective: str = "electra"
    length: int | None = None


def warn_beyond(settings: EncoderSettings, length: int | None, tokens: int) -> None:
    """Warns if `tokens` reach beyond the trained positions: rows of a position table that no pre-training row reached
    still have their initial values. Rotary positions have no table, so they need no warning."""
    if length is not None and tokens > length and isinstance(settings, ElectraEncoderSettings):
        say_untrained(length, settings.positions)


@lru_cache
def say_untrained(length: int, positions: int) -> None:
    """Warns only once per process, however many texts are too long."""
    log.warning(
        f"the network has {positions} positions and was pre-trained on rows of {length} tokens: positions beyond those were "
        f"never trained. Use texts of at most {length} tokens, or pre-train with a larger rows.length."
    )


@dataclass(frozen=True)
class Stored:
    """The content of a folder, before a network is built from it; `where` is the file of its weights."""

    folder: Path
    where: Path
    config: Mapping[str, Any]
    settings: EncoderSettings
    vocab_size: int
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer

    @property
    def length(self) -> int | None:
        return self.config.get(LENGTH)

    def build(self, head: nn.Module | None, architecture: str, described_by: str = "its config.json") -> Encoder:
        """The encoder with its weights; those of `head` are loaded into it. `described_by` names the source of the sizes in messages."""
        encoder = encoder_alone(self.settings, self.vocab_size)
        try:
            encoder.load_state_dict(encoder_from_transformers(self.settings, self.tensors))
            if head is not None:
                tensors = head_tensors(self.tensors, architecture)
                head.load_state_dict(one_logit(tensors) if isinstance(head, ModernDetectionHead) else tensors)
                head.eval()
        except KeyError as error:
            raise CorruptError(f"{self.where} has no {error}.") from None
        except RuntimeError as error:
            last = str(error).splitlines()[-1].strip()
            raise CorruptError(f"{self.where} does not fit {described_by}: {last}") from None
        return encoder.eval()


def read_folder(folder: Path) -> Stored:
    for names in (("config.json",), (WEIGHTS, INDEX), ("tokenizer.json", "vocab.txt")):
        if not any((folder / name).is_file() for name in names):
            what = f"is not a model folder: it has no {names[0]}"
            raise DataError(f'{folder} {what}. "electra export" writes such folders.')
    refuse_edited(folder)
    config = read_object(folder / "config.json")
    if not isinstance(config.get("model_type"), str) or config["model_type"] not in FORMATS:
        known = " or ".join(FORMATS)
        raise DataError(f"{folder} holds a model of type {config.get('model_type')!r}, not {known}.")
    vocab_size = checked_number(folder, config, "vocab_size")
    if config.get(LENGTH) is not None:
        checked_number(folder, config, LENGTH)
    if not isinstance(config.get(OBJECTIVE, ""), str):
        raise CorruptError(f"{folder / 'config.json'}: {OBJECTIVE} is {config[OBJECTIVE]!r}, not text.")
    settings = checked_settings(folder / "config.json", config)
    where = folder / (WEIGHTS if (folder / WEIGHTS).is_file() else INDEX)
    weights = open_safetensors(where) if where.name == WEIGHTS else folder_weights(folder)
    tensors = {name: weights.read(name) for name in weights.shapes}
    require_floats(where, tensors)
    refuse_other_shapes(where, settings, vocab_size, tensors)
    tokenizer = folder_tokenizer(folder)
    if (size := vocabulary_size(tokenizer)) > vocab_size:
        name = "tokenizer.json" if (folder / "tokenizer.json").is_file() else "vocab.txt"
        raise CorruptError(f"{folder / name} has the id {size - 1}, beyond the vocabulary of {vocab_size}.")
    return Stored(folder, where, config, settings, vocab_size, tensors, tokenizer)


def checked_settings(path: Path, config: Mapping[str, Any]) -> EncoderSettings:
    try:
        return settings_from_config(config)
    except ElectraError as error:
        raise type(error)(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = validation_text(error) if isinstance(error, ValidationError) else f"{type(error).__name__} {error}"
        raise CorruptError(f"{path} cannot be used: {reason}.") from None


def checked_number(folder: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorruptError(f"{folder / 'config.json'}: {key} is {value!r}, not a number of tokens.")
    return value


class SkipInit(TorchFunctionMode):
    """Skips the initialisation of weights. On the meta device it computes nothing, but imports torch's compiler: a second or two."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def refuse_other_shapes(where: Path, settings: EncoderSettings, vocab_size: int, tensors: Mapping[str, Tensor]) -> None:
    """Compares the shapes before a network is built: sizes in config.json cost nothing to write and may exceed any memory."""
    try:
        stored = encoder_from_transformers(settings, tensors)
    except KeyError as error:
        raise CorruptError(f"{where} has no {error}.") from None
    except (RuntimeError, IndexError) as error:  # from concatenating query, key and value
        raise CorruptError(f"{where} does not fit its config.json: {first_line(error)}.") from None
    words = stored.get("embeddings.words.weight")
    if words is not None and len(words) != vocab_size:
        raise CorruptError(f"config.json: vocab_size is {vocab_size}, {where} has {len(words)} words.")
    with torch.device("meta"), SkipInit():
        expected = encoder_alone(settings, vocab_size).state_dict()
    for name, tensor in expected.items():
        if name not in stored:
            raise CorruptError(f"{where} has no {name}, which config.json asks for.")
        if stored[name].shape != tensor.shape:
            shapes = f"{name} is {tuple(stored[name].shape)}, not {tuple(tensor.shape)}"
            raise CorruptError(f"{where} does not fit its config.json: {shapes}.")


def folder_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder. Older folders have BERT's vocab.txt, with the rest in tokenizer_config.json."""
    if (folder / "tokenizer.json").is_file():
        return load_tokenizer(folder)
    settings = described(folder, "tokenizer_config.json")
    lowercase, split_cjk = (settings.get(key) is not False for key in ("do_lower_case", "tokenize_chinese_chars"))
    strip = settings.get("strip_accents")
    vocabulary = folder / "vocab.txt"
    tokenizer = adopt_vocabulary(vocabulary, lowercase, strip if isinstance(strip, bool) else None, split_cjk)
    refuse_more_than_pieces(folder, tokenizer)
    return tokenizer


def read_network(folder: Path, kind: NetworkKind | None = None) -> Pretrained:
    """The network with the head of that kind, or, if `kind` is None, with the head that the folder has."""
    stored = read_folder(folder)
    if kind in (None, "discriminator") and (name := FORMATS[stored.settings.kind].detector):
        stored = read_folder(folder / name) if (folder / name).is_dir() else stored
    return build_network(stored, kind)


def build_network(stored: Stored, kind: NetworkKind | None = None) -> Pretrained:
    kinds: tuple[NetworkKind, ...] = ("discriminator", "generator", "encoder") if kind is None else (kind,)
    for wanted in kinds:
        head, architecture = empty_head(stored, wanted), network_class(stored.settings, wanted)
        names = head_tensors(stored.tensors, architecture).keys()
        has_head = head is None or head.state_dict().keys() <= names
        if has_head and (wanted != "discriminator" or says_discriminator(stored)):
            encoder, objective = stored.build(head, architecture), stored.config.get(OBJECTIVE, "electra")
            return Pretrained(encoder, head, wanted, stored.tokenizer, objective, stored.length)
    raise DataError(
        f"{stored.folder} holds no {kind}: its network has another head, or none. Give one that has it, or the run it came from."
    )


def empty_head(stored: Stored, kind: NetworkKind) -> DetectionHead | TokenHead | None:
    match kind:
        case "discriminator":
            return build_detection_head(stored.settings)
        case "generator":
            return build_token_head(stored.settings, stored.vocab_size)
        case "encoder":
            return None


def says_discriminator(stored: Stored) -> bool:
    """Whether config.json marks a discriminator. All ModernBERT classes with labels have a discriminator's tensors, so ours must
    have both marks, objective and labels: transformers keeps the first when it fine-tunes, and a regression target may have
    the name of our label. Older exports have one label, "replaced"."""
    labels = FORMATS[stored.settings.kind].discriminator_labels
    named = stored.config.get("id2label")
    names = tuple(named.values()) if isinstance(named, dict) else ()
    return not labels or (OBJECTIVE in stored.config and names in (labels, labels[1:]))
