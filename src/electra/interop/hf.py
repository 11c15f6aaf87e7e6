"""Folders that `transformers` loads offline, and reading such folders without transformers.

transformers 5 silently builds another tokenizer from an ELECTRA folder unless `tokenizer_class` says
PreTrainedTokenizerFast, so an export is not done before both sides agreed on a probe: same ids, same logits.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.batch import SpecialIds
from electra.data.tokenizer import vocabulary_size
from electra.errors import CorruptError, DataError, MachineError, SettingsError
from electra.files import sync_folder, write_synced
from electra.interop.folder import (
    FORMATS,
    WEIGHTS,
    encoder_tensors,
    head_tensors,
    network_tensors,
    read_folder,
)
from electra.model.choice import (
    AnyEncoder,
    AnySettings,
    TokenHead,
    build_detection_head,
    build_token_head,
    encoder_alone,
)
from electra.model.modernbert import ModernBertSettings

Kind = Literal["discriminator", "generator", "encoder"]
OBJECTIVE = "pretraining_objective"
TOLERANCE = 1e-4
PROBE = (
    "The quick brown fox jumps over the lazy dog.",
    "Straße, Übergröße und Äpfel: naïve café façade.",
    "안녕하세요. 한국어 문장도 잘 됩니다.",
    "日本語の文章も、カタカナも大丈夫です。",
    "[MASK] tokens, numbers 3.14159 and emoji 🙂 — “quotes”.",
)


def architecture(settings: AnySettings, kind: Kind) -> str:
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
    """Whether transformers has a class for it: ModernBERT's token head is as wide as its layers, and one on a narrower
    word table has no place there."""
    narrow = isinstance(settings, ModernBertSettings) and settings.embedding != settings.hidden
    return kind != "generator" or not narrow


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
    name = architecture(settings, kind)
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


def probe_batch(tokenizer: Tokenizer, special: SpecialIds, positions: int) -> tuple[Tensor, Tensor]:
    """The probe as padded ids and their attention mask."""
    cutting = Tokenizer.from_str(tokenizer.to_str())
    cutting.enable_truncation(positions)
    rows = [cutting.encode(text).ids for text in PROBE]
    width = max(map(len, rows))
    ids = torch.tensor([row + [special.pad] * (width - len(row)) for row in rows])
    return ids, torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])


def our_logits(encoder: AnyEncoder, head: nn.Module | None, ids: Tensor, is_real: Tensor) -> Tensor:
    """States where there is no head."""
    training = encoder.training
    encoder.eval()
    with torch.no_grad():
        hidden = encoder(ids, torch.zeros_like(ids), is_real)
        if isinstance(head, TokenHead):
            logits = head(hidden, encoder.embeddings.table)
        else:
            logits = hidden if head is None else head(hidden)
    encoder.train(training)
    return logits


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
    their_ids, their_logits = theirs(folder, architecture(encoder.settings, kind))
    our_ids = [row[mask].tolist() for row, mask in zip(ids, is_real, strict=True)]
    for text, ours, row in zip(PROBE, our_ids, their_ids, strict=True):
        if row != ours:
            raise CorruptError(
                f"transformers' tokenizer reads {text!r} otherwise than ours. The export was not kept."
            )
    require_equal(expected, their_logits[is_real.cpu()].view_as(expected), "transformers")
    return "electra and transformers"


def require_equal(expected: Tensor, found: Tensor, who: str) -> None:
    difference = (expected - found).abs().max().item()
    if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):
        raise CorruptError(
            f"{who} gets other logits from the export (largest difference {difference:.2g}). It was not kept."
        )


def transformers_reader() -> Callable[[Path, str], tuple[list[list[int]], Tensor]] | None:
    try:
        import transformers
    except ImportError:
        return None

    def read(folder: Path, name: str) -> tuple[list[list[int]], Tensor]:
        with quiet(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = getattr(transformers, name).from_pretrained(folder, local_files_only=True).eval()
            inputs = tokenizer(list(PROBE), padding=True, truncation=True, return_tensors="pt")
            with torch.no_grad():
                logits = model(**inputs)[0]
        rows = [
            row[mask.bool()].tolist()
            for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        return rows, logits

    return read


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    logging = transformers.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


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


def load(folder: Path, kind: Kind) -> Loaded:
    settings, vocab_size, tensors, tokenizer = read_folder(folder)
    encoder = encoder_alone(settings, vocab_size)
    head: nn.Module | None = None
    match kind:
        case "discriminator":
            head = build_detection_head(settings)
        case "generator":
            head = build_token_head(settings, vocab_size)
    top = head_tensors(settings, tensors, architecture(settings, kind))
    if head is not None and not head.state_dict().keys() <= top.keys():
        raise DataError(
            f"{folder} holds no {kind}: its network has another head, or none. Give one that has, or the run it is from."
        )
    try:
        encoder.load_state_dict(encoder_tensors(folder, settings, tensors))
        if head is not None:
            head.load_state_dict(top)
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise CorruptError(f"{folder}/{WEIGHTS} does not fit its config.json: {first}") from None
    return Loaded(encoder.eval(), head.eval() if head is not None else None, tokenizer)
