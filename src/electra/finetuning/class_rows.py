"""The settings of classification tasks, and what can be wrong with their rows."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from electra.base.config import Settings
from electra.data.columns import column_of, is_missing, label_list, label_name, number, pick, read_label
from electra.data.tables import Row
from electra.finetuning import metrics
from electra.finetuning.task import needs_answers

PROBLEMS_KEPT = 2000


class ClassificationSettings(Settings):
    """`text` is one column or two; `a|b` means a, or b where there is no a. `labels` fixes the classes and their order;
    empty, they are those of the training rows, sorted. `metric` is the headline. `double_unordered` trains on both
    orders of a pair. Targets of a regression are divided by `scale` and predictions multiplied. A multi-label cell that
    is not a list is cut at `separator`. `shared_rows` says whether the same row may be in train and dev: some public
    sets have such rows, and `broken_rows` whether rows with too few or too many cells, which some also have, may be left
    out. `header` names the columns of csv and tsv files that have no line for it. `files` names the files of the splits, with or without their endings; further splits whose name
    starts with dev or test are scored or predicted beside those two."""

    kind: Literal["classification", "multilabel", "regression"] = "classification"
    name: str = ""
    text: tuple[str, ...] = Field(("text",), min_length=1, max_length=2)
    label: str = "label"
    labels: tuple[str, ...] = ()
    metric: metrics.Metric | Literal[""] = ""
    epochs: int = Field(3, ge=1)
    length: int = Field(128, ge=8)
    head: Literal["transformers", "linear"] = "transformers"
    double_unordered: bool = False
    scale: float = Field(1.0, gt=0)
    separator: str = Field("|", min_length=1)
    shared_rows: Literal["refuse", "allow"] = "refuse"
    broken_rows: Literal["refuse", "drop"] = "refuse"
    header: tuple[str, ...] = ()
    files: dict[str, str] = Field(default_factory=dict)

    @field_validator("text", "labels", mode="before")
    @classmethod
    def one_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def parts_agree(self) -> "ClassificationSettings":
        if self.metric and self.metric not in metrics.METRICS[self.kind]:
            raise ValueError(
                f"metric={self.metric} is not one of {self.kind}: {', '.join(metrics.METRICS[self.kind])}"
            )
        if self.double_unordered and len(self.text) == 1:
            raise ValueError("double_unordered=true needs two text columns")
        if self.kind == "regression" and self.labels:
            raise ValueError("a regression has no labels")
        if len(set(self.labels)) < len(self.labels) or len(self.labels) == 1:
            raise ValueError(f"labels ({', '.join(self.labels)}) must be at least two different names")
        return self


def row_texts(settings: ClassificationSettings, row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(column_of(name, row)) or "") for name in settings.text)


def table_problems(
    settings: ClassificationSettings, splits: Mapping[str, Sequence[Row]], guessed: bool = False
) -> list[str]:
    """Everything, split by split, then what all rows say together, of columns that are there. `guessed`
    says that the labels are those of the training rows: only then can there be suspiciously many."""
    found: list[str] = []
    absent: set[str] = set()
    for split, rows in splits.items():
        if not rows:
            found.append(f"{split}: no rows")
            continue
        labelled = needs_answers(split)
        wanted = [*settings.text, *([settings.label] if labelled else [])]
        columns = list(dict.fromkeys(name for row in rows[:100] for name in row))
        missing = [name for name in wanted if pick(columns, name) is None]
        absent.update(missing)
        found += [f"{split}: no column {name!r} (there are {', '.join(columns)})" for name in missing]
        if not missing:
            found += text_problems(settings, split, rows)
            found += label_problems(settings, split, rows) if labelled else []
            found += many_labels(settings, rows) if guessed and split == "train" else []
    classes = len(settings.labels)
    learns = bool(splits.get("train")) and settings.kind != "regression" and settings.label not in absent
    if learns and (classes == 1 or (classes == 0 and not found)):
        found.append(
            f"train: one class only ({', '.join(settings.labels) or 'none'}): there is nothing to learn"
        )
    if settings.metric == "f1" and classes > 2:
        found.append(f"metric=f1 is for two classes, there are {classes}: use metric=f1_macro")
    if settings.shared_rows == "refuse" and not absent.intersection(settings.text):
        found += shared_rows(settings, splits)
    return found


def text_problems(settings: ClassificationSettings, split: str, rows: Sequence[Row]) -> list[str]:
    found = []
    for name in settings.text:
        values = [row.get(column_of(name, row)) for row in rows]
        if all(number(value) is not None for value in values):
            found.append(f"{split}: column {name!r} holds numbers, not text")
            continue
        for index, value in enumerate(values):
            if is_missing(value):
                found.append(f"{split} row {index + 1}: no text in {name!r}")
            elif not isinstance(value, str):
                found.append(f"{split} row {index + 1}: {name!r} is {value!r}, not text")
            if len(found) > PROBLEMS_KEPT:
                return found
    return found


def label_problems(settings: ClassificationSettings, split: str, rows: Sequence[Row]) -> list[str]:
    found = []
    known = ", ".join(settings.labels[:8]) + (", …" if len(settings.labels) > 8 else "")
    for index, row in enumerate(rows):
        where = f"{split} row {index + 1}"
        value = read_label(row, column_of(settings.label, row))
        match settings.kind:
            case "regression":
                if value is None:
                    found.append(f"{where}: no label")
                elif number(value) is None:
                    found.append(f"{where}: label {value!r} is not a number")
                names = []
            case "multilabel":
                names = label_list(value, settings.separator) if value is not None else []
            case "classification":
                names = [] if value is None else [label_name(value)]
                if value is None:
                    found.append(f"{where}: no label")
        for name in names:
            if name not in settings.labels:
                what = "a number where a name was expected" if number(name) is not None else "unknown"
                found.append(f"{where}: label {name!r} is {what} (known: {known})")
        if len(found) > PROBLEMS_KEPT:
            return found
    return found


def many_labels(settings: ClassificationSettings, rows: Sequence[Row]) -> list[str]:
    different = len(settings.labels)
    if settings.kind != "classification" or different <= max(20, len(rows) // 2):
        return []
    return [
        f"train: {different} different labels in {len(rows)} rows. If they are quantities, use kind=regression; if they "
        "are classes all the same, list them with labels=[…]; if neither, choose another --label"
    ]


def shared_rows(settings: ClassificationSettings, splits: Mapping[str, Sequence[Row]]) -> list[str]:
    """Rows without text, which are refused for that, are not the same as each other."""
    train = splits.get("train", ())
    first = {row_texts(settings, row): index for index, row in reversed(list(enumerate(train)))}
    return [
        f"{split} row {index + 1} is also train row {first[texts] + 1}"
        for split, rows in splits.items()
        if split.startswith("dev")
        for index, row in enumerate(rows)
        if (texts := row_texts(settings, row)) in first and all(map(str.strip, texts))
    ]
