"""Reading other people's files: tensors (names and shapes first, values on request) and tokenizers (BERT's vocab.txt or a
tokenizer.json; RoBERTa's has other names for the special tokens).

Whoever wrote such a folder may be hostile. Only files inside the folder are read, whatever an index or a link in it
says; sizes are checked before memory is allocated; a pickle is read only on request, and then only as weights.
"""

import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from electra.base.errors import CorruptError, DataError, first_line
from electra.base.files import is_plain_name, read_object
from electra.data.tokenizer import SPECIAL_TOKENS, adopt_vocabulary, frame, read_tokenizer
from electra.train.checkpoint import require_floats

WEIGHTS, INDEX, BIN = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
MOST_TENSORS, MOST_HEADER = 10_000, 1 << 24
OTHER_WEIGHTS = {
    "tf_model.h5": "Keras weights",
    "flax_model.msgpack": "Flax weights",
    "model.onnx": "an ONNX graph",
    "adapter_model.safetensors": "an adapter, which is not a network by itself",
}
ROBERTA_TOKENS = dict(zip(("<pad>", "<unk>", "<s>", "</s>", "<mask>"), SPECIAL_TOKENS, strict=True))
OTHERS = ("spiece.model", "sentencepiece.bpe.model", "vocab.json")
OF_BERT = ("Bert", "Electra", "DistilBert", "MobileBert", "ConvBert")
"""Tokenizers of transformers that cut text as BERT's does."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a model, read on demand. `where` is the file that messages name."""

    where: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]

    def floats(self, name: str) -> Tensor:
        tensor = self.read(name)
        require_floats(self.where, {name: tensor})
        return tensor.float()


def inside(folder: Path, name: object) -> Path:
    """A file of the folder. Links may lead only to the blobs of the Hub's cache, and only if the folder is a snapshot in it."""
    if not isinstance(name, str) or not is_plain_name(name):
        raise CorruptError(f"{folder} names {str(name)[:60]!r}, which is not a file in that folder.")
    try:
        home, target = folder.resolve(), (folder / name).resolve()
    except (RuntimeError, OSError) as error:
        raise CorruptError(f"{folder / name} is a circular link ({error}).") from None
    homes = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    if target.parent not in homes:
        raise CorruptError(f"{folder / name} is a link that leads out of its folder. Copy the file there.")
    if not target.is_file():
        raise CorruptError(f"{folder / name} is missing, or not a regular file. Restore it.")
    return folder / name


def folder_weights(folder: Path, allow_bin: bool = False) -> Weights:
    """The weights of a folder in transformers' format: one file, or several with an index."""
    for name, opened in ((WEIGHTS, open_safetensors), (BIN, open_bin)):
        is_one_file, index = os.path.lexists(folder / name), folder / f"{name}.index.json"
        if not is_one_file and not index.exists():
            continue
        if name == BIN and not allow_bin:
            raise CorruptError(
                f"{folder} has its weights as {name} only, a pickle, which can run code. Convert them to safetensors, or allow "
                "the pickle: only weights are then read from it.", ("allow_bin",)
            )  # fmt: skip
        return opened(inside(folder, name)) if is_one_file else joined(folder, index, opened)
    other = next((it for it in OTHER_WEIGHTS if (folder / it).exists()), "")
    what = f"it has {OTHER_WEIGHTS[other]} ({other}) instead" if other else "nor a TensorFlow checkpoint (NAME.index)"
    raise DataError(f"{folder} has no {WEIGHTS}; {what}. Save it with transformers' save_pretrained first.")


def joined(folder: Path, index: Path, opened: Callable[[Path], Weights]) -> Weights:
    listed = read_object(inside(folder, index.name)).get("weight_map")
    if not isinstance(listed, dict) or not listed or len(listed) > MOST_TENSORS:
        raise CorruptError(f"{index} has no weight_map of at most {MOST_TENSORS:,} tensors.")
    files = {name: inside(folder, name) for name in dict.fromkeys(listed.values())}
    parts = {name: opened(path) for name, path in files.items()}
    homes = {tensor: part for part in parts.values() for tensor in part.shapes}
    if sum(len(part.shapes) for part in parts.values()) != len(homes):
        raise CorruptError(f"{index}: two of its files hold the same tensor.")
    if different := sorted(homes.keys() ^ listed.keys()):
        raise CorruptError(f"{index} and its files do not name the same tensors: {different[0]}.")
    shapes = {tensor: part.shapes[tensor] for tensor, part in homes.items()}
    return Weights(index, shapes, lambda tensor: homes[tensor].read(tensor))


def open_safetensors(path: Path) -> Weights:
    """The weights of a safetensors file. The library checks shapes and offsets against the file; we check the size of the header."""
    with path.open("rb") as file:
        start = file.read(8)
    header, size = int.from_bytes(start, "little"), path.stat().st_size
    if len(start) < 8 or header > min(size - 8, MOST_HEADER):
        # only if the header is invalid: a valid length such as 0x4B50 ("PK") or 0x0280 begins like a zip or a pickle
        if start[:2] == b"PK" or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
            raise CorruptError(f"{path} is a pickle under the name of a safetensors file. Such a file is not read.")
        raise CorruptError(f"{path} cannot be read: a header of {header:,} bytes in a file of {size:,}.")
    try:
        handle = safe_open(path, "pt")
        names = handle.keys()
        if len(names) > MOST_TENSORS:
            raise CorruptError(f"{path} has {len(names):,} tensors, at most {MOST_TENSORS:,} are read.")
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise CorruptError(f"{path} cannot be read: {error}.") from None
    return Weights(path, shapes, lambda name: handle.get_tensor(name))


def open_bin(path: Path) -> Weights:
    """The weights of a torch pickle, read with weights_only: torch refuses everything else in it."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > path.stat().st_size:
            raise CorruptError(f"{path} is compressed: {unpacked:,} bytes unpacked. torch does not write such files.")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise nothing more specific
        reason = first_line(error)[:200]
        raise CorruptError(f"{path} holds more than weights, or is damaged ({reason}). It was not read.") from None
    tables = tensors.values() if isinstance(tensors, dict) else [None]
    if not all(isinstance(it, Tensor) and it.layout == torch.strided for it in tables):
        raise CorruptError(f"{path} is not a table of tensors, or has sparse ones.")
    for name, tensor in tensors.items():
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CorruptError(f"{path}: {str(name)[:60]} is {tuple(tensor.shape)}, larger than its stored data.")
    return Weights(path, {str(it): tuple(tensor.shape) for it, tensor in tensors.items()}, tensors.__getitem__)


def listed(names: Iterable[str], most: int = 4) -> str:
    """The first few of many names, for messages; names that differ only in the layer count as one."""
    kinds = list(dict.fromkeys(re.sub(r"(?<=[._/])\d+(?=[._/])", "N", name.replace("\n", "\\n")) for name in names))
    return ", ".join(kinds[:most]) + (f" and {len(kinds) - most} more" if len(kinds) > most else "")


# Tokenizers


def folder_vocabulary(folder: Path, lowercase: bool | None, notes: list[str]) -> Tokenizer | None:
    """The tokenizer of a folder; None if there is none. Decisions that had to be made are added to `notes`."""
    if (folder / "tokenizer.json").exists():
        return file_vocabulary(inside(folder, "tokenizer.json"), lowercase, notes)
    if not (folder / "vocab.txt").exists():
        if other := next((name for name in OTHERS if (folder / name).exists()), ""):
            how = "Load it with transformers' AutoTokenizer and save_pretrained it, which writes one"
            raise DataError(f"{folder} has {other}, but no tokenizer.json. {how}.")
        return None
    settings = described(folder, "tokenizer_config.json")
    refuse_code(folder / "tokenizer_config.json", settings)
    do_lower_case = settings.get("do_lower_case")
    known = lowercase if lowercase is not None else do_lower_case if isinstance(do_lower_case, bool) else None
    strip, split = settings.get("strip_accents"), settings.get("tokenize_chinese_chars") is not False
    tokenizer = adopted(inside(folder, "vocab.txt"), known, strip if isinstance(strip, bool) else None, split, notes)
    refuse_more_than_pieces(folder, tokenizer)
    return tokenizer


def described(folder: Path, name: str) -> dict[str, Any]:
    return read_object(inside(folder, name)) if (folder / name).exists() else {}


def refuse_more_than_pieces(folder: Path, tokenizer: Tokenizer) -> None:
    """Refuses a vocab.txt that is only a part of its tokenizer: Japanese text is cut by MeCab first, and tokens that were added to
    a vocabulary are in files of their own. The same text would have other ids."""
    settings, path = described(folder, "tokenizer_config.json"), folder / "vocab.txt"
    named = settings.get("tokenizer_class") or described(folder, "config.json").get("tokenizer_class")
    name = str(named or "BertTokenizer")
    if name.removesuffix("Fast").removesuffix("Tokenizer") not in OF_BERT:
        raise DataError(f"{path} is of a {name[:60]}, which does not cut text as BERT's does. Use another model.")
    decoder = settings.get("added_tokens_decoder")
    entries = decoder.values() if isinstance(decoder, dict) else ()
    tokens = {
        *described(folder, "added_tokens.json"),
        *(str(it.get("content")) for it in entries if isinstance(it, dict)),
    }
    if more := sorted(tokens - tokenizer.get_vocab().keys()):
        how = "Load it with transformers' AutoTokenizer and save_pretrained it, which writes tokenizer.json"
        raise DataError(f"{path} lacks tokens that were added to it: {listed(more)}. {how}.")


def file_vocabulary(path: Path, lowercase: bool | None, notes: list[str]) -> Tokenizer:
    """The tokenizer of a file. `lowercase` is for a vocab.txt, which does not say whether to lowercase; a tokenizer.json does."""
    if path.suffix != ".json":
        return adopted(path, lowercase, None, True, notes)
    content = read_object(path)
    renamed = with_our_tokens(content)
    tokenizer = read_tokenizer(path, json.dumps(renamed or content))
    if renamed:
        frame(tokenizer)
        pairs = ", ".join(f"{theirs} {ours}" for theirs, ours in ROBERTA_TOKENS.items())
        notes.append(f"the special tokens have our names now: {pairs}. Pairs of texts have one [SEP] between them.")
    return tokenizer


def adopted(path: Path, lowercase: bool | None, strip: bool | None, split_cjk: bool, notes: list[str]) -> Tokenizer:
    """The tokenizer of a vocab.txt. If `lowercase` is None, the vocabulary decides: a cased one has capitals."""
    tokenizer = adopt_vocabulary(path, bool(lowercase is None or lowercase), strip, split_cjk)
    if lowercase is not None:
        return tokenizer
    pieces = [piece for piece in tokenizer.get_vocab() if not (piece.startswith("[") and piece.endswith("]"))]
    if any(piece != piece.lower() for piece in pieces):
        notes.append(
            f"{path.name} has capitals and do_lower_case is not set: text keeps its case. Set lowercase if it should not."
        )
        return adopt_vocabulary(path, False, strip, split_cjk)
    notes.append(f"{path.name} has no capitals and do_lower_case is not set: text is lowercased, accents are stripped.")
    return tokenizer


def with_our_tokens(content: dict[str, Any]) -> dict[str, Any] | None:
    """RoBERTa's tokenizer with our names for its special tokens and without its post-processor; None if it is not RoBERTa's, or
    has our names already."""
    names: set[str] = set()

    def renamed(value: Any) -> Any:
        match value:
            case str():
                names.add(value)
                return ROBERTA_TOKENS.get(value, value)
            case dict():
                return {renamed(key): renamed(it) for key, it in value.items()}
            case list():
                return [renamed(it) for it in value]
        return value

    parts = {key: renamed(content.get(key)) for key in ("model", "added_tokens")}
    if not ROBERTA_TOKENS.keys() <= names or names & set(SPECIAL_TOKENS):
        return None
    return {**content, **parts, "post_processor": None}


def refuse_code(path: Path, content: Mapping[str, Any]) -> None:
    """Refuses a folder that names its own Python code: we never run it, and such a network is not what its model type says."""
    for key in ("auto_map", "custom_pipelines", "_attn_implementation_internal"):
        if content.get(key):
            raise CorruptError(
                f"{path} refers to custom code ({key}: {str(content[key])[:80]}), which is never run here. If the weights are plain "
                f"ones, remove {key} from a copy."
            )
