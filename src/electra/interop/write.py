"""Writes folders that `transformers` loads offline, pre-trained and fine-tuned ones alike.

transformers 5 silently builds another tokenizer from an ELECTRA folder unless `tokenizer_class` is
PreTrainedTokenizerFast. So a folder gets its name only after it was read back with the same ids and outputs on a probe in several
languages: by our reader and, if it is installed and has such a head, by transformers.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.errors import CorruptError, DiskFullError, MachineError
from electra.base.files import (
    FOLDER_MANIFEST,
    folder_problems,
    manifest_entry,
    read_object,
    remove_leftovers,
    sync_folder,
    temporary_name,
    write_synced,
    writing,
)
from electra.data.tokenizer import SPECIAL_TOKENS, special_ids, vocabulary_size
from electra.interop.card import CARD
from electra.interop.foreign import INDEX, WEIGHTS
from electra.interop.formats import FORMATS, config_json, network_class, network_tensors
from electra.interop.read import LENGTH, OBJECTIVE, Pretrained, read_network
from electra.model import Encoder, TokenHead, encode
from electra.model.heads import Pooling
from electra.model.modern import ModernDetectionHead

TOLERANCE = 1e-4
POSITIONS = "max_position_embeddings"
PROBE = (
    "The quick brown fox jumps over the lazy dog.",
    "Straße, Übergröße und Äpfel: naïve café façade.",
    "안녕하세요. 한국어 문장도 잘 됩니다.",
    "日本語の文章も、カタカナも大丈夫です。",
    "[MASK] tokens, numbers 3.14159 and emoji 🙂 — “quotes”.",
)
Answers = Callable[[Batch], Mapping[str, Tensor]]
"""A network's outputs for a batch, by transformers' names, on the CPU."""
Check = Callable[[Path, str, Tokenizer, Answers], str]
"""Reads a folder (with that transformers class) before it gets its name, and raises an error if its outputs differ from the
network's. Returns who has read it."""


@dataclass(frozen=True)
class Manner:
    """How folders are written: who reads them back (by default this process), and how large a file of weights may be before it is
    split into several."""

    check: Check | None = None
    shard_bytes: int = 5_000_000_000


PLAIN = Manner()


@dataclass(frozen=True)
class Folder:
    """A folder to write: an encoder with a head, and the transformers class that reads them (`architecture`; "" if none has such a
    head, whose tensors then keep our names). `entries` go into config.json, `files` beside it. `pooling` is how a head for rows
    pools."""

    encoder: Encoder
    head: nn.Module | None
    architecture: str
    tokenizer: Tokenizer
    entries: Mapping[str, Any]
    files: Mapping[str, bytes]
    length: int | None
    pooling: Pooling = "cls"

    def description(self) -> dict[str, bytes]:
        """The content of all files except the weights."""
        settings, vocab_size = self.encoder.settings, len(self.encoder.embeddings.table)
        if (size := vocabulary_size(self.tokenizer)) > vocab_size:
            raise CorruptError(f"the tokenizer has {size} ids, the network {vocab_size}.")
        class_name = self.architecture or network_class(settings, "encoder")
        config = config_json(settings, vocab_size, special_ids(self.tokenizer), class_name, self.pooling)
        config |= self.entries if self.length is None else {**self.entries, LENGTH: self.length}
        return {
            "config.json": json.dumps(config, indent=2, ensure_ascii=False).encode(),
            "tokenizer.json": self.tokenizer.to_str(pretty=True).encode(),
            "tokenizer_config.json": json.dumps(tokenizer_config(config), indent=2).encode(),
            **self.files,
        }

    def write(self, out: Path, ours: Answers, read_back: Callable[[Path], Answers], manner: Manner = PLAIN) -> str:
        """Writes the folder, reads it back and compares. Returns who has read it back."""
        write_files(out, self.content(manner.shard_bytes))
        if manner.check:
            return manner.check(out, self.architecture, self.tokenizer, ours)
        return check_folder(out, self.architecture, self.tokenizer, ours, read_back(out))

    def content(self, shard_bytes: int) -> dict[str, bytes]:
        tensors = network_tensors(self.encoder, self.head, self.architecture)
        stored = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
        return {**self.description(), **weight_files(stored, shard_bytes)}


def weight_files(tensors: Mapping[str, Tensor], most: int) -> dict[str, bytes]:
    """One file, or several of at most `most` bytes (a larger tensor has a file of its own) with transformers' index of them."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(it.nbytes for it in shards[-1].values()) + tensor.nbytes > most:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        return {WEIGHTS: save(dict(tensors), metadata={"format": "pt"})}
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": sum(it.nbytes for it in tensors.values())}, "weight_map": places}
    files = {name: save(shard, metadata={"format": "pt"}) for name, shard in zip(names, shards, strict=True)}
    return {**files, INDEX: json.dumps(index, indent=2).encode()}


def write_files(out: Path, content: Mapping[str, bytes]) -> None:
    """Writes a new folder with a manifest of its content."""
    manifest = {name: manifest_entry(data) for name, data in content.items()}
    with writing(out):
        out.mkdir(parents=True)
    for name, data in {**content, FOLDER_MANIFEST: json.dumps(manifest, indent=1).encode()}.items():
        write_synced(out / name, data)


@contextmanager
def whole_or_absent(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` at the end, once everything in it is written and checked. Leftovers of a killed
    command are removed, and finished folders are kept: `out` may exist if its content is identical."""
    refusal = MachineError(f"{out} exists already. Choose another folder or remove it first.")
    if not out.name or (out.exists() and not (out.is_dir() and (manifests(out) or not any(out.iterdir())))):
        raise refusal
    temporary = temporary_name(out)
    try:
        remove_leftovers(out.parent, out.name)
        yield temporary
        if not out.exists() or not any(out.iterdir()):
            temporary.rename(out)
            sync_folder(out.parent)
        elif manifests(temporary) != manifests(out) or any(folder_problems(out / it) for it in manifests(out)):
            raise refusal
    except DiskFullError as error:
        raise DiskFullError(str(error).replace(str(temporary), str(out))) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def manifests(folder: Path) -> dict[Path, bytes]:
    return {path.parent.relative_to(folder): path.read_bytes() for path in folder.rglob(FOLDER_MANIFEST)}


def network_folder(network: Pretrained, files: Mapping[str, bytes]) -> Folder:
    architecture, entries = network_class(network.encoder.settings, network.kind), {OBJECTIVE: network.objective}
    return Folder(network.encoder, network.head, architecture, network.tokenizer, entries, files, network.length)


def write_network(
    out: Path, network: Pretrained, card: str, beside: Mapping[str, bytes] | None = None, manner: Manner = PLAIN
) -> str:
    """Writes the folder of a network. `beside` are files for people. Returns a line about who has read the folder back."""
    encoder, kind, files = network.encoder, network.kind, {CARD: card.encode(), **(beside or {})}
    detector = FORMATS[encoder.settings.kind].detector if kind == "discriminator" else ""

    def write(part: Pretrained, out: Path, files: Mapping[str, bytes]) -> str:
        def read_back(path: Path) -> Answers:
            return answers_of(PretrainedNetwork(read_network(path, part.kind)))

        return network_folder(part, files).write(out, answers_of(PretrainedNetwork(part)), read_back, manner)

    with whole_or_absent(out) as temporary:
        if detector:
            write(replace(network, head=None, kind="encoder"), temporary, files)
        readers = write(network, temporary / detector, {} if detector else files)
    return f"same ids and same {'states' if network.head is None else 'logits'} as ours, read back by {readers}"


def tokenizer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "model_input_names": FORMATS[config["model_type"]].inputs,
        "clean_up_tokenization_spaces": False,
        **{f"{name.strip('[]').lower()}_token": name for name in SPECIAL_TOKENS},
    }


# The check


def probe_batch(tokenizer: Tokenizer, positions: int) -> Batch:
    """The probe's texts as pairs, so that both segments are tested. [MASK] in a text is the special token here, as in
    transformers."""
    cutting = Tokenizer.from_str(tokenizer.to_str())
    cutting.encode_special_tokens = False
    cutting.enable_truncation(positions)
    cutting.enable_padding(pad_id=special_ids(tokenizer).pad)
    encodings = cutting.encode_batch(list(zip(PROBE, reversed(PROBE), strict=True)))
    names = ("ids", "type_ids", "attention_mask")
    ids, segments, mask = torch.tensor([[getattr(encoding, name) for encoding in encodings] for name in names])
    return Batch.of_rows(ids, segments, mask.bool())


def check_folder(folder: Path, architecture: str, tokenizer: Tokenizer, expected: Answers, again: Answers) -> str:
    """Checks that a written folder gives the same ids and outputs; `again` is our reader's network. Returns who has read it back."""
    probe = probe_batch(tokenizer, read_object(folder / "config.json")[POSITIONS])
    ours = expected(probe)
    require_equal(probe, ours, again(probe), "our reader")
    return check_by_transformers(folder, architecture, probe, ours)


def check_by_transformers(folder: Path, architecture: str, probe: Batch, ours: Mapping[str, Tensor]) -> str:
    """Compares transformers' tokenizer and outputs with ours on the probe; only the tokenizer if there is no `architecture`."""
    if not find_spec("transformers"):
        return "electra alone (transformers is not installed)"
    import transformers

    with quiet(transformers), torch.no_grad():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        pairs, most = (list(PROBE), list(reversed(PROBE))), read_object(folder / "config.json")[POSITIONS]
        inputs = tokenizer(*pairs, padding=True, truncation=True, max_length=most, return_tensors="pt")
        segments = inputs.get("token_type_ids", probe.segments)  # ModernBERT has none
        if not inputs["input_ids"].equal(probe.ids) or not segments.equal(probe.segments):
            raise CorruptError("transformers' tokenizer and ours read the probe differently. The folder was not kept.")
        if not architecture:
            return "electra"
        outputs = getattr(transformers, architecture).from_pretrained(folder, local_files_only=True).eval()(**inputs)
    compared = {name: tensor for name, tensor in ours.items() if name in outputs}
    assert compared, f"no output of {architecture} to compare"
    require_equal(probe, compared, outputs, "transformers")
    return "electra and transformers"


def require_equal(probe: Batch, ours: Mapping[str, Tensor], others: Mapping[str, Tensor], who: str) -> None:
    """Raises an error if outputs differ by more than TOLERANCE. Padded positions of per-token outputs are ignored."""
    for name, difference in largest_differences(probe, ours, others).items():
        if not difference <= TOLERANCE * max(1.0, ours[name].abs().max().item()):
            raise CorruptError(
                f"{who} gets different logits from the export (largest difference {difference:.2g} in {name}). It was not kept."
            )


def largest_differences(probe: Batch, ours: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest absolute difference of each output."""
    largest = {}
    for name, expected in ours.items():
        other = others[name].reshape(expected.shape)
        if expected.shape[:2] == probe.ids.shape:
            expected, other = expected[probe.is_real], other[probe.is_real]
        largest[name] = (expected - other).abs().max().item()
    return largest


class PretrainedNetwork(nn.Module):
    """An encoder with its head, with the outputs of its transformers class."""

    def __init__(self, network: Pretrained):
        super().__init__()
        self.encoder, self.head = network.encoder, network.head

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        hidden = encode(self.encoder, batch)
        if self.head is None:
            return {"last_hidden_state": hidden}
        logits = self.head(hidden, self.encoder) if isinstance(self.head, TokenHead) else self.head(hidden)
        if isinstance(self.head, ModernDetectionHead):  # beside the logit of "original", which is 0
            logits = F.pad(logits[:, :, None], (1, 0))
        return {"logits": logits, "last_hidden_state": hidden}


def answers_of(network: nn.Module) -> Answers:
    """A function from a batch to the outputs of `network`, without dropout. It may be called during training: it restores the modes."""

    def answers(batch: Batch) -> dict[str, Tensor]:
        modes = [(part, part.training) for part in network.modules()]
        with torch.no_grad():
            outputs = network.eval()(batch.to(next(network.parameters()).device))
        for part, mode in modes:
            part.training = mode
        return {name: tensor.float().cpu() for name, tensor in outputs.items()}

    return answers


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
