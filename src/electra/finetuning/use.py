"""Using a fine-tuned model: predictions for a file of any size, figures on a file with answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from electra.data.tokenizer import special_ids
from electra.errors import DataError, SettingsError
from electra.finetune.kinds import read_split, result_tables, with_columns
from electra.finetune.loop import predictions_in_chunks
from electra.finetune.table import TableWriter, read_rows, table_format
from electra.finetune.task import Row
from electra.finetuning.results import refuse
from electra.interop.tasks import LoadedTask, load_task_folder

CHUNK = 4096


@dataclass(frozen=True)
class Predicted:
    out: Path
    rows: int
    cut: int


def load_for(model: Path, columns: Mapping[str, Any]) -> LoadedTask:
    """The model, with the columns of this file where they are called otherwise than in training."""
    loaded = load_task_folder(model)
    return replace(loaded, task=with_columns(loaded.task, columns)) if columns else loaded


def predict_file(
    model: Path, file: Path, out: Path | None, probabilities: bool, columns: Mapping[str, Any]
) -> Predicted:
    """Each row with its prediction, in the order and the format of the file; a chunk at a time."""
    loaded = load_for(model, columns)
    target = out or default_name(file)
    if target.exists() and target.samefile(file):
        raise SettingsError(f"{target} is the input itself. Choose another --out.")
    table_format(target)
    pad = special_ids(loaded.tokenizer).pad
    first = list(islice(read_rows(file), CHUNK))
    check(loaded, first)
    rows = cut = 0
    chunks = predictions_in_chunks(loaded.model, loaded.task, chunked(file), loaded.method, pad)
    with TableWriter(target) as writer:
        for part, predictions, count in chunks:
            writer.write(
                [joined(row, said, probabilities) for row, said in zip(part, predictions, strict=True)]
            )
            rows, cut = rows + len(part), cut + count
    return Predicted(target, rows, cut)


def chunked(file: Path) -> Iterator[Sequence[Row]]:
    rows = read_rows(file)
    while chunk := list(islice(rows, CHUNK)):
        yield chunk


def check(loaded: LoadedTask, rows: Sequence[Row]) -> None:
    """Answers are not asked for; text may be empty, but its column must be there."""
    if not rows:
        raise DataError("the file has no rows.")
    missing = [line for line in loaded.task.problems({"test": rows}) if "no column" in line]
    if missing:
        refuse(missing)


def joined(row: Row, prediction: Mapping[str, Any], probabilities: bool) -> dict[str, Any]:
    public = {
        name.removeprefix("_"): value
        for name, value in prediction.items()
        if probabilities or not name.startswith("_")
    }
    return {**row, **public}


def default_name(file: Path) -> Path:
    """mytable.csv.gz -> mytable.predictions.csv.gz, in the folder one is in."""
    name, dot, endings = file.name.partition(".")
    return Path(f"{name}.predictions{dot}{endings}")


def evaluate_file(model: Path, file: Path, columns: Mapping[str, Any]) -> dict[str, Any]:
    loaded = load_for(model, columns)
    rows = read_split(loaded.settings, file)
    if found := loaded.task.problems({"dev": rows}):
        refuse(found)
    pad = special_ids(loaded.tokenizer).pad
    parts = predictions_in_chunks(loaded.model, loaded.task, iter([rows]), loaded.method, pad)
    _, predictions, cut = next(parts)
    tables = result_tables(loaded.task, rows, predictions)
    return {"rows": len(rows), "cut": cut, "scores": loaded.task.scores(rows, predictions), **tables}
