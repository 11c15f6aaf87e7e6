"""What every text goes through, wherever it came from."""

import re

_ODD = re.compile("[\r\x0b\x0c\x1c-\x1f\x85\u2028\u2029]")


def unify_lines(text: str) -> str:
    """LF ends a line and nothing else does: CRLF becomes LF, any other separator a space."""
    return _ODD.sub(" ", text.replace("\r\n", "\n")) if _ODD.search(text) else text


def cut_at_whitespace(text: str, start: int, limit: int) -> int:
    """Where a piece of at most `limit` characters from `start` ends: before its last whitespace, or, where it has
    none, anywhere. Whitespace stays with what follows, so that no tokenizer sees a word differently for the cut."""
    piece = text[start : start + limit]
    words = piece.rsplit(None, 1)
    return start + (len(words[0]) if len(words) == 2 else len(piece))
