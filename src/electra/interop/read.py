"""Reading folders in transformers' format: anybody's ELECTRA or ModernBERT, pre-trained, bare or fine-tuned. No transformers
needed, and nothing in such a folder can name code: config.json goes through an allow-list of keys, weights are safetensors.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.base.errors import CorruptError, DataError, ElectraError
from electra.data.tokenizer import adopt_vocabulary, load_tokenizer
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

log = logging.getLogger(__name__)
WEIGHTS = "model.safetensors"
OBJECTIVE, LENGTH = "pretraining_objective", "pretraining_length"
"""What an export says in config.json beyond transformers' keys: the objective, and the tokens of a pre-training row."""


@dataclass(frozen=True)
class Pretrained:
    """A network ready to use, with the tokenizer and the objective it was trained with. `length` is how many positions it
    was trained on; None where nobody said."""

    encoder: Encoder
    head: DetectionHead | TokenHead | None
    kind: NetworkKind
    tokenizer: Tokenizer
    objective: str = "electra"
    length: int | None = None


def warn_beyond(settings: EncoderSettings, length: int | None, tokens: int) -> None:
    """A learned table of positions has rows that no pre-training row reached: their values are those of the first
    initialisation. Rotary positions have no table, so there is nothing to say of them."""
    if length is not None and tokens > length and isinstance(settings, ElectraEncoderSettings):
        say_untrained(length, settings.positions)


@lru_cache
def say_untrained(length: int, positions: int) -> None:
    """Once in a process, however many texts are long."""
    log.warning(
        f"the network has {positions} positions and was pre-trained on rows of {length} tokens: positions beyond those were "
        f"never trained. Use texts of at most {length} tokens, or pre-train with a larger rows.length."
    )


@dataclass(frozen=True)
class Stored:
    """What a folder holds, before a network is built from it."""

    folder: Path
    config: Mapping[str, Any]
    settings: EncoderSettings
    vocab_size: int
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer

    @property
    def length(self) -> int | None:
        return self.config.get(LENGTH)

    def build(self, head: nn.Module | None, architecture: str, described_by: str = "its config.json") -> Encoder:
        """The encoder, with the weights of both in place."""
        encoder = encoder_alone(self.settings, self.vocab_size)
        try:
            encoder.load_state_dict(encoder_from_transformers(self.settings, self.tensors))
            if head is not None:
                tensors = head_tensors(self.settings, self.tensors, architecture)
                head.load_state_dict(one_logit(tensors) if isinstance(head, ModernDetectionHead) else tensors)
                head.eval()
        except KeyError as error:
            raise CorruptError(f"{self.folder}/{WEIGHTS} has no {error}.") from None
        except RuntimeError as error:
            last = str(error).splitlines()[-1].strip()
            raise CorruptError(f"{self.folder}/{WEIGHTS} does not fit {described_by}: {last}") from None
        return encoder.eval()


def read_folder(folder: Path) -> Stored:
    vocabulary = folder / "vocab.txt"
    for name in ("config.json", WEIGHTS, "tokenizer.json"):
        if not (folder / name).is_file() and not (name == "tokenizer.json" and vocabulary.is_file()):
            raise DataError(f'{folder} is not a model folder: it has no {name}. "electra export" writes such folders.')
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_bytes())
        if config.get("model_type") not in FORMATS:
            known = " or ".join(FORMATS)
            raise DataError(f"{folder} holds a model of type {config.get('model_type')!r}, not {known}.")
        sizes = settings_from_config(config), config["vocab_size"]
        return Stored(folder, config, *sizes, load_file(folder / WEIGHTS), folder_tokenizer(folder))
    except ElectraError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CorruptError(f"{folder} cannot be read: {str(error).splitlines()[0]}.") from None


def folder_tokenizer(folder: Path) -> Tokenizer:
    """Older folders have BERT's vocab.txt and say the rest in tokenizer_config.json."""
    if (folder / "tokenizer.json").is_file():
        return load_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_bytes()) if path.is_file() else {}
    lowercase, split_cjk = (settings.get(key, True) for key in ("do_lower_case", "tokenize_chinese_chars"))
    return adopt_vocabulary(folder / "vocab.txt", lowercase, settings.get("strip_accents"), split_cjk)


def read_network(folder: Path, kind: NetworkKind | None = None) -> Pretrained:
    """The encoder with the head of that kind; with the head that the folder has, where no kind is asked for."""
    stored = read_folder(folder)
    if kind in (None, "discriminator") and (name := FORMATS[stored.settings.kind].detector):
        stored = read_folder(folder / name) if (folder / name).is_dir() else stored
    kinds: tuple[NetworkKind, ...] = ("discriminator", "generator", "encoder") if kind is None else (kind,)
    for wanted in kinds:
        head, architecture = empty_head(stored, wanted), network_class(stored.settings, wanted)
        names = head_tensors(stored.settings, stored.tensors, architecture).keys()
        has_head = head is None or head.state_dict().keys() <= names
        if has_head and (wanted != "discriminator" or says_discriminator(stored)):
            encoder, objective = stored.build(head, architecture), stored.config.get(OBJECTIVE, "electra")
            return Pretrained(encoder, head, wanted, stored.tokenizer, objective, stored.length)
    raise DataError(
        f"{folder} holds no {kind}: its network has another head, or none. Give one that has, or the run it is from."
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
    """ModernBERT's classes with labels all have a discriminator's tensors: there config.json must say that it is one of
    ours. Both marks are needed, because transformers keeps the first when it fine-tunes, and a column of numbers may
    have the name of our label. Older exports have one label, "replaced"."""
    labels = FORMATS[stored.settings.kind].discriminator_labels
    names = tuple((stored.config.get("id2label") or {}).values())
    return not labels or (OBJECTIVE in stored.config and names in (labels, labels[1:]))
