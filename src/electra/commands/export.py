"""electra export: a model in the forms that transformers, sentence-transformers and onnxruntime read."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from electra.commands.console import Trust, say


def export_command(
    model: Annotated[Path, typer.Argument(help="a run, an export, a fine-tuned folder or a transformers folder")],
    out: Annotated[Path, typer.Argument(help="new folder; a run is exported as discriminator/ and generator/")],
    form: Annotated[
        Literal["transformers", "onnx", "sentence-transformers"], typer.Option("--format", help="format to write")
    ] = "transformers",
    int8: Annotated[bool, typer.Option("--int8", help="ONNX: also a quantized copy, its loss measured")] = False,
    dev: Annotated[
        Path | None,
        typer.Option(help="labelled rows on which to measure what int8 costs a fine-tuned model", show_default=False),
    ] = None,
    pooling: Annotated[
        Literal["mean", "cls"], typer.Option(help="sentence-transformers: mean of all tokens, or [CLS] alone")
    ] = "mean",
    length: Annotated[
        int | None,
        typer.Option(help="sentence-transformers: cut texts after so many tokens", show_default="that of pre-training"),
    ] = None,
    language: Annotated[list[str] | None, typer.Option(help="code for the model card, such as en; repeatable")] = None,
    license: Annotated[str, typer.Option(help="license for the model card, such as apache-2.0")] = "",
    dataset: Annotated[list[str] | None, typer.Option(help="dataset on the Hub, for the card; repeatable")] = None,
    shard_size: Annotated[str, typer.Option(help="split larger weights into several files with an index")] = "5GB",
    trust: Trust = False,
) -> None:
    """A model for transformers, sentence-transformers or ONNX, checked by a fresh process: same ids, same logits."""
    import electra

    chosen: dict[str, Any] = {"format": form, "int8": int8, "dev": dev, "pooling": pooling, "length": length}
    chosen |= {"shard_size": shard_size}
    for exported in electra.export(model, out, language or (), license, dataset or (), **chosen):
        say(f"{exported.folder}: {exported.note}")
