"""electra detect: each token with its probability of having been replaced."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from electra.base.progress import visible
from electra.commands.console import TextInput, Trust, read_lines, say_json, terminal

if TYPE_CHECKING:
    from rich.text import Text

    from electra.inspector.detect import ScoredToken


def detect_command(
    model: Annotated[Path, typer.Argument(help="a run folder or an exported model folder")],
    text: TextInput = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line of text")] = False,
    trust: Trust = False,
) -> None:
    """Each token with its probability of having been replaced."""
    from electra.inspector import load

    loaded = load(model)
    console = terminal()
    for line in read_lines(text):
        tokens = loaded.detect(line)
        if as_json:
            say_json({"text": line, "tokens": [asdict(token) for token in tokens]})
        else:
            console.print(coloured(tokens), soft_wrap=True)


def coloured(tokens: "Sequence[ScoredToken]") -> "Text":
    """Each token with its probability, on a background that goes from none to red; pieces of a word stay together."""
    from rich.style import Style
    from rich.text import Text

    text = Text()
    for number, token in enumerate(tokens):
        text.append(" " if number and token.start != tokens[number - 1].end else "")
        red = 80 + int(175 * token.probability)
        style = Style(bgcolor=f"rgb({red},0,0)", color="white") if token.probability >= 0.15 else Style()
        text.append(visible(token.token), style)
        text.append(f"·{token.probability:.2f}", Style(dim=True))
    return text
