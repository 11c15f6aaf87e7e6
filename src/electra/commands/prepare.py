"""electra prepare: text to token shards."""

from pathlib import Path
from typing import Annotated

import typer

from electra.commands.console import Documents, OnBad, TextKey, say


def prepare_command(
    out: Annotated[Path, typer.Argument(help="folder for the token shards")],
    inputs: Annotated[
        list[Path], typer.Argument(help="files and folders of .txt, .jsonl, .parquet or arrow; plain or compressed")
    ],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json or a folder with one")],
    heldout: Annotated[float, typer.Option(help="share of documents kept for evaluation")] = 0.01,
    unit_bytes: Annotated[
        int, typer.Option(help="bytes of text per shard, and the most that an interruption loses")
    ] = 4 << 20,
    workers: Annotated[int | None, typer.Option(help="processes", show_default="all cores")] = None,
    text_key: TextKey = "text",
    documents: Documents = "blank-line",
    on_bad: OnBad = "stop",
) -> None:
    """Documents -> token shards. Run it again after an interruption: it does what is missing."""
    import electra

    reading = {"text_key": text_key, "documents": documents, "on_bad": on_bad}
    manifest = electra.prepare(inputs, out, tokenizer, heldout, workers, unit_bytes, **reading)
    train, held = manifest.splits["train"], manifest.splits["heldout"]
    say(
        f"{out}: {train.tokens:,} tokens in {train.documents:,} documents, "
        f"{held.documents:,} documents ({held.tokens:,} tokens) held out"
    )
    if heldout and not held.documents:
        say(
            f"Nothing is held out, so training will have no held-out metrics: this text is {train.documents:,} documents. Where "
            "every line is one, give --documents line; where every file is one, --documents file."
        )
    skipped, repaired, empty = manifest.skipped_documents, manifest.replaced_documents, manifest.empty_files
    exceptions = {"skipped": skipped, "repaired": repaired, "empty files": empty}
    if any(exceptions.values()):
        say(", ".join(f"{name}: {count}" for name, count in exceptions.items() if count))
