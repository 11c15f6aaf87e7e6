"""electra embed: a vector for each text of files of any size."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from electra.base.errors import counted
from electra.commands.console import Trust, say


def embed_command(
    model: Annotated[Path, typer.Argument(help="a run, an export, a fine-tuned folder or a transformers folder")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="csv, tsv, jsonl, json or parquet, or plain text with one text per line; compressed or not",
            show_default="standard input",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help=".parquet or .npy", show_default="FILE.embeddings.parquet, beside it")
    ] = None,
    pooling: Annotated[Literal["mean", "cls"], typer.Option(help="mean of all tokens, or [CLS] alone")] = "mean",
    text: Annotated[str | None, typer.Option(help="column of the text", show_default="guessed, and said")] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="column to keep beside the vectors in parquet; repeatable", show_default="text"),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="cut texts after this many tokens", show_default="read whole, in windows")
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="device")] = "auto",
    precision: Annotated[Literal["float32", "bfloat16"], typer.Option(help="precision of matrix products")] = "float32",
    force: Annotated[bool, typer.Option("--force", help="overwrite existing output")] = False,
    trust: Trust = False,
) -> None:
    """A vector for each text of files of any size, as parquet or .npy."""
    import electra

    chosen = {"pooling": pooling, "length": length, "device": device, "precision": precision}
    result = electra.embed(model, files or [Path("-")], out, text, keep or (), force, **chosen)
    say(f"{result.out}: {counted(result.texts, 'text')}, {result.width} numbers each, {result.rate}")
