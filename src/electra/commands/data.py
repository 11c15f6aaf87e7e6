"""The verbs that make tokenizers and token shards."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from electra.base.errors import SettingsError

Inputs = Annotated[
    list[Path], typer.Argument(help="files and folders of .txt, .jsonl, .parquet or arrow; plain or packed")
]
TextKey = Annotated[str, typer.Option(help="key or column that holds the text")]
Documents = Annotated[
    Literal["blank-line", "file", "line"], typer.Option(help="what ends a document in .txt")
]
OnBad = Annotated[Literal["stop", "skip", "replace"], typer.Option(help="broken bytes, NULs, JSON lines")]


def tokenizer(
    out: Annotated[Path, typer.Argument(help="folder for tokenizer.json")],
    inputs: Annotated[list[Path] | None, typer.Argument(help="text to train on, as for prepare")] = None,
    kind: Annotated[Literal["wordpiece", "unigram", "bpe"], typer.Option()] = "wordpiece",
    vocab_size: Annotated[int, typer.Option()] = 30522,
    lowercase: Annotated[bool, typer.Option("--lowercase/--cased")] = True,
    strip_accents: Annotated[
        bool | None,
        typer.Option("--strip-accents/--keep-accents", show_default="kept; with --from-vocab as BERT does"),
    ] = None,
    split_cjk: Annotated[
        bool, typer.Option("--split-cjk/--keep-cjk", help="every Chinese character is a word")
    ] = True,
    from_vocab: Annotated[
        Path | None, typer.Option(help="adopt a BERT vocab.txt instead of training")
    ] = None,
    from_json: Annotated[Path | None, typer.Option(help="adopt a tokenizer.json instead of training")] = None,
    text_key: TextKey = "text",
    documents: Documents = "blank-line",
    on_bad: OnBad = "stop",
) -> None:
    """Train a tokenizer from text, or adopt one."""
    from electra.base import config
    from electra.data.corpus import Corpus, CorpusSettings
    from electra.data.tokenizer import (
        TokenizerSettings,
        adopt_vocabulary,
        load_tokenizer,
        save_tokenizer,
        train_tokenizer,
    )

    if sum(map(bool, (inputs, from_vocab, from_json))) != 1:
        raise SettingsError("give either text to train on, or --from-vocab, or --from-json.")
    if from_vocab:
        made = adopt_vocabulary(from_vocab, lowercase, strip_accents, split_cjk)
    elif from_json:
        made = load_tokenizer(from_json)
    else:
        assert inputs is not None
        tree = {
            "kind": kind,
            "vocab_size": vocab_size,
            "lowercase": lowercase,
            "strip_accents": bool(strip_accents),
        }
        settings = config.validate(TokenizerSettings, tree | {"split_cjk": split_cjk})
        corpus = CorpusSettings(text_key=text_key, documents=documents, on_bad=on_bad)
        made = train_tokenizer(Corpus(inputs, corpus), settings)
    path = save_tokenizer(made, out)
    print(f"{path}: {made.get_vocab_size():,} tokens")


def prepare(
    out: Annotated[Path, typer.Argument(help="folder for the token shards")],
    inputs: Inputs,
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json or a folder with one")],
    heldout: Annotated[float, typer.Option(help="share of documents kept for evaluation")] = 0.01,
    workers: Annotated[int | None, typer.Option(help="processes", show_default="all cores")] = None,
    text_key: TextKey = "text",
    documents: Documents = "blank-line",
    on_bad: OnBad = "stop",
) -> None:
    """Documents -> token shards. Run it again after an interruption: it does what is missing."""
    from electra.base import config
    from electra.data.prepare import PrepareSettings
    from electra.data.prepare import prepare as run

    corpus = {"text_key": text_key, "documents": documents, "on_bad": on_bad}
    settings = config.validate(PrepareSettings, {"corpus": corpus, "heldout_share": heldout})
    manifest = run(inputs, out, tokenizer, settings, workers)
    train, held = manifest.splits["train"], manifest.splits["heldout"]
    print(
        f"{out}: {train.tokens:,} tokens in {train.documents:,} documents, "
        f"{held.documents:,} documents ({held.tokens:,} tokens) held out"
    )
    left = {
        "skipped": manifest.skipped_documents,
        "repaired": manifest.replaced_documents,
        "empty files": manifest.empty_files,
    }
    if any(left.values()):
        print(", ".join(f"{name}: {count}" for name, count in left.items() if count))
