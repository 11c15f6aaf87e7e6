"""Scored tokens for the terminal."""

from rich.style import Style
from rich.text import Text

from electra.inspector.analyse import ScoredToken


def coloured(tokens: list[ScoredToken]) -> Text:
    """Each token with its probability, on a background that goes from none to red; pieces of a word stay together."""
    text = Text()
    for number, token in enumerate(tokens):
        joined = number and token.start == tokens[number - 1].end
        text.append("" if joined or not number else " ")
        red = min(255, int(255 * token.probability))
        style = Style(bgcolor=f"rgb({red},0,0)", color="white") if token.probability >= 0.15 else Style()
        text.append(token.token, style)
        text.append(f"·{token.probability:.2f}", Style(dim=True))
    return text
