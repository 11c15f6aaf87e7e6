"""Folders that `transformers` loads offline, and reading such folders without transformers.

transformers 5 silently builds another tokenizer from an ELECTRA folder unless `tokenizer_class` says
PreTrainedTokenizerFast, so an export is not done before both sides agreed on a probe: same ids, same logits.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.base.batch import SpecialIds
from electra.base.errors import CorruptError, DataError, MachineError, SettingsError
from electra.base.files import sync_folder, write_synced
from electra.data.tokenizer import vocabulary_size
from electra.interop.check import PROBE, our_logits, probe_batch, require_equal, transformers_reader
from electra.interop.folder import (
    FORMATS,
    WEIGHTS,
    encoder_tensors,
    head_tensors,
    network_tensors,
    read_folder,
)
from electra.model.encoders import (
    AnyEncoder,
    AnySettings,
    build_detection_head,
    build_token_head,
    encoder_alone,
)
from electra.model.modern import ModernBertSettings

Kind = Literal["discriminator", "generator", "encoder"]
OBJECTIVE = "pretraining_objective"


def network_class(settings: AnySettings, kind: Kind) -> str:
    """The class of transformers that reads it."""
    form = FORMATS[settings.kind]
    match kind:
        case "discriminator":
            return form.DISCRIMINATOR
        case "generator":
            return f"{form.CLASS}ForMaskedLM"
        case "encoder":
            return f"{form.CLASS}Model"


def has_form(settings: AnySettings, kind: Kind) -> bool:
    """Whether transformers has a class for it: ModernBERT's token head is as wide as its layers, and one on a word table
    of another width has no place there."""
    projects = isinstance(settings, ModernBertSettings) and settings.embedding != settings.hidden
    return kind != "generator" or not projects


def tokenizer_config(tokenizer: Tokenizer, special: SpecialIds, settings: AnySettings) -> dict[str, Any]:
    tokens = {
        f"{name}_token": tokenizer.id_to_token(getattr(special, name))
        for name in ("pad", "unk", "cls", "sep", "mask")
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": settings.positions,
        "model_input_names": FORMATS[settings.kind].INPUTS,
        "clean_up_tokenization_spaces": False,
    } | tokens


def write_folder(
    out: Path,
    kind: Kind,
    encoder: AnyEncoder,
    head: nn.Module | None,
    tokenizer: Tokenizer,
    special: SpecialIds,
    card: str,
    objective: str = "electra",
) -> str:
    """Returns what can be said of it."""
    settings = encoder.settings
    if not has_form(settings, kind):
        raise SettingsError(
            f"ModernBERT has no form for a token head on words of {settings.embedding} units under layers of "
            f"{settings.hidden}. Export the encoder alone, or train with embedding equal to hidden."
        )
    vocab_size = len(encoder.embeddings.table)
    if vocabulary_size(tokenizer) != vocab_size:
        raise CorruptError(f"the tokenizer has {vocabulary_size(tokenizer)} ids, the network {vocab_size}.")
    name = network_class(settings, kind)
    config = FORMATS[settings.kind].config_json(settings, vocab_size, special, name) | {OBJECTIVE: objective}
    tensors = network_tensors(encoder, head, name)
    content = folder_content(settings, config, tensors, tokenizer, special, card)
    checked_by = write_checked(
        out, content, lambda folder: check_folder(folder, kind, encoder, head, tokenizer, special)
    )
    same = "states" if head is None else "logits"
    return f"{out}: same ids and same {same} as ours, read back by {checked_by}"


def folder_content(
    settings: AnySettings,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    special: SpecialIds,
    card: str,
) -> dict[str, bytes]:
    """The files that transformers reads, and README.md."""
    files = {
        "config.json": json.dumps(config, indent=2, ensure_ascii=False),
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(tokenizer_config(tokenizer, special, settings), indent=2),
        "README.md": card,
    }
    content = {name: text.encode() for name, text in files.items()}
    stored = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
    content[WEIGHTS] = save(stored, metadata={"format": "pt"})
    return content


def write_checked(out: Path, content: dict[str, bytes], check: Callable[[Path], str]) -> str:
    """Everything goes into a temporary folder first, is checked there, and is renamed at the end: `out` is whole or
    absent. Returns what `check` said."""
    if out.exists():
        raise MachineError(f"{out} exists already. Choose another folder or remove it first.")
    hashes = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in content.items()
    }
    content = content | {"MANIFEST.json": json.dumps(hashes, indent=1).encode()}
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for name, data in content.items():
            write_synced(temporary / name, data)
        said = check(temporary)
        temporary.rename(out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return said


def check_folder(
    folder: Path,
    kind: Kind,
    encoder: AnyEncoder,
    head: nn.Module | None,
    tokenizer: Tokenizer,
    special: SpecialIds,
) -> str:
    """What was written gives the same ids and logits: read back by ourselves, and by transformers where installed.
    Returns who has read it back."""
    device = encoder.embeddings.table.device
    ids, is_real = (t.to(device) for t in probe_batch(tokenizer, special, encoder.settings.positions))
    expected = our_logits(encoder, head, ids, is_real).cpu()[is_real.cpu()]
    again = load(folder, kind)
    require_equal(
        expected, our_logits(again.encoder, again.head, ids.cpu(), is_real.cpu())[is_real.cpu()], "our reader"
    )
    theirs = transformers_reader()
    if theirs is None:
        return "electra alone (transformers is not installed)"
    their_ids, their_logits = theirs(folder, network_class(encoder.settings, kind))
    our_ids = [row[mask].tolist() for row, mask in zip(ids, is_real, strict=True)]
    for text, ours, row in zip(PROBE, our_ids, their_ids, strict=True):
        if row != ours:
            raise CorruptError(
                f"transformers' tokenizer reads {text!r} otherwise than ours. The export was not kept."
            )
    require_equal(expected, their_logits[is_real.cpu()].view_as(expected), "transformers")
    return "electra and transformers"


@dataclass(frozen=True)
class Loaded:
    """An encoder with its head, ready to use, and the tokenizer it was trained with."""

    encoder: AnyEncoder
    head: Any
    tokenizer: Tokenizer


def load_encoder(folder: Path) -> tuple[AnyEncoder, Tokenizer]:
    """The encoder of any such folder, whatever stands on top of it there."""
    loaded = load(folder, "encoder")
    return loaded.encoder, loaded.tokenizer


def load_discriminator(folder: Path) -> Loaded:
    return load(folder, "discriminator")


def load_generator(folder: Path) -> Loaded:
    return load(folder, "generator")


def says_discriminator(folder: Path) -> bool:
    """ModernBERT's classes with labels all have a discriminator's tensors: there config.json must say that it is one of
    ours. Both marks are needed, because transformers keeps the first when it fine-tunes, and a column of numbers may
    have the name of our label."""
    config = json.loads((folder / "config.json").read_bytes())
    labels = FORMATS[config["model_type"]].DISCRIMINATOR_LABELS
    return not labels or (OBJECTIVE in config and config.get("id2label") == labels)


def load(folder: Path, kind: Kind) -> Loaded:
    settings, vocab_size, tensors, tokenizer = read_folder(folder)
    encoder = encoder_alone(settings, vocab_size)
    head: nn.Module | None = None
    match kind:
        case "discriminator":
            head = build_detection_head(settings)
        case "generator":
            head = build_token_head(settings, vocab_size)
    top = head_tensors(settings, tensors, network_class(settings, kind))
    has_head = head is None or head.state_dict().keys() <= top.keys()
    if not has_head or (kind == "discriminator" and not says_discriminator(folder)):
        raise DataError(
            f"{folder} holds no {kind}: its network has another head, or none. Give one that has, or the run it is "
            "from."
        )
    try:
        encoder.load_state_dict(encoder_tensors(folder, settings, tensors))
        if head is not None:
            head.load_state_dict(top)
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise CorruptError(f"{folder}/{WEIGHTS} does not fit its config.json: {first}") from None
    return Loaded(encoder.eval(), head.eval() if head is not None else None, tokenizer)
