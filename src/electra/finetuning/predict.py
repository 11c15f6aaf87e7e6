"""Using a fine-tuned model: predictions for a file of any size, figures on a file with answers.

The answer to a row is in the column `prediction`, whatever the kind of task; what else is said has columns of its own, and
a file that has such columns already is refused: nothing of the file is overwritten.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from electra.base.errors import DataError, SettingsError
from electra.data.files import whole_file
from electra.data.tables import (
    Row,
    TableWriter,
    column_of,
    parquet_schema,
    pick,
    read_rows,
    row_of,
    sentences,
    stem,
    table_format,
    with_tags,
)
from electra.data.tokenizer import special_ids
from electra.finetuning import Problem, Task, short
from electra.finetuning.folder import TaskModel, load_task_folder
from electra.finetuning.questions import by_id, read_squad
from electra.finetuning.results import all_problems, refuse
from electra.finetuning.training import infer

CHUNK = 4096
Item = TypeVar("Item")


@dataclass
class Predicted:
    """Where the answers are, how many, and how many rows had to be cut to fit, in words."""

    out: list[Path]
    rows: int = 0
    cut: int = 0
    cut_words: str = ""


def load_for(model: Path, columns: Mapping[str, Any]) -> TaskModel:
    """The model, with the columns of this file where they are called otherwise than in training."""
    loaded = load_task_folder(model)
    return replace(loaded, task=loaded.task.with_columns(columns)) if columns else loaded


def predict_file(
    model: Path, file: Path, out: Path | None, probabilities: bool, columns: Mapping[str, Any]
) -> Predicted:
    """Each row with its prediction, in the order and the format of the file; a chunk at a time."""
    loaded = load_for(model, columns)
    settings = loaded.task.settings
    target = out or default_name(file)
    if target.exists() and target.samefile(file):
        raise SettingsError(f"{target} is the input itself. Choose another out.")
    done = Predicted([target], cut_words=settings.cut_words(loaded.task.length))
    match settings.layout(file):
        case "table":
            predict_table(loaded, file, target, probabilities, done)
        case "columns":
            predict_columns(loaded, file, target, done)
        case "squad":
            predict_squad(loaded, file, target, probabilities, done)
    return done


def predict_table(loaded: TaskModel, file: Path, target: Path, probabilities: bool, done: Predicted) -> None:
    with TableWriter(target, loaded.task.answer_sample(), parquet_schema(file)) as writer:
        for rows in chunks(read_rows(file, loaded.task.settings.table_header)):
            said = answers(loaded, rows, done)
            written = [joined(file, *pair, probabilities) for pair in zip(rows, said, strict=True)]
            writer.write(written, answers={name.removeprefix("_") for name in said[0]})
        refuse_nothing(file, done)


def predict_columns(loaded: TaskModel, file: Path, target: Path, done: Predicted) -> None:
    """The lines of the file, with a last column for the tags."""
    settings = loaded.task.settings
    words = {name: settings.file_columns[name] for name in settings.input_columns}
    with whole_file(target) as out:
        for groups in chunks(sentences(file, words.values())):
            found = [row_of(lines, words) for lines in groups]
            said = iter(answers(loaded, [row for row in found if row], done))
            for lines, row in zip(groups, found, strict=True):
                tags = next(said)["prediction"] if row else []
                out.write("".join(f"{line}\n" for line in with_tags(lines, tags)).encode())
        refuse_nothing(file, done)


def predict_squad(loaded: TaskModel, file: Path, target: Path, probabilities: bool, done: Predicted) -> None:
    """{id: answer}, as the official evaluators read it; the n-best lists, and the null score differences which the
    evaluator of 2.0 calls na-prob, are files beside it."""
    if table_format(target) != "json":
        raise SettingsError(f"{target}: answers to a file in SQuAD's layout are .json. Choose another out.")
    rows = read_squad(file)
    said = answers(loaded, rows, done)
    files = {target: by_id(rows, said)}
    if probabilities:
        files[beside(target, "nbest")] = by_id(rows, said, "_n_best")
        if "null_score_difference" in said[0]:
            files[beside(target, "null")] = by_id(rows, said, "null_score_difference")
    for path, content in files.items():
        with whole_file(path) as out:
            out.write((json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    done.out = list(files)


def answers(loaded: TaskModel, rows: Sequence[Row], done: Predicted) -> list[dict[str, Any]]:
    if found := input_problems(loaded.task, rows, done.rows):
        refuse(found)
    examples, cut = loaded.task.encode(rows)
    outputs = infer(loaded.model, loaded.task, examples, loaded.method, special_ids(loaded.tokenizer).pad)
    done.rows, done.cut = done.rows + len(rows), done.cut + cut
    return loaded.task.predict(rows, examples, outputs)


def input_problems(task: Task, rows: Sequence[Row], before: int) -> list[Problem]:
    """What keeps rows from being answered; `before` is how many rows the file has before them. Answers are not asked
    for, and an empty text is answered too."""
    settings = task.settings
    present = list(dict.fromkeys(name for row in rows[:100] for name in row))
    absent = [name for name in settings.input_columns if pick(present, name) is None]
    if absent:
        listed = ", ".join(present)
        return [Problem("", 0, name, f"no column {name!r} (there are {listed})") for name in absent]
    problems = []
    for number, row in enumerate(rows, before + 1):
        for name in settings.input_columns:
            column = column_of(name, row)
            if column not in row:
                problems.append(Problem("", number, name, f"no {name!r}"))
            elif not settings.is_input(row[column]):
                text = f"{name!r} is {short(row[column])}, not {settings.input_form}"
                problems.append(Problem("", number, name, text))
    return problems


def refuse_nothing(file: Path, done: Predicted) -> None:
    if not done.rows:
        raise DataError(f"{file} has no rows. Give a file with at least one.")


def chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    source = iter(items)
    while chunk := list(islice(source, CHUNK)):
        yield chunk


def joined(file: Path, row: Row, prediction: Mapping[str, Any], probabilities: bool) -> dict[str, Any]:
    public = {
        name.removeprefix("_"): value
        for name, value in prediction.items()
        if probabilities or not name.startswith("_")
    }
    if twice := public.keys() & row.keys():
        raise DataError(f"{file} has a column {min(twice)!r} already, which would be overwritten. Rename it.")
    return {**row, **public}


def default_name(file: Path) -> Path:
    """mytable.csv.gz -> mytable.predictions.csv.gz, in the folder one is in."""
    name, dot, endings = file.name.partition(".")
    return Path(f"{name}.predictions{dot}{endings}")


def beside(path: Path, what: str) -> Path:
    """dev.predictions.json -> dev.predictions.nbest.json."""
    name = stem(path)
    return path.with_name(f"{name}.{what}{path.name.removeprefix(name)}")


def evaluate_file(model: Path, file: Path, columns: Mapping[str, Any]) -> dict[str, Any]:
    loaded = load_for(model, columns)
    settings = loaded.task.settings
    rows, malformed = settings.read(file)
    if found := all_problems(loaded.task, {"dev": rows}, {"dev": malformed}, {}):
        refuse(found)
    done = Predicted([], cut_words=settings.cut_words(loaded.task.length))
    predictions = answers(loaded, rows, done)
    tables = loaded.task.tables(rows, predictions)
    scores = loaded.task.scores(rows, predictions)
    return {"rows": len(rows), "cut": done.cut, "cut_words": done.cut_words, "scores": scores, **tables}
