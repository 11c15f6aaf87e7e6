"""electra score, electra rerank: pseudo-log-likelihoods of texts from an Electric model."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from electra.base.errors import DataError, SettingsError
from electra.base.files import json_text
from electra.commands.console import TextInput, Trust, read_lines, say, say_json

ElectricModel = Annotated[Path, typer.Argument(help='a run folder whose objective is "electric", or its export')]


def score_command(
    model: ElectricModel,
    text: TextInput = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per line, with every token")] = False,
    trust: Trust = False,
) -> None:
    """Pseudo-log-likelihood of each line of text, in one pass (Electric models)."""
    from electra.inspector import load

    loaded = load(model)
    for line in read_lines(text, keep_blank=as_json):
        scored = loaded.score(line)
        if as_json:
            pairs = zip(scored.tokens, scored.token_scores, strict=True)
            tokens = [{"token": token, "score": float(value)} for token, value in pairs]
            say_json({"text": line, "score": scored.score, "tokens": tokens})
        else:
            mean = scored.score / max(1, len(scored.tokens))
            say(f"{scored.score:10.2f}  {mean:7.3f} per token  {line}")


def rerank_command(
    model: ElectricModel,
    lists: Annotated[Path, typer.Argument(help='jsonl, per line {"hypotheses": [{"text": …, "score": …}, …]}')],
    out: Annotated[Path | None, typer.Option(help="jsonl file to write", show_default="standard output")] = None,
    weight: Annotated[float, typer.Option(help="total = score + weight * pseudo-log-likelihood")] = 1.0,
    trust: Trust = False,
) -> None:
    """Sort n-best lists by their scores plus the model's pseudo-log-likelihood."""
    from electra.data.files import whole_file
    from electra.inspector import load
    from electra.inspector.detect import rerank

    if not lists.is_file():
        raise DataError(f"{lists} is not a file. Check the path.")
    if out is not None and out.exists() and out.samefile(lists):
        raise SettingsError(f"{out} is the input itself. Choose another --out.")
    if not math.isfinite(weight):
        raise SettingsError(f"--weight {weight} is not a finite number.")
    score = load(model).score
    score([])  # a model that cannot score raises here, before anything is written
    ranked = rerank(text_lines(lists), score, weight)
    if out is None:
        for record in ranked:
            say_json(record)
        return
    with whole_file(out) as file:
        file.writelines(f"{json_text(record)}\n".encode() for record in ranked)
    say(out)


def text_lines(path: Path) -> Iterator[str]:
    """Yields one line at a time: lists of hypotheses may be larger than memory."""
    from electra.data import files

    with files.opened(path) as source:
        yield from (line for _, line in files.decoded_lines(source))
