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

LEAST_SHOWN = 0.15
LEGEND = (
    f"After each token: how probably it was replaced (0 to 1); on red from {LEAST_SHOWN} on, the brighter the more."
)


def detect_command(
    model: Annotated[Path, typer.Argument(help="a run folder or an exported model folder")],
    text: TextInput = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per line of text")] = False,
    trust: Trust = False,
) -> None:
    """Each token with its probability of having been replaced."""
    from electra.inspector import load

    loaded, lines = load(model), read_lines(text, keep_blank=True)
    console = terminal()
    if not as_json:
        console.print(LEGEND, style="dim", soft_wrap=True)
    for line in lines:
        tokens = loaded.detect(line)
        if as_json:
            say_json({"text": line, "tokens": [asdict(token) for token in tokens]})
        else:
            console.print(coloured(line, tokens), soft_wrap=True)


def coloured(line: str, tokens: "Sequence[ScoredToken]") -> "Text":
    """The text as it was written, each token followed by its probability, the suspicious ones on a red background."""
    from rich.style import Style
    from rich.text import Text

    text, shown = Text(), 0
    for token in tokens:
        text.append(visible(line[shown : token.start]))
        red = 80 + int(175 * token.probability)
        style = Style(bgcolor=f"rgb({red},0,0)", color="white") if token.probability >= LEAST_SHOWN else Style()
        text.append(visible(line[max(shown, token.start) : token.end]), style)
        text.append(f"·{token.probability:.2f}", Style(dim=True))
        shown = max(shown, token.end)
    text.append(visible(line[shown:]))
    return text
