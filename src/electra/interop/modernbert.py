"""ModernBERT folders that `transformers` loads offline: an encoder as ModernBertModel, a generator with its head as
ModernBertForMaskedLM; and reading such folders without transformers.

An encoder whose word table is narrower than its layers has a projection that ModernBERT lacks. It goes into the table:
words * projection is a table of ModernBERT's width with the same states. Reading that back gives an encoder without a
projection. A token head on a narrow table has no such form and is refused.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor

from electra.batch import SpecialIds
from electra.data.tokenizer import load_tokenizer, vocabulary_size
from electra.errors import CorruptError, DataError, ElectraError, MachineError, SettingsError
from electra.files import sync_folder, write_synced
from electra.interop.hf import PROBE, WEIGHTS, probe_batch, require_equal, tokenizer_config
from electra.interop.names import rename
from electra.model.modernbert import NORM_EPS, Embeddings, ModernBert, ModernBertSettings, TokenHead

ENCODER = {
    "embeddings.words.{p}": "embeddings.tok_embeddings.{p}",
    "norm.{p}": "embeddings.norm.{p}",
    "layers.{n}.attention_norm.{p}": "layers.{n}.attn_norm.{p}",
    "layers.{n}.query_key_value.{p}": "layers.{n}.attn.Wqkv.{p}",
    "layers.{n}.attention_output.{p}": "layers.{n}.attn.Wo.{p}",
    "layers.{n}.feed_forward_norm.{p}": "layers.{n}.mlp_norm.{p}",
    "layers.{n}.expand.{p}": "layers.{n}.mlp.Wi.{p}",
    "layers.{n}.contract.{p}": "layers.{n}.mlp.Wo.{p}",
    "final_norm.{p}": "final_norm.{p}",
}
FIXED = {
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
    "norm_eps": NORM_EPS,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "tie_word_embeddings": True,
}
HEAD = {"dense.{p}": "head.dense.{p}", "norm.{p}": "head.norm.{p}", "bias": "decoder.bias"}


def config_json(
    settings: ModernBertSettings, vocab_size: int, special: SpecialIds, masked_lm: bool
) -> dict[str, Any]:
    """The layers' kinds and angles in the words of transformers 5, and in those of transformers 4 and other readers."""
    angles = {"full_attention": settings.global_theta, "sliding_attention": settings.local_theta}
    kinds = [
        "sliding_attention" if settings.is_local(n) else "full_attention" for n in range(settings.layers)
    ]
    return {
        "architectures": ["ModernBertForMaskedLM" if masked_lm else "ModernBertModel"],
        "model_type": "modernbert",
        "vocab_size": vocab_size,
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "intermediate_size": settings.intermediate,
        "max_position_embeddings": settings.positions,
        "layer_types": kinds,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in angles.items()
        },
        "global_attn_every_n_layers": settings.global_every,
        "global_rope_theta": settings.global_theta,
        "local_rope_theta": settings.local_theta,
        "local_attention": settings.window,
        "embedding_dropout": settings.dropout,
        "mlp_dropout": settings.dropout,
        "attention_dropout": settings.attention_dropout,
        "initializer_range": 0.02,
        "pad_token_id": special.pad,
        "cls_token_id": special.cls,
        "sep_token_id": special.sep,
        "bos_token_id": special.cls,
        "eos_token_id": special.sep,
        "dtype": "float32",
    } | FIXED


def settings_from_config(config: Mapping[str, Any]) -> ModernBertSettings:
    """Through an allow-list of keys; what we have no place for is refused rather than dropped."""
    other = [f"{key}={config[key]}" for key, value in FIXED.items() if config.get(key, value) != value]
    if other:
        raise DataError(f"ModernBERT with {', '.join(other)} is not supported.")
    layers, angles = config["num_hidden_layers"], config.get("rope_parameters") or {}
    every = config.get("global_attn_every_n_layers", 3)
    if kinds := config.get("layer_types"):
        whole = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
        every = whole[1] if len(whole) > 1 else layers
        if whole != list(range(0, layers, every)):
            raise DataError(
                f"layers {whole} attend to whole rows: only every n-th, the first included, can here."
            )
    return ModernBertSettings(
        layers=layers,
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        embedding=config["hidden_size"],
        positions=config["max_position_embeddings"],
        dropout=config.get("mlp_dropout", 0.0),
        attention_dropout=config.get("attention_dropout", 0.0),
        window=config.get("local_attention", 128),
        global_every=every,
        global_theta=theta(angles, "full_attention", config.get("global_rope_theta", 160_000.0)),
        local_theta=theta(angles, "sliding_attention", config.get("local_rope_theta") or 10_000.0),
    )


def theta(angles: Mapping[str, Any], kind: str, otherwise: float) -> float:
    entry = angles.get(kind) or {}
    if entry.get("rope_type", "default") != "default":
        raise DataError(f"ModernBERT with rotary positions of type {entry['rope_type']!r} is not supported.")
    return entry.get("rope_theta", otherwise)


def rename_to_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed = {rename(name, ENCODER) or name: tensor for name, tensor in tensors.items()}
    assert len(renamed) == len(tensors)
    return renamed


def encoder_to_transformers(encoder: ModernBert) -> dict[str, Tensor]:
    tensors = dict(encoder.state_dict())
    if (projection := tensors.pop("project.weight", None)) is not None:
        words = tensors["embeddings.words.weight"]
        tensors["embeddings.words.weight"] = (words.double() @ projection.double().T).to(words.dtype)
    return rename_to_transformers(tensors)


def encoder_from_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names that have no place here are left out; missing ones show when the module loads."""
    inverse = {theirs: ours for ours, theirs in ENCODER.items()}
    return {ours: tensor for name, tensor in tensors.items() if (ours := rename(name, inverse))}


def masked_lm_tensors(encoder: ModernBert, head: TokenHead) -> dict[str, Tensor]:
    """The output matrix is the word table, which is stored once."""
    if encoder.settings.embedding != encoder.settings.hidden:
        raise SettingsError(
            f"ModernBERT has no form for a token head on words of {encoder.settings.embedding} units under layers of "
            f"{encoder.settings.hidden}. Export the encoder alone, or train with embedding equal to hidden."
        )
    body = {f"model.{name}": tensor for name, tensor in encoder_to_transformers(encoder).items()}
    top = {rename(name, HEAD) or name: tensor for name, tensor in head.state_dict().items()}
    return body | top


@dataclass(frozen=True)
class Loaded:
    """An encoder ready to use, its token head where the folder has one, and the tokenizer it was trained with."""

    encoder: ModernBert
    head: TokenHead | None
    tokenizer: Tokenizer

    def answer(self, ids: Tensor, is_real: Tensor) -> Tensor:
        """Logits with a head, states without."""
        return answer(self.encoder, self.head, ids, is_real)


@torch.no_grad()
def answer(encoder: ModernBert, head: TokenHead | None, ids: Tensor, is_real: Tensor) -> Tensor:
    training = encoder.training
    encoder.eval()
    hidden = encoder(ids, torch.zeros_like(ids), is_real)
    encoder.train(training)
    return hidden if head is None else head(hidden, encoder.embeddings.words.weight)


def write_modernbert(
    out: Path,
    encoder: ModernBert,
    head: TokenHead | None,
    tokenizer: Tokenizer,
    special: SpecialIds,
    card: str,
) -> str:
    """Everything goes into a temporary folder, is read back there, and is renamed at the end: `out` is whole or absent.
    Returns what can be said of it."""
    if out.exists():
        raise MachineError(f"{out} exists already. Choose another folder or remove it first.")
    vocab_size = encoder.embeddings.words.num_embeddings
    if vocabulary_size(tokenizer) != vocab_size:
        raise CorruptError(f"the tokenizer has {vocabulary_size(tokenizer)} ids, the network {vocab_size}.")
    settings = encoder.settings
    tensors = encoder_to_transformers(encoder) if head is None else masked_lm_tensors(encoder, head)
    inputs = {"model_input_names": ["input_ids", "attention_mask"]}
    described = tokenizer_config(tokenizer, special, settings.positions) | inputs
    files = {
        "config.json": json.dumps(config_json(settings, vocab_size, special, head is not None), indent=2),
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(described, indent=2),
        "README.md": card,
    }
    content = {name: text.encode() for name, text in files.items()}
    stored = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
    content[WEIGHTS] = save(stored, metadata={"format": "pt"})
    hashes = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in content.items()
    }
    content["MANIFEST.json"] = json.dumps(hashes, indent=1).encode()
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for name, data in content.items():
            write_synced(temporary / name, data)
        checked_by = check_modernbert(temporary, encoder, head, tokenizer, special)
        temporary.rename(out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    same = "states" if head is None else "logits"
    return f"{out}: same ids and same {same} as ours, read back by {checked_by}"


def check_modernbert(
    folder: Path, encoder: ModernBert, head: TokenHead | None, tokenizer: Tokenizer, special: SpecialIds
) -> str:
    """What was written gives the same ids and numbers: read back by ourselves, and by transformers where installed."""
    device = encoder.embeddings.words.weight.device
    ids, is_real = probe_batch(tokenizer, special, encoder.settings.positions)
    expected = answer(encoder, head, ids.to(device), is_real.to(device)).cpu()[is_real]
    require_equal(expected, load_modernbert(folder).answer(ids, is_real)[is_real], "our reader")
    try:
        import transformers
    except ImportError:
        return "electra alone (transformers is not installed)"
    kind = transformers.AutoModel if head is None else transformers.AutoModelForMaskedLM
    verbosity, bar = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        reader = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = kind.from_pretrained(folder, local_files_only=True).eval()
        inputs = reader(list(PROBE), padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            theirs = model(**inputs)[0]
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bar:
            transformers.logging.enable_progress_bar()
    if not torch.equal(inputs["input_ids"], ids) or not torch.equal(inputs["attention_mask"].bool(), is_real):
        raise CorruptError(
            "transformers' tokenizer reads the probe otherwise than ours. The export was not kept."
        )
    require_equal(expected, theirs[is_real], "transformers")
    return "electra and transformers"


def load_modernbert(folder: Path) -> Loaded:
    """A ModernBERT folder, ours or anyone's. Weights from safetensors only; nothing in config.json can name code."""
    for name in ("config.json", WEIGHTS, "tokenizer.json"):
        if not (folder / name).is_file():
            raise DataError(f"{folder} is not a model folder: it has no {name}.")
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_bytes())
        if config.get("model_type") != "modernbert":
            raise DataError(f"{folder} holds a model of type {config.get('model_type')!r}, not modernbert.")
        settings, vocab_size = settings_from_config(config), config["vocab_size"]
        tensors, tokenizer = load_file(folder / WEIGHTS), load_tokenizer(folder)
    except ElectraError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CorruptError(f"{folder} cannot be read: {str(error).splitlines()[0]}.") from None
    body = {re.sub(r"^model\.", "", name): tensor for name, tensor in tensors.items()}
    encoder = ModernBert(settings, Embeddings(settings, vocab_size))
    head = TokenHead(settings, vocab_size) if "decoder.bias" in tensors else None
    inverse = {theirs: ours for ours, theirs in HEAD.items()}
    top = {ours: tensor for name, tensor in tensors.items() if (ours := rename(name, inverse))}
    try:
        encoder.load_state_dict(encoder_from_transformers(body))
        if head is not None:
            head.load_state_dict(top)
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise CorruptError(f"{folder}/{WEIGHTS} does not fit its config.json: {first}") from None
    return Loaded(encoder.eval(), head.eval() if head is not None else None, tokenizer)
