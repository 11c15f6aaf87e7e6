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
from electra.errors import CorruptError, MachineError
from electra.files import sync_folder, write_synced
from electra.interop import names
from electra.interop.folder import WEIGHTS, encoder_tensors, read_folder
from electra.model.encoder import LAYER_NORM_EPS, TYPES, Embeddings, Encoder, EncoderSettings
from electra.model.heads import DetectionHead, TokenHead

Kind = Literal["discriminator", "generator"]
ARCHITECTURES: dict[Kind, str] = {"discriminator": "ElectraForPreTraining", "generator": "ElectraForMaskedLM"}
OBJECTIVE = "pretraining_objective"
TOLERANCE = 1e-4
PROBE = (
    "The quick brown fox jumps over the lazy dog.",
    "Straße, Übergröße und Äpfel: naïve café façade.",
    "안녕하세요. 한국어 문장도 잘 됩니다.",
    "日本語の文章も、カタカナも大丈夫です。",
    "[MASK] tokens, numbers 3.14159 and emoji 🙂 — “quotes”.",
)


def config_json(
    settings: EncoderSettings, vocab_size: int, special: SpecialIds, architecture: str
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "electra",
        "vocab_size": vocab_size,
        "embedding_size": settings.embedding,
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "intermediate_size": settings.intermediate,
        "max_position_embeddings": settings.positions,
        "type_vocab_size": TYPES,
        "hidden_act": "gelu",
        "hidden_dropout_prob": settings.dropout,
        "attention_probs_dropout_prob": settings.attention_dropout,
        "layer_norm_eps": LAYER_NORM_EPS,
        "initializer_range": 0.02,
        "pad_token_id": special.pad,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def tokenizer_config(tokenizer: Tokenizer, special: SpecialIds, positions: int) -> dict[str, Any]:
    tokens = {
        f"{name}_token": tokenizer.id_to_token(getattr(special, name))
        for name in ("pad", "unk", "cls", "sep", "mask")
    }
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "model_input_names": inputs,
        "clean_up_tokenization_spaces": False,
    } | tokens


def discriminator_tensors(encoder: Encoder, head: DetectionHead) -> dict[str, Tensor]:
    body = {
        f"electra.{k}": v for k, v in names.encoder_to_transformers(names.encoder_tensors(encoder)).items()
    }
    top = names.head_to_transformers(head.state_dict(), names.DETECTION_HEAD)
    return body | {f"discriminator_predictions.{k}": v for k, v in top.items()}


def generator_tensors(encoder: Encoder, head: TokenHead) -> dict[str, Tensor]:
    """The output matrix is the word table; transformers ties the two itself and wants it stored once."""
    body = {
        f"electra.{k}": v for k, v in names.encoder_to_transformers(names.encoder_tensors(encoder)).items()
    }
    return body | names.head_to_transformers(head.state_dict(), names.TOKEN_HEAD)


def write_folder(
    out: Path,
    kind: Kind,
    encoder: Encoder,
    head: nn.Module,
    tokenizer: Tokenizer,
    special: SpecialIds,
    card: str,
    objective: str = "electra",
) -> str:
    """Returns what can be said of it."""
    vocab_size = len(encoder.embeddings.table)
    if vocabulary_size(tokenizer) != vocab_size:
        raise CorruptError(f"the tokenizer has {vocabulary_size(tokenizer)} ids, the network {vocab_size}.")
    match head:
        case DetectionHead():
            tensors = discriminator_tensors(encoder, head)
        case TokenHead():
            tensors = generator_tensors(encoder, head)
    config = config_json(encoder.settings, vocab_size, special, ARCHITECTURES[kind]) | {OBJECTIVE: objective}
    content = folder_content(config, tensors, tokenizer, special, card)
    checked_by = write_checked(
        out, content, lambda folder: check_folder(folder, kind, encoder, head, tokenizer, special)
    )
    return f"{out}: same ids and same logits as ours, read back by {checked_by}"


def folder_content(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    special: SpecialIds,
    card: str,
) -> dict[str, bytes]:
    """The files that transformers reads, and README.md."""
    positions = config["max_position_embeddings"]
    files = {
        "config.json": json.dumps(config, indent=2, ensure_ascii=False),
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(tokenizer_config(tokenizer, special, positions), indent=2),
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


def our_logits(encoder: Encoder, head: nn.Module, ids: Tensor, is_real: Tensor) -> Tensor:
    training = encoder.training
    encoder.eval()
    with torch.no_grad():
        hidden = encoder(ids, torch.zeros_like(ids), is_real)
        logits = head(hidden, encoder.embeddings.table) if isinstance(head, TokenHead) else head(hidden)
    encoder.train(training)
    return logits


def check_folder(
    folder: Path, kind: Kind, encoder: Encoder, head: nn.Module, tokenizer: Tokenizer, special: SpecialIds
) -> str:
    """What was written gives the same ids and logits: read back by ourselves, and by transformers where installed.
    Returns who has read it back."""
    device = encoder.embeddings.table.device
    ids, is_real = (t.to(device) for t in probe_batch(tokenizer, special, encoder.settings.positions))
    expected = our_logits(encoder, head, ids, is_real).cpu()[is_real.cpu()]
    again = load_discriminator(folder) if kind == "discriminator" else load_generator(folder)
    require_equal(
        expected, our_logits(again.encoder, again.head, ids.cpu(), is_real.cpu())[is_real.cpu()], "our reader"
    )
    theirs = transformers_reader()
    if theirs is None:
        return "electra alone (transformers is not installed)"
    their_ids, their_logits = theirs(folder, kind)
    our_ids = [row[mask].tolist() for row, mask in zip(ids, is_real, strict=True)]
    for text, ours, row in zip(PROBE, our_ids, their_ids, strict=True):
        if row != ours:
            raise CorruptError(
                f"transformers' tokenizer reads {text!r} otherwise than ours. The export was not kept."
            )
    require_equal(expected, their_logits[is_real.cpu()], "transformers")
    return "electra and transformers"


def require_equal(expected: Tensor, found: Tensor, who: str) -> None:
    difference = (expected - found).abs().max().item()
    if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):
        raise CorruptError(
            f"{who} gets other logits from the export (largest difference {difference:.2g}). It was not kept."
        )


def transformers_reader() -> Callable[[Path, Kind], tuple[list[list[int]], Tensor]] | None:
    try:
        import transformers
    except ImportError:
        return None

    def read(folder: Path, kind: Kind) -> tuple[list[list[int]], Tensor]:
        classes = {
            "discriminator": transformers.AutoModelForPreTraining,
            "generator": transformers.AutoModelForMaskedLM,
        }
        with quiet(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = classes[kind].from_pretrained(folder, local_files_only=True).eval()
            inputs = tokenizer(list(PROBE), padding=True, truncation=True, return_tensors="pt")
            with torch.no_grad():
                logits = model(**inputs).logits
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

    encoder: Encoder
    head: Any
    tokenizer: Tokenizer


def load_encoder(folder: Path) -> tuple[Encoder, Tokenizer]:
    """The encoder of any such folder, whatever stands on top of it there."""
    settings, vocab_size, tensors, tokenizer = read_folder(folder)
    encoder = Encoder(settings, Embeddings(settings, vocab_size))
    try:
        encoder.load_state_dict(encoder_tensors(folder, tensors))
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise CorruptError(f"{folder}/{WEIGHTS} does not fit its config.json: {first}") from None
    return encoder.eval(), tokenizer


def load_discriminator(folder: Path) -> Loaded:
    settings, vocab_size, tensors, tokenizer = read_folder(folder)
    head = DetectionHead(settings)
    encoder = Encoder(settings, Embeddings(settings, vocab_size))
    return fill(
        folder, Loaded(encoder, head, tokenizer), tensors, "discriminator_predictions.", names.DETECTION_HEAD
    )


def load_generator(folder: Path) -> Loaded:
    settings, vocab_size, tensors, tokenizer = read_folder(folder)
    head = TokenHead(settings, vocab_size)
    encoder = Encoder(settings, Embeddings(settings, vocab_size))
    return fill(folder, Loaded(encoder, head, tokenizer), tensors, "", names.TOKEN_HEAD)


def fill(
    folder: Path, model: Loaded, tensors: Mapping[str, Tensor], prefix: str, table: Mapping[str, str]
) -> Loaded:
    top = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    try:
        model.encoder.load_state_dict(encoder_tensors(folder, tensors))
        model.head.load_state_dict(names.head_from_transformers(top, table))
    except (RuntimeError, KeyError) as error:
        first = str(error).splitlines()[-1].strip()
        raise CorruptError(f"{folder}/{WEIGHTS} does not fit its config.json: {first}") from None
    model.encoder.eval()
    model.head.eval()
    return model
