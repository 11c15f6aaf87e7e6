"""The kinds of task there are, by the settings' `kind`. A new kind adds a line to `AnySettings` and to each `match`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from electra.config import dump, validate
from electra.errors import SettingsError
from electra.finetune.classification import Classification, ClassificationSettings, build_classification
from electra.finetune.table import read_rows
from electra.finetune.task import Row, Task

AnySettings = ClassificationSettings  # | TaggingSettings | SpanSettings
"""Every kind has name, epochs, length and files."""
KINDS = ("classification", "multilabel", "regression")


def settings_class(kind: str) -> type[AnySettings]:
    match kind:
        case "classification" | "multilabel" | "regression":
            return ClassificationSettings
        # case "tagging": return TaggingSettings
        # case "span": return SpanSettings
    raise SettingsError(f"kind: there is no kind of task {kind!r}, only {', '.join(KINDS)}.")


def read_split(settings: AnySettings, path: Path) -> list[Row]:
    match settings:
        case ClassificationSettings():
            return list(read_rows(path))
        # case SpanSettings(): return read_squad(path)
    return list(read_rows(path))


def build_task(
    settings: AnySettings, tokenizer: Tokenizer, length: int, rows_by_split: Mapping[str, Sequence[Row]]
) -> Task:
    """With no rows the settings must hold all labels, as those of a saved model do."""
    match settings:
        case ClassificationSettings():
            return build_classification(settings, tokenizer, length, rows_by_split)
        # case TaggingSettings(): return build_tagging(settings, tokenizer, length, rows_by_split)
        # case SpanSettings(): return build_span(settings, tokenizer, length, rows_by_split)
    raise AssertionError(f"no kind of task has {type(settings).__name__}")


def training_rows(task: Task, rows: Sequence[Row]) -> Sequence[Row]:
    """Rows as they are trained on, where that differs from how they are scored."""
    match task:
        case Classification():
            return task.training_rows(rows)
    return rows


def result_tables(
    task: Task, rows: Sequence[Row], predictions: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Confusion matrix and per-class figures, where the kind has them."""
    match task:
        case Classification():
            return task.tables(rows, predictions)
    return {}


def row_key(settings: AnySettings, row: Row) -> str:
    """What makes two rows the same when a part of a table is split off for dev."""
    match settings:
        case ClassificationSettings():
            return "\x1f".join(str(row.get(name)) for name in settings.text)
    return repr(sorted(row.items(), key=lambda item: item[0]))


def with_columns(task: Task, columns: Mapping[str, Any]) -> Task:
    """The same task on a table whose columns are called otherwise."""
    match task:
        case Classification():
            settings = validate(ClassificationSettings, {**dump(task.settings), **columns})
            if len(settings.text) != len(task.settings.text):
                raise SettingsError(
                    f"the model reads {len(task.settings.text)} text columns, not {len(settings.text)}."
                )
            return Classification(settings, task.tokenizer, task.length)
    raise SettingsError("--text, --text2 and --label are for classification.")
