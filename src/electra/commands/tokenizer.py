"""electra tokenizer: train one from text, or adopt one."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from electra.base.errors import SettingsError
from electra.commands.console import Documents, OnBad, TextKey, say


def tokenizer_command(
    out: Annotated[Path, typer.Argument(help="folder for tokenizer.json")],
    inputs: Annotated[list[Path] | None, typer.Argument(help="text to train on, as for prepare")] = None,
    kind: Annotated[Literal["wordpiece", "unigram", "bpe"], typer.Option()] = "wordpiece",
    vocab_size: Annotated[int, typer.Option()] = 30522,
    lowercase: Annotated[bool, typer.Option("--lowercase/--cased")] = True,
    strip_accents: Annotated[
        bool | None, typer.Option("--strip-accents/--keep-accents", show_default="kept; with --from-vocab as BERT does")
    ] = None,
    split_cjk: Annotated[bool, typer.Option("--split-cjk/--keep-cjk", help="every Chinese character is a word")] = True,
    from_vocab: Annotated[Path | None, typer.Option(help="adopt a BERT vocab.txt instead of training")] = None,
    from_json: Annotated[Path | None, typer.Option(help="adopt a tokenizer.json instead of training")] = None,
    text_key: TextKey = "text",
    documents: Documents = "blank-line",
    on_bad: OnBad = "stop",
) -> None:
    """Train a tokenizer from text, or adopt one."""
    import electra
    from electra.data.tokenizer import adopt_vocabulary, load_tokenizer, save_tokenizer

    if sum(map(bool, (inputs, from_vocab, from_json))) != 1:
        raise SettingsError("give either text to train on, or --from-vocab, or --from-json.")
    if from_vocab:
        path = save_tokenizer(adopt_vocabulary(from_vocab, lowercase, strip_accents, split_cjk), out)
    elif from_json:
        path = save_tokenizer(load_tokenizer(from_json), out)
    else:
        words = {"kind": kind, "lowercase": lowercase, "strip_accents": bool(strip_accents), "split_cjk": split_cjk}
        reading = {"text_key": text_key, "documents": documents, "on_bad": on_bad}
        path = electra.train_tokenizer(inputs or [], out, vocab_size, **words, **reading)
    say(f"{path}: {load_tokenizer(path).get_vocab_size():,} tokens")
