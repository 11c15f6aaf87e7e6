"""Which documents are worth training on, by what can be counted: length, script, symbols, repeated lines. All are off unless set.

They are coarse on purpose, and need no model: a share of Latin letters is no language, but tells English from Thai."""

import re
from collections import Counter
from typing import Literal

from pydantic import Field

from electra.base.config import Settings

Script = Literal[
    "", "latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "bengali", "thai", "hangul", "kana", "han"
]
_SCRIPTS = {
    "latin": "A-Za-zªºÀ-ÖØ-öø-ɏḀ-ỿ",
    "cyrillic": "\u0400-\u052f",
    "greek": "\u0370-\u03ff\u1f00-\u1fff",
    "arabic": "\u0600-\u06ff\u0750-\u077f",
    "hebrew": "\u0590-\u05ff",
    "devanagari": "\u0900-\u097f",
    "bengali": "\u0980-\u09ff",
    "thai": "\u0e00-\u0e7f",
    "hangul": "\uac00-\ud7a3\u1100-\u11ff\u3130-\u318f",
    "kana": "\u3040-\u30ff\u3400-\u9fff",  # Japanese is written with both
    "han": "\u3400-\u9fff\U00020000-\U0003134f",
}
_LETTERS = {name: re.compile(f"[{letters}]") for name, letters in _SCRIPTS.items()}
_SYMBOL = re.compile(r"[^\w\s]|_")


class FilterSettings(Settings):
    """A document is removed if it has fewer than `min_characters` or more than `max_characters` (0: any number), if less than
    `script_share` of its letters are of `script`, if more than `symbol_share` of its characters but spaces are neither letters nor digits, or if
    more than `repeated_lines` of its characters are in lines that stood in it before. A document too long for one piece is
    judged by its first."""

    min_characters: int = Field(default=0, ge=0)
    max_characters: int = Field(default=0, ge=0)
    script: Script = ""
    script_share: float = Field(default=0.5, ge=0, le=1)
    symbol_share: float = Field(default=1.0, ge=0, le=1)
    repeated_lines: float = Field(default=1.0, ge=0, le=1)


def removed_by(text: str, filters: FilterSettings) -> str | None:
    """The name of the first filter that removes a document."""
    if len(text) < filters.min_characters:
        return "min_characters"
    if filters.max_characters and len(text) > filters.max_characters:
        return "max_characters"
    if filters.script:
        letters = sum(map(str.isalpha, text))
        if len(_LETTERS[filters.script].findall(text)) < filters.script_share * max(1, letters):
            return "script_share"
    if filters.symbol_share < 1:
        visible = len("".join(text.split()))
        if len(_SYMBOL.findall(text)) > filters.symbol_share * visible:
            return "symbol_share"
    if filters.repeated_lines < 1:
        lines = Counter(line.strip() for line in text.split("\n"))
        again = sum(len(line) * (count - 1) for line, count in lines.items())
        if again > filters.repeated_lines * sum(len(line) * count for line, count in lines.items()):
            return "repeated_lines"
    return None
