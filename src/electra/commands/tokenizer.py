"""electra tokenizer: train one from text, adopt one, or extend one with the words of a field."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from electra.base.errors import SettingsError, command
from electra.commands.console import Documents, OnBad, TextKey, Trust, refuse_swapped, say


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
    extend: Annotated[
        Path | None, typer.Option(help="model, run or tokenizer to add frequent words of the text to")
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="number of tokens to add with --extend", min=1)] = 1000,
    text_key: TextKey = "text",
    documents: Documents = "blank-line",
    on_bad: OnBad = "stop",
    trust: Trust = False,
) -> None:
    """Train a tokenizer from text, adopt one, or add the words of a field to one."""
    import electra
    from electra.data.tokenizer import adopt_vocabulary, load_tokenizer, save_tokenizer

    refuse_swapped(out, "tokenizer")
    reading = {"text_key": text_key, "documents": documents, "on_bad": on_bad}
    if extend and inputs and not (from_vocab or from_json):
        path, pieces = electra.extend_tokenizer(extend, inputs, out, new_tokens, **reading)
        say(f"{path}: {load_tokenizer(path).get_vocab_size():,} tokens, of which {len(pieces):,} are new")
        say("  " + ", ".join(f"{token} ({' '.join(old)})" for token, old in list(pieces.items())[:8]) + ", …")
        recipe = f"RECIPE+{extend / 'recipe.toml'}" if (extend / "recipe.toml").is_file() else "RECIPE"
        prepare = command("prepare", "SHARDS", "TEXT", "--tokenizer", out)
        return say(
            f"next: {prepare}   and   {command('pretrain', recipe, f'start={extend}', 'data=SHARDS', 'run=RUN')}"
        )
    if sum(map(bool, (inputs, from_vocab, from_json))) != 1 or extend:
        raise SettingsError("give one of text to train on, --from-vocab and --from-json; --extend needs text.")
    if from_vocab:
        path = save_tokenizer(adopt_vocabulary(from_vocab, lowercase, strip_accents, split_cjk), out)
    elif from_json:
        path = save_tokenizer(load_tokenizer(from_json), out)
    else:
        words = {"kind": kind, "lowercase": lowercase, "strip_accents": bool(strip_accents), "split_cjk": split_cjk}
        path = electra.train_tokenizer(inputs or [], out, vocab_size, **words, **reading)
    written = load_tokenizer(path)
    size, normalizer = written.get_vocab_size(), written.normalizer
    fewer = f", fewer than {vocab_size:,}: the text has no more" if inputs and size < vocab_size else ""
    is_lower = normalizer is not None and normalizer.normalize_str("A") == "a"
    remedy = "" if from_json else "; --cased keeps capitals"
    say(f"{path}: {size:,} tokens{fewer}; text is {f'lowercased{remedy}' if is_lower else 'not lowercased'}")
