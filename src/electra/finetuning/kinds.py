"""The kinds of task there are, by the settings' `kind`, and all that differs between them outside their own files. A new
kind adds a line to `AnySettings` and to each `match`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from electra.base.config import dump, validate
from electra.base.errors import DataError, SettingsError
from electra.data.columns import column_of, label_list, label_name, pick, read_label
from electra.data.conll import read_conll
from electra.data.tables import Row, is_table, read_rows, table_format
from electra.finetuning.class_rows import ClassificationSettings, row_texts
from electra.finetuning.classification import Classification, build_classification
from electra.finetuning.loop import mean_outputs
from electra.finetuning.span import SpanSettings, SpanTask
from electra.finetuning.squad_rows import is_nested, read_squad
from electra.finetuning.tag_rows import TaggingSettings, is_texts, short, tags_of
from electra.finetuning.tagging import Tagging, build_tagging
from electra.finetuning.task import Example, Outputs

AnySettings = ClassificationSettings | TaggingSettings | SpanSettings
"""Every kind has name, metric, epochs, length and files."""
AnyTask = Classification | Tagging | SpanTask
KINDS = ("classification", "multilabel", "regression", "tagging", "span")
Layout = Literal["table", "columns", "squad"]


def settings_class(kind: str) -> type[AnySettings]:
    match kind:
        case "classification" | "multilabel" | "regression":
            return ClassificationSettings
        case "tagging":
            return TaggingSettings
        case "span":
            return SpanSettings
    raise SettingsError(f"kind: there is no kind of task {kind!r}, only {', '.join(KINDS)}.")


# Files


def layout(settings: AnySettings, path: Path) -> Layout:
    """A row a line; a word a line, in columns (of tagging: everything that is not called .jsonl, .json or .parquet); or
    SQuAD's articles of paragraphs of questions."""
    match settings:
        case ClassificationSettings():
            return "table"
        case TaggingSettings():
            if not is_table(path) or table_format(path) == "tsv":
                return "columns"
            if table_format(path) == "csv":
                raise DataError(
                    f"{path}: csv has no lists of words and tags. Give .jsonl, .parquet or a file with a word a line."
                )
            return "table"
        case SpanSettings():
            return "squad" if is_nested(path) else "table"


def read_split(settings: AnySettings, path: Path) -> tuple[list[Row], dict[int, str]]:
    """The rows of a file, and what is wrong with those that cannot be read, by their number. Those have no values."""
    malformed: dict[int, str] = {}
    match layout(settings, path):
        case "table":
            return list(read_rows(path, header_of(settings), malformed)), malformed
        case "columns":
            assert isinstance(settings, TaggingSettings)
            return list(read_conll(path, settings.columns)), malformed
        case "squad":
            return read_squad(path), malformed


def header_of(settings: AnySettings) -> tuple[str, ...]:
    return settings.header if isinstance(settings, ClassificationSettings) else ()


def row_key(settings: AnySettings, row: Row) -> str:
    """What makes two rows the same when a part of a table is split off for dev. Questions about one paragraph stay
    together: their answers are in the same text."""
    match settings:
        case ClassificationSettings():
            return "\x1f".join(row_texts(settings, row))
        case TaggingSettings():
            return repr(row.get(settings.tokens))
        case SpanSettings():
            return str(row.get("context"))


def row_classes(settings: AnySettings, row: Row) -> set[str]:
    """What a row teaches that must be known before it can be scored."""
    match settings:
        case ClassificationSettings(kind="classification" | "multilabel"):
            value = read_label(row, column_of(settings.label, row))
            if value is None:
                return set()
            return set(
                label_list(value, settings.separator)
                if settings.kind == "multilabel"
                else [label_name(value)]
            )
        case TaggingSettings():
            return set(map(str, tags_of(settings, [row])))
    return set()


# Columns


def input_columns(settings: AnySettings) -> tuple[str, ...]:
    match settings:
        case ClassificationSettings():
            return settings.text
        case TaggingSettings():
            return (settings.tokens,)
        case SpanSettings():
            return ("question", "context")


def named_columns(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """--text and --label of the command line as the settings of a kind."""
    named = dict(given)
    match kind:
        case "tagging":
            if "text" in named:
                texts = named.pop("text")
                if isinstance(texts, list) and len(texts) > 1:
                    raise SettingsError("--text2 does not fit tagging: --text is the column of words.")
                named["tokens"] = texts[0] if isinstance(texts, list) else texts
            if "label" in named:
                named["tags"] = named.pop("label")
        case "span" if named.keys() & {"text", "label"}:
            raise SettingsError(
                "--text, --text2 and --label do not fit questions, whose columns are id, question, context and answers."
            )
    return named


def with_columns(task: AnyTask, columns: Mapping[str, Any]) -> AnyTask:
    """The same task on a table whose columns are called otherwise."""
    match task:
        case Classification():
            settings = validate(ClassificationSettings, {**dump(task.settings), **columns})
            if len(settings.text) != len(task.settings.text):
                raise SettingsError(
                    f"the model reads {len(task.settings.text)} text columns, not {len(settings.text)}."
                )
            return Classification(settings, task.tokenizer, task.length)
        case Tagging():
            tree = {**dump(task.settings), **named_columns("tagging", columns)}
            return Tagging(validate(TaggingSettings, tree), task.tokenizer, task.length)
        case SpanTask():
            named_columns("span", columns)
            return task


def input_problems(task: AnyTask, rows: Sequence[Row], before: int) -> list[str]:
    """What keeps rows from being answered; `before` is how many rows the file has before them. Answers are not asked
    for, and an empty text is answered too."""
    present = list(dict.fromkeys(name for row in rows[:100] for name in row))
    absent = [name for name in input_columns(task.settings) if pick(present, name) is None]
    if absent:
        return [f"no column {name!r} (there are {', '.join(present)})" for name in absent]
    match task:
        case Tagging():
            wanted = "a list of texts"
            fits: Callable[[Any], bool] = is_texts
        case Classification() | SpanTask():
            wanted, fits = "text", is_text
    return [
        f"row {number}: {name!r} is {short(row[column])}, not {wanted}"
        if column in row
        else f"row {number}: no {name!r}"
        for number, row in enumerate(rows, before + 1)
        for name in input_columns(task.settings)
        if not fits(row.get(column := column_of(name, row)))
    ]


def is_text(value: Any) -> bool:
    return isinstance(value, str)


# Tasks


def build_task(
    settings: AnySettings, tokenizer: Tokenizer, length: int, rows_by_split: Mapping[str, Sequence[Row]]
) -> AnyTask:
    """With no rows the settings must hold all labels, as those of a saved model do."""
    match settings:
        case ClassificationSettings():
            return build_classification(settings, tokenizer, length, rows_by_split)
        case TaggingSettings():
            return build_tagging(settings, tokenizer, length, rows_by_split)
        case SpanSettings():
            return SpanTask(settings, tokenizer, length)


def training_rows(task: AnyTask, rows: Sequence[Row]) -> Sequence[Row]:
    """Rows as they are trained on, where that differs from how they are scored."""
    match task:
        case Classification():
            return task.training_rows(rows)
    return rows


def fitted(task: AnyTask, dev_scores: Mapping[str, float]) -> AnyTask:
    """The task with what is chosen on dev after training."""
    match task:
        case SpanTask():
            return task.fitted(dev_scores)
    return task


def ensemble(
    task: AnyTask, rows: Sequence[Row], examples: Sequence[Example], runs: Sequence[Sequence[Outputs]]
) -> list[dict[str, Any]]:
    """One prediction from several networks: from the mean of their logits, or, as the beams of two joint heads hold
    different spans, from the mean probability of each answer."""
    match task:
        case SpanTask(settings=SpanSettings(head="joint")):
            return task.ensemble([task.predict(rows, examples, outputs) for outputs in runs])
    return task.predict(rows, examples, mean_outputs(runs))


def result_tables(
    task: AnyTask, rows: Sequence[Row], predictions: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Confusion matrix and per-class figures, where the kind has them."""
    match task:
        case Classification() | Tagging():
            return task.tables(rows, predictions)
    return {}


def answer_sample(task: AnyTask) -> dict[str, Any]:
    """An example of those columns of answers that may be empty lists, row after row."""
    match task:
        case Classification(settings=ClassificationSettings(kind="multilabel")):
            return {"prediction": [""]}
        case Tagging() if task.settings.spans:
            return {"spans": [{"type": "", "start": 0, "end": 0, "text": ""}]}
    return {}


def cut_words(settings: AnySettings, length: int) -> str:
    """What it means that a row was cut."""
    match settings:
        case ClassificationSettings():
            return f"longer than {length} tokens and cut"
        case TaggingSettings():
            return f"with a word of more than {length - 2} tokens, of which the rest is not read"
        case SpanSettings():
            return f"with a question of more than {settings.max_query_length} tokens, of which the rest is not read"
