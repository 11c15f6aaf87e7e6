"""Tokenizers of other people's folders: BERT's vocab.txt, or a tokenizer.json, of which RoBERTa's calls its special tokens
otherwise."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from electra.base.errors import CorruptError, DataError
from electra.base.files import read_json, read_object
from electra.data.tokenizer import SPECIAL_TOKENS, adopt_vocabulary, read_tokenizer
from electra.interop.weights import inside

ROBERTA_TOKENS = dict(zip(("<pad>", "<unk>", "<s>", "</s>", "<mask>"), SPECIAL_TOKENS, strict=True))
OTHERS = ("spiece.model", "sentencepiece.bpe.model", "vocab.json")


def folder_vocabulary(folder: Path, lowercase: bool | None, notes: list[str]) -> Tokenizer | None:
    """None where there is none. What had to be decided is said in `notes`."""
    if (folder / "tokenizer.json").exists():
        return file_vocabulary(inside(folder, "tokenizer.json"), lowercase, notes)
    if not (folder / "vocab.txt").exists():
        if other := next((name for name in OTHERS if (folder / name).exists()), ""):
            how = "Load it with transformers' AutoTokenizer and save_pretrained it, which writes one"
            raise DataError(f"{folder} has {other}, but no tokenizer.json. {how}.")
        return None
    path = folder / "tokenizer_config.json"
    settings = read_object(inside(folder, path.name)) if path.exists() else {}
    refuse_code(path, settings)
    stated = settings.get("do_lower_case")
    known = lowercase if lowercase is not None else stated if isinstance(stated, bool) else None
    strip, split = settings.get("strip_accents"), settings.get("tokenize_chinese_chars") is not False
    return adopted(inside(folder, "vocab.txt"), known, strip if isinstance(strip, bool) else None, split, notes)


def file_vocabulary(path: Path, lowercase: bool | None, notes: list[str]) -> Tokenizer:
    """`lowercase` is for a vocab.txt, which does not say it; a tokenizer.json does."""
    if path.suffix != ".json":
        return adopted(path, lowercase, None, True, notes)
    content = read_json(path)
    if isinstance(content, dict) and (renamed := with_our_tokens(content)):
        pairs = ", ".join(f"{theirs} {ours}" for theirs, ours in ROBERTA_TOKENS.items())
        notes.append(f"the special tokens have our names now: {pairs}. Pairs of texts have one [SEP] between them.")
        return read_tokenizer(path, json.dumps(renamed))
    return read_tokenizer(path, json.dumps(content))


def adopted(path: Path, lowercase: bool | None, strip: bool | None, split_cjk: bool, notes: list[str]) -> Tokenizer:
    """Whether a vocab.txt is of lowered text shows: one that is not has capitals."""
    tokenizer = adopt_vocabulary(path, bool(lowercase is None or lowercase), strip, split_cjk)
    if lowercase is not None:
        return tokenizer
    pieces = [piece for piece in tokenizer.get_vocab() if not (piece.startswith("[") and piece.endswith("]"))]
    if any(piece != piece.lower() for piece in pieces):
        notes.append(
            f"{path.name} has capitals and nothing says do_lower_case: text keeps its case. Say so if it should not."
        )
        return adopt_vocabulary(path, False, strip, split_cjk)
    notes.append(f"{path.name} has no capitals and nothing says do_lower_case: text is lowered, accents are stripped.")
    return tokenizer


def with_our_tokens(content: dict[str, Any]) -> dict[str, Any] | None:
    """RoBERTa's tokenizer with our names for its special tokens, and our way to put texts together; None where they are ours."""
    model = content.get("model")
    pieces = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(pieces, dict | list):
        return None
    items: list[Any] = list(pieces.items()) if isinstance(pieces, dict) else pieces
    if not all(isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str) for item in items):
        return None
    added = [it for it in content.get("added_tokens") or () if isinstance(it, dict)]
    known = {item[0] for item in items} | {str(it.get("content")) for it in added}
    if not ROBERTA_TOKENS.keys() <= known or known & ROBERTA_TOKENS.keys() & set(SPECIAL_TOKENS):
        return None
    renamed = [(ROBERTA_TOKENS.get(name, name), value) for name, value in items]
    numbers: dict[str, Any] = {name: number for number, (name, _) in enumerate(renamed)}
    if isinstance(pieces, dict):
        numbers = dict(renamed)
    tokens = [{**it, "content": ROBERTA_TOKENS.get(str(it.get("content")), it.get("content"))} for it in added]
    numbers |= {str(it["content"]): it.get("id") for it in tokens}
    unknown = model.get("unk_token")
    return {
        **content,
        "added_tokens": tokens,
        "model": {
            **model,
            "vocab": dict(renamed) if isinstance(pieces, dict) else renamed,
            **({"unk_token": ROBERTA_TOKENS.get(unknown, unknown)} if isinstance(unknown, str) else {}),
        },
        "post_processor": template(numbers),
    }  # fmt: skip


def template(numbers: Mapping[str, Any]) -> dict[str, Any]:
    def special(name: str, segment: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": segment}}

    def sequence(name: str, segment: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": segment}}

    single = [special("[CLS]", 0), sequence("A", 0), special("[SEP]", 0)]
    ends = {name: {"id": name, "ids": [numbers[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")}
    pair = [*single, sequence("B", 1), special("[SEP]", 1)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": ends}


def refuse_code(path: Path, content: Mapping[str, Any]) -> None:
    """A folder may name Python files of its own to be run: nothing here does, and such a network is not what its type says."""
    for key in ("auto_map", "custom_pipelines", "_attn_implementation_internal"):
        if content.get(key):
            raise CorruptError(
                f"{path} names code of its own ({key}: {str(content[key])[:80]}), which is never run here. If the weights are plain "
                f"ones, remove {key} from a copy."
            )
