"""Using a fine-tuned model: predictions for a file of any size, metrics on a file with answers.

The answer to a row is in the column `prediction`, whatever the kind of task; scores and the like have columns of their own. A
file that already has such columns is refused: no column of the file is overwritten.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from electra.base.config import short
from electra.base.errors import DataError, SettingsError
from electra.data import tables
from electra.data.files import whole_file
from electra.data.tables import Row
from electra.finetuning import Prediction, Problem, Rows, Task, in_chunks, missing_columns
from electra.finetuning.baselines import MAJORITY, majority_alarms, run_alarms
from electra.finetuning.folder import (
    TASK_FILE,
    TaskModel,
    adopt_classifier,
    load_task_folder,
    refuse_unlike,
    seed_folders,
)
from electra.finetuning.plan import file_sha256, read_answered, refuse
from electra.finetuning.questions import by_id
from electra.finetuning.training import infer

log = logging.getLogger(__name__)
CHUNK, CHUNK_CHARACTERS = 4096, 1 << 24


@dataclass(frozen=True)
class Predicted:
    """Where the answers are, how many, how many rows were cut to fit, and what that means in words."""

    out: list[Path]
    rows: int
    cut: int
    cut_words: str


class Predictor:
    """Answers rows chunk by chunk and counts them, with one network or with the mean outputs of several seeds. `columns` names the
    columns of the rows if they differ from those in training."""

    def __init__(self, *models: TaskModel, columns: Mapping[str, Any] | None = None):
        self.models, task = models, models[0].task.of_seeds([it.task.settings for it in models])
        self.task = task.with_columns(columns) if columns else task
        self.rows = self.cut = 0

    @property
    def cut_words(self) -> str:
        return self.task.settings.cut_words(self.task.length)

    def __call__(self, rows: Rows) -> list[Prediction]:
        refuse(input_problems(self.task, rows, self.rows))
        examples, cut = self.task.encode(rows)
        outputs = [infer(it.model, self.task, examples, it.method) for it in self.models]
        self.rows, self.cut = self.rows + len(rows), self.cut + cut
        if len(outputs) == 1:
            return self.task.predict(rows, examples, outputs[0])
        return self.task.ensemble(rows, examples, outputs)


def load_predictor(folder: Path, columns: Mapping[str, Any] | None = None) -> Predictor:
    """Loads one fine-tuned folder, or all seeds in the folder of a task."""
    models = {it: load_task_folder(it) for it in seed_folders(folder).values()}
    models = models or {folder: load_classifier(folder, columns or {})}
    refuse_unlike(models)
    return Predictor(*models.values(), columns=columns)


def load_classifier(folder: Path, columns: Mapping[str, Any]) -> TaskModel:
    """Loads a folder of ours, or a classifier that somebody made with transformers."""
    if (folder / TASK_FILE).is_file() or not (folder / "config.json").is_file():
        return load_task_folder(folder)
    return adopt_classifier(folder, columns)


def predict_lines(model: Path, lines: Sequence[str], columns: Mapping[str, Any]) -> list[Prediction]:
    """Predictions for texts that are not in a table: each line is a row; two texts are separated by a tab."""
    predictor = load_predictor(model, columns)
    return predictor([predictor.task.settings.row_of(line) for line in lines])


def predict_file(
    model: Path,
    file: Path,
    out: Path | None,
    probabilities: bool,
    columns: Mapping[str, Any],
    force: bool = False,
    escape_formulas: bool = False,
) -> Predicted:
    """Writes each row with its prediction, in the order and the format of the file, a chunk at a time. An existing file is
    overwritten only with `force`."""
    if file.is_dir():
        raise DataError(f"{file} is a folder. Give a file.")
    predictor = load_predictor(model, columns)
    layout = predictor.task.settings.layout(file)
    if layout == "table" and out is None and file.is_file() and not tables.is_table(file):
        raise SettingsError(
            f"{file} does not have the extension of a table (.csv, .tsv, .jsonl, .json, .parquet). Send lines of text to standard input; "
            "if it is a spreadsheet, save it as csv (UTF-8)."
        )
    target = out or default_name(file)
    if layout == "mrqa" and out is None:
        target = file.with_name(f"{tables.stem(file)}.predictions.json")
    written = [target]
    more = [beside(target, what) for what in ("nbest", "null")] if layout in ("squad", "mrqa") and probabilities else []
    refuse_overwriting([target, *more], [file], force)
    match layout:
        case "table":
            predict_table(predictor, file, target, probabilities, escape_formulas)
        case "columns":
            predict_columns(predictor, file, target)
        case "squad" | "mrqa":
            written = predict_squad(predictor, file, target, probabilities)
    return Predicted(written, predictor.rows, predictor.cut, predictor.cut_words)


def refuse_overwriting(outputs: Sequence[Path], inputs: Sequence[Path], force: bool) -> None:
    for path in filter(Path.exists, outputs):
        if any(path.samefile(it) for it in inputs if it.exists()):
            raise SettingsError(f"{path} is the input itself. Choose another out.", ("out",))
        if not force:
            raise SettingsError(
                f"{path} is there already. Choose another out, or force it to be overwritten.", ("out", "force")
            )


def predict_table(predictor: Predictor, file: Path, target: Path, probabilities: bool, escape_formulas: bool) -> None:
    task = predictor.task
    schema, separator = tables.parquet_schema(file), tables.csv_separator(file)
    marked = tables.has_byte_order_mark(file)
    with tables.TableWriter(target, task.answer_sample(), schema, escape_formulas, separator, marked) as writer:
        source = tables.read_rows(file, task.settings.table_header)
        for rows in in_chunks(source, CHUNK, row_characters, CHUNK_CHARACTERS):
            predictions = predictor(rows)
            names = [name for name in predictions[0] if probabilities or name in task.columns_written]
            if twice := set(names) & {name for row in rows for name in row}:
                raise DataError(f"{file} has a column {min(twice)!r} already, which would be overwritten. Rename it.")
            pairs = zip(rows, predictions, strict=True)
            writer.write([{**row, **{name: it[name] for name in names}} for row, it in pairs], answers=names)
        require_rows(file, predictor)


def row_characters(row: Row) -> int:
    return sum(len(value) for value in row.values() if isinstance(value, str))


def predict_columns(predictor: Predictor, file: Path, target: Path) -> None:
    """Writes the lines of the file with a last column for the tags."""
    settings = predictor.task.settings
    words = {name: settings.file_columns[name] for name in settings.input_columns}
    with whole_file(target) as out:
        for groups in in_chunks(tables.sentences(file, words.values()), CHUNK):
            rows = [tables.row_of(lines, words) for lines in groups]
            predictions = iter(predictor([row for row in rows if row]))
            for lines, row in zip(groups, rows, strict=True):
                tags = next(predictions)["prediction"] if row else []
                out.write("".join(f"{line}\n" for line in tables.with_tags(lines, tags)).encode())
        require_rows(file, predictor)


def predict_squad(predictor: Predictor, file: Path, target: Path, probabilities: bool) -> list[Path]:
    """Writes {id: answer}, as the official evaluators read it. With `probabilities`, the n-best lists and the null score
    differences (na-prob in the evaluator of 2.0) are files beside it."""
    if tables.table_format(target) != "json":
        raise SettingsError(
            f"{target}: answers to a file in SQuAD's or MRQA's layout are .json. Choose another out.", ("out",)
        )
    rows, _ = predictor.task.settings.read(file)
    # of two questions with one id only one would be kept
    refuse(list(predictor.task.overall_problems({file.name: rows}, clean=True)))
    predictions = predictor(rows)
    files = {target: by_id(rows, predictions)}
    if probabilities:
        files[beside(target, "nbest")] = by_id(rows, predictions, "n_best")
        if "null_score_difference" in predictions[0]:
            files[beside(target, "null")] = by_id(rows, predictions, "null_score_difference")
    for path, content in files.items():
        with whole_file(path) as out:
            out.write((json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return list(files)


def input_problems(task: Task, rows: Rows, before: int) -> list[Problem]:
    """Problems that keep rows from being answered; `before` is how many rows of the file come before them. The rows need no
    answers, and an empty text is answered too."""
    settings = task.settings
    if absent := missing_columns("", rows, settings.input_columns):
        return absent
    problems = []
    for number, row in enumerate(rows, before + 1):
        for name in settings.input_columns:
            column = tables.column_of(name, row)
            if column not in row:
                problems.append(Problem("", number, f"no {name!r}"))
            elif not settings.is_input(row[column]):
                text = f"{name!r} is {short(row[column])}, not {settings.input_form}"
                problems.append(Problem("", number, text))
    return problems


def require_rows(file: Path, predictor: Predictor) -> None:
    if not predictor.rows:
        raise DataError(f"{file} has no rows. Give a file with at least one.")


def default_name(file: Path) -> Path:
    """mytable.csv.gz -> mytable.predictions.csv.gz, beside it."""
    name, dot, endings = file.name.partition(".")
    return file.with_name(f"{name}.predictions{dot}{endings}")


def beside(path: Path, what: str) -> Path:
    """dev.predictions.json -> dev.predictions.nbest.json."""
    name = tables.stem(path)
    return path.with_name(f"{name}.{what}{path.name.removeprefix(name)}")


def evaluate_file(model: Path, file: Path, columns: Mapping[str, Any]) -> dict[str, Any]:
    """All metrics on a file with answers, those of its own most frequent answer for comparison, and the tables of its classes."""
    predictor = load_predictor(model, columns)
    task = predictor.task
    if file.is_file() and file_sha256(file) in [it.note.get("train_sha256") for it in predictor.models]:
        log.warning("%s is the table it was trained on: the score says nothing about new rows. Give others.", file)
    rows = read_answered(task, file)
    predictions = predictor(rows)
    counts = {"rows": len(rows), "cut": predictor.cut, "cut_words": predictor.cut_words}
    scores = task.scores(rows, predictions)
    majority = task.majority(rows)
    baselines = {MAJORITY: task.scores(rows, majority(rows))} if majority else {}
    undefined = task.undefined(rows)
    alarms = [undefined] if undefined else run_alarms(task, rows, predictions, scores, ())
    for level in baselines.values() if not undefined else ():
        alarms += majority_alarms(scores, level)
    results = {"scores": scores, "baselines": baselines, "alarms": alarms}
    return {**counts, **results, **task.tables(rows, predictions)}
