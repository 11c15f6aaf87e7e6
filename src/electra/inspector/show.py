"""Text from the command line, and scored tokens for the terminal."""

import os
import sys
from pathlib import Path

from rich.style import Style
from rich.text import Text

from electra.base.errors import DataError
from electra.inspector.detect import ScoredToken


def coloured(tokens: list[ScoredToken]) -> Text:
    """Each token with its probability, on a background that goes from none to red; pieces of a word stay together."""
    text = Text()
    for number, token in enumerate(tokens):
        joined = number and token.start == tokens[number - 1].end
        text.append("" if joined or not number else " ")
        red = 80 + int(175 * token.probability)
        style = Style(bgcolor=f"rgb({red},0,0)", color="white") if token.probability >= 0.15 else Style()
        text.append(token.token, style)
        text.append(f"·{token.probability:.2f}", Style(dim=True))
    return text


def read_lines(text: str | None) -> list[str]:
    """A file's lines if `text` names one, `text` itself if not, standard input if it is absent."""
    if text is None:
        content = sys.stdin.read()
    elif os.path.isfile(text):  # noqa: PTH113  (False, not an error, where text is too long for a path)
        try:
            content = Path(text).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{text} is not UTF-8 (byte {error.start}). Convert it first.") from None
    else:
        content = text
    lines = [line for line in content.splitlines() if line.strip()]
    if not lines:
        raise DataError("there is no text to look at. Give some as an argument, a file or on standard input.")
    return lines
