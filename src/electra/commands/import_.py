"""electra import: a checkpoint of other people as a model folder of ours."""

from pathlib import Path
from typing import Annotated

import typer

from electra.base.errors import command
from electra.commands.console import say


def import_command(
    source: Annotated[Path, typer.Argument(help="transformers folder, TensorFlow checkpoint or folder with one")],
    out: Annotated[
        Path, typer.Argument(help="new model folder; with --generator it gets discriminator/ and generator/")
    ],
    generator: Annotated[Path | None, typer.Option(help="the generator that was trained with it")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="vocab.txt, tokenizer.json or a folder with one")] = None,
    lowercase: Annotated[
        bool | None,
        typer.Option("--lowercase/--cased", help="for a vocab.txt", show_default="as its folder or its pieces say"),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="number of attention heads, if no config says it", min=1)] = None,
    allow_bin: Annotated[bool, typer.Option("--allow-bin", help="read pytorch_model.bin (weights only)")] = False,
) -> None:
    """Read ELECTRA, BERT, RoBERTa or ModernBERT of transformers or TensorFlow 1 as a model folder."""
    import electra

    imported = electra.import_model(
        source, out, generator, tokenizer=tokenizer, lowercase=lowercase, heads=heads, allow_bin=allow_bin
    )
    for name, (folder, read_by) in imported.folders.items():
        say(f"{folder}: {name}, {read_by}")
    for note in imported.notes:
        say(f"  {note}")
    for line in imported.left_out_lines():
        say(f"  left out: {line}")
    if imported.left_out:
        say(f"  every name: {imported.recipe.with_name('import.json')}")
    pretrain = command("pretrain", f"RECIPE+{imported.recipe}", f"start={out}", "data=SHARDS", "run=RUN")
    say(f"next: {command('finetune', out, 'sst2')}   or   {pretrain}")
