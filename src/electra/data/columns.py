"""Which column is the text and which the label, when nobody said. A guess is always shown."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from electra.base.errors import DataError
from electra.data.tables import Row

PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text_a", "text_b"),
    ("text1", "text2"),
)
TEXTS = ("text", "sentence", "review", "document", "content", "comment", "body", "message", "tweet", "title")
LABELS = (
    "label",
    "labels",
    "class",
    "category",
    "target",
    "gold_label",
    "sentiment",
    "stars",
    "rating",
    "score",
)
MOST_CLASSES = 200


def pick(columns: Sequence[str], name: str) -> str | None:
    """The first of `a|b|c` that exists: the same set has other column names in other places."""
    return next((option for option in [name, *name.split("|")] if option in columns), None)


def column_of(name: str, row: Row) -> str:
    return name if name in row else pick(list(row), name) or name


def guess_columns(rows: Sequence[Row]) -> tuple[tuple[str, ...], str]:
    """(text columns, label column) of a table of which nothing is known. Known names first; then the label is the
    column with the fewest values, the text the one with the longest."""
    columns = list(dict.fromkeys(name for row in rows[:100] for name in row))
    low = {name.lower(): name for name in columns}
    sample = rows[:2000]

    def mean_length(name: str) -> float:
        return sum(len(str(row.get(name) or "")) for row in sample) / max(1, len(sample))

    label = next((low[name] for name in LABELS if name in low), None)
    if label is None:
        counts = {name: len({str(row.get(name)) for row in sample}) for name in columns}
        few = [name for name in columns if 2 <= counts[name] <= min(MOST_CLASSES, len(sample) // 2)]
        label = min(few, key=lambda name: counts[name], default=None)
    pair = next((pair for pair in PAIRS if set(pair) <= low.keys()), None)
    if pair:
        texts: tuple[str, ...] = tuple(low[name] for name in pair)
    else:
        named = [low[name] for name in TEXTS if name in low and low[name] != label]
        strings = [
            name
            for name in columns
            if name != label and any(isinstance(row.get(name), str) for row in sample)
        ]
        texts = tuple(named[:1]) or tuple(sorted(strings, key=mean_length)[-1:])
    if label is None or not texts:
        raise DataError(
            f"which column is the text and which the label? Name them with --text and --label (there are "
            f"{', '.join(columns) or 'none'})."
        )
    return texts, label


def guess_kind(values: Sequence[Any], separator: str = "|") -> str:
    """Lists are several labels, and so are names with a separator between them; many different numbers, or numbers with a fraction, are a quantity; the rest is names."""
    joined = (value.split(separator) for value in values if isinstance(value, str) and separator in value)
    if any(isinstance(value, list) for value in values) or any(
        all(map(str.strip, names)) for names in joined
    ):
        return "multilabel"
    numbers = [number(value) for value in values if value is not None and value != ""]
    if not numbers or None in numbers:
        return "classification"
    real = [value for value in numbers if value is not None]
    distinct = len(set(real))
    return "regression" if distinct > 20 or any(value % 1 for value in real) else "classification"


def number(value: Any) -> float | None:
    """A finite number, also one that is written as text; None for anything else."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) and not isinstance(value, bool) else None


def label_name(value: Any) -> str:
    """1, 1.0 and "1" are one label: formats differ in what they make of a number."""
    match value:
        case bool():
            return str(value).lower()
        case float() if value.is_integer():
            return str(int(value))
    return str(value)


def label_list(value: Any, separator: str) -> list[str]:
    """Several labels of one row: a list, a list written as JSON, or names with a separator between them."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value]
    elif isinstance(value, str):
        value = [part.strip() for part in value.split(separator) if part.strip()]
    return [label_name(part) for part in (value if isinstance(value, list) else [value])]


def is_missing(value: Any) -> bool:
    return (
        value is None
        or (isinstance(value, str) and not value.strip())
        or (isinstance(value, float) and math.isnan(value))
    )


def read_label(row: Mapping[str, Any], column: str) -> Any:
    value = row.get(column)
    return None if is_missing(value) else value
