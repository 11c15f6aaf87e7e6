"""What a word on the command line means: a shipped task, a TOML file, a table or a folder of tables, with its settings
and its files. Everything that was found or guessed is said in words."""

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from electra import config
from electra.errors import DataError, SettingsError
from electra.finetune.columns import guess_columns, guess_kind, read_label
from electra.finetune.kinds import AnySettings, read_split, row_key, settings_class
from electra.finetune.method import MethodSettings
from electra.finetune.table import is_table, read_rows, stem
from electra.finetune.task import Row

TASKS = "recipes/tasks"
SPLITS = {"train": ("train",), "dev": ("dev", "validation", "valid", "val"), "test": ("test",)}
DEV_SHARE = 10
SPLIT_OFF = "a tenth of train"


class SourceSettings(config.Settings):
    """`data` is a folder with the task's files (or with a folder of the task's name), or one table. `rows` are the sizes
    of the official splits: a file with another number of rows is never called official. `submission` names the file
    that a benchmark's server wants for a test split."""

    data: str = ""
    rows: dict[str, int] = Field(default_factory=dict)
    submission: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    name: str
    task: AnySettings
    method: MethodSettings
    source: SourceSettings
    files: Mapping[str, Path]
    notes: tuple[str, ...] = ()

    @property
    def splits_off_dev(self) -> bool:
        return "dev" not in self.files


Splits = dict[str, Sequence[Row]]


def make_plan(item: str, overrides: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[Plan, Splits]:
    """`overrides` come from the command line and win; `defaults` fit the model and lose to a TOML file."""
    path = Path(item)
    if item in config.recipe_names(TASKS) or (path.suffix == ".toml" and path.is_file()):
        given = config.read_recipe(item, TASKS) | dict(overrides)
        name, guessed = path.stem, False
    elif is_table(path) or path.is_dir():
        given, name, guessed = {"data": item} | dict(overrides), stem(path), True
    else:
        raise SettingsError(
            f"{item!r} is neither a task ({', '.join(config.recipe_names(TASKS))}), a TOML file, a table (.csv, .tsv, "
            ".jsonl, .json, .parquet, also compressed) nor a folder of tables."
        )
    given = config.nest(config.flatten(given))
    source_tree = {key: given.pop(key) for key in list(given) if key in SourceSettings.model_fields}
    source = config.validate(SourceSettings, source_tree)
    files = find_files(name, Path(source.data) if source.data else None, given.get("files", {}))
    splits: Splits = {}
    notes: list[str] = []
    if guessed:
        splits["train"] = list(read_rows(files["train"]))
        notes += guess(given, splits["train"])
    task, method = place(given, defaults)
    name = task.name or name
    for split, file in files.items():
        if split not in splits:
            splits[split] = read_split(task, file)
    plan = Plan(name, task, method, source, files, tuple(notes))
    if plan.splits_off_dev and splits["train"]:
        splits = split_dev(task, splits)
    return plan, splits


def place(given: dict[str, Any], defaults: Mapping[str, Any]) -> tuple[AnySettings, MethodSettings]:
    """Keys are flat for people: each belongs to the kind of task or to the method, by its name."""
    kind = settings_class(str(given.get("kind", "classification")))
    known = [*kind.model_fields, *MethodSettings.model_fields, *SourceSettings.model_fields]
    unknown = [key for key in given if key not in known]
    if unknown:
        lines = []
        for key in unknown:
            near = difflib.get_close_matches(key, known, n=1)
            lines.append(f"unknown key {key}." + (f" Did you mean {near[0]}?" if near else ""))
        raise SettingsError("\n".join(lines))
    task = config.validate(kind, {key: value for key, value in given.items() if key in kind.model_fields})
    method_tree = {key: value for key, value in given.items() if key in MethodSettings.model_fields}
    return task, config.validate(MethodSettings, {**defaults, **method_tree})


def guess(given: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """Fills in columns and kind that were not given, and says what it chose."""
    notes: list[str] = []
    if given.get("kind") not in (None, "classification", "multilabel", "regression"):
        return notes
    texts: tuple[str, ...] = ()
    label = ""
    if rows and not ("text" in given and "label" in given):
        texts, label = guess_columns(rows)
    if "text" not in given:
        given["text"] = [name for name in texts if name != given.get("label")]
        notes.append(f"text column{'s' * (len(texts) > 1)} (guessed): {', '.join(given['text'])}")
    if "label" not in given:
        given["label"] = label
        notes.append(f"label column (guessed): {label}")
    if "kind" not in given and "labels" not in given:
        given["kind"] = guess_kind([read_label(row, given["label"]) for row in rows])
        notes.append(f"kind (guessed from the labels): {given['kind']}")
    return notes


def find_files(name: str, data: Path | None, wanted: Mapping[str, str]) -> dict[str, Path]:
    """split -> file. A file is wanted by its path, by its name, or by the beginning of its name; of several that begin
    so, none is chosen for the user."""
    if data is None:
        raise SettingsError(
            f"where are the files of {name}? Add data=FOLDER, with train, dev and test files in it."
        )
    if data.is_file():
        found = {"train": data}
        tables: list[Path] = []
    else:
        folder = data / name if (data / name).is_dir() else data
        if not folder.is_dir():
            raise DataError(f"{data} is neither a table nor a folder with the files of {name}.")
        tables = sorted(path for path in folder.iterdir() if is_table(path))
        found = {}
    for split in dict.fromkeys([*SPLITS, *wanted]):
        if split in found and split not in wanted:
            continue
        prefixes = (wanted[split],) if split in wanted else SPLITS[split]
        file = find_file(split, prefixes, tables)
        if file is None and split in wanted and not tables:
            raise DataError(f"{wanted[split]} does not exist.")
        if file is not None:
            found[split] = file
    if "train" not in found:
        listed = ", ".join(path.name for path in tables) or "no table at all"
        raise DataError(
            f"{data} has no train file for {name} (it has {listed}). Name one with files.train=NAME."
        )
    return found


def find_file(split: str, prefixes: Sequence[str], tables: Sequence[Path]) -> Path | None:
    for prefix in prefixes:
        if Path(prefix).is_file():
            return Path(prefix)
        exact = [path for path in tables if prefix in (path.name, stem(path))]
        begins = exact or [path for path in tables if path.name.startswith(prefix)]
        if len(begins) > 1:
            raise DataError(
                f"which of {', '.join(path.name for path in begins)} is {split}? Say files.{split}=NAME."
            )
        if begins:
            return begins[0]
    return None


def split_dev(task: AnySettings, splits: Splits) -> Splits:
    """A tenth of the different rows of train, chosen by their hash: the same whatever their order, and no row that is
    there twice ends up on both sides."""

    def place_of(row: Row) -> bytes:
        return hashlib.blake2b(row_key(task, row).encode(), digest_size=8).digest()

    places = [place_of(row) for row in splits["train"]]
    different = sorted(set(places))
    chosen = set(different[: max(1, len(different) // DEV_SHARE)])
    train = [row for row, place in zip(splits["train"], places, strict=True) if place not in chosen]
    dev = [row for row, place in zip(splits["train"], places, strict=True) if place in chosen]
    rest = {name: rows for name, rows in splits.items() if name != "train"}
    return {"train": train, "dev": dev} | rest


def describe_files(plan: Plan, splits: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """Each split with its file and rows, and whether that is the official set's size."""
    described = []
    for split, rows in splits.items():
        file = plan.files.get(split)
        official = plan.source.rows.get(split)
        described.append(
            {
                "split": split,
                "file": file.name if file else SPLIT_OFF,
                "rows": len(rows),
                "official_rows": official,
                "official": None if official is None else official == len(rows),
            }
        )
    return described


def file_line(entry: Mapping[str, Any]) -> str:
    line = f"{entry['split']}: {entry['file']}, {entry['rows']:,} rows"
    if entry["official"] is False:
        line += f", NOT the official set of {entry['official_rows']:,}"
    return line + (", the official set's size" if entry["official"] else "")
