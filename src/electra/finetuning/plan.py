"""What a word on the command line means: a shipped task, a TOML file, a table or a folder of tables, with its settings
and its files. Everything that was found or guessed is said in words."""

import difflib
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from electra.base import config
from electra.base.errors import DataError, SettingsError
from electra.data.tables import Row, guess_columns, guess_kind, is_table, read_label, read_rows, stem
from electra.finetuning import Splits, TaskSettings
from electra.finetuning.classification import ClassificationSettings
from electra.finetuning.method import MethodSettings
from electra.finetuning.questions import SpanSettings, is_nested
from electra.finetuning.tagging import TaggingSettings, is_texts

TASKS = "recipes/tasks"
SPLITS = {"train": ("train",), "dev": ("dev", "validation", "valid", "val"), "test": ("test",)}
KINDS = ("classification", "multilabel", "regression", "tagging", "span")
DEV_SHARE = 10
SPLIT_OFF = "a tenth of train"


def settings_class(kind: object) -> type[TaskSettings]:
    match kind:
        case "classification" | "multilabel" | "regression":
            return ClassificationSettings
        case "tagging":
            return TaggingSettings
        case "span":
            return SpanSettings
    raise SettingsError(f"kind: there is no kind of task {kind!r}, only {', '.join(KINDS)}.")


class SourceSettings(config.Settings):
    """`data` is a folder with the task's files (or with a folder of the task's name), or one table. `rows` are the sizes
    of the official splits: a file with another number of rows is never called official. `submission` names the file
    that a benchmark's server wants for a test split."""

    data: str = ""
    rows: dict[str, int] = Field(default_factory=dict)
    submission: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """`malformed` are rows that could not be read, by split and number. `numbers` are the places that the rows of each
    split have in the one file they come from, where dev was split off."""

    name: str
    task: TaskSettings
    method: MethodSettings
    source: SourceSettings
    files: Mapping[str, Path]
    notes: tuple[str, ...] = ()
    malformed: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    numbers: Mapping[str, Sequence[int]] = field(default_factory=dict)


def make_plan(item: str, overrides: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[Plan, Splits]:
    """`overrides` come from the command line and win; `defaults` fit the model and lose to a TOML file."""
    path = Path(item)
    kind = settings_class(overrides["kind"]) if "kind" in overrides else None
    if item in config.recipe_names(TASKS) or (path.suffix == ".toml" and path.is_file()):
        given = config.read_recipe(item, TASKS) | dict(overrides)
        name, guessed = path.stem, False
    elif is_table(path) or path.is_dir() or (path.is_file() and kind and not kind.guesses_columns):
        given, name, guessed = {"data": item} | dict(overrides), stem(path), True
    elif path.suffix and not path.exists():
        raise DataError(f"{item} does not exist. Give a file that does, a folder, or the name of a task.")
    else:
        raise SettingsError(
            f"{item!r} is neither a task ({', '.join(config.recipe_names(TASKS))}), a TOML file, a table (.csv, .tsv, "
            ".jsonl, .json, .parquet, also compressed), a file with a word a line (say kind=tagging) nor a folder."
        )
    given = config.nest(config.flatten(given))
    source_tree = {key: given.pop(key) for key in list(given) if key in SourceSettings.model_fields}
    source = config.validate(SourceSettings, source_tree)
    data = Path(source.data) if source.data else None
    wanted = given.get("files", {})
    if data and data.is_file():  # the names that a task gives are for folders
        wanted = {split: file for split, file in wanted.items() if f"files.{split}" in overrides}
    kind = settings_class(given["kind"]) if "kind" in given else None
    files = find_files(name, data, wanted, kind is not None and kind.any_file)
    notes: list[str] = []
    read: dict[str, tuple[list[Row], dict[int, str]]] = {}
    if guessed and "kind" not in given:
        notes += guess_shape(given, files["train"])
    if guessed and settings_class(given.get("kind", "classification")).guesses_columns:
        unread: dict[int, str] = {}
        read["train"] = list(read_rows(files["train"], given.get("header", ()), unread)), unread
        if not read["train"][0]:
            raise DataError(f"{files['train']} has no rows. At least two different ones are needed.")
        notes += guess(given, read["train"][0])
    task, method = place(given, defaults)
    splits: dict[str, Sequence[Row]] = {}
    malformed: dict[str, dict[int, str]] = {}
    for split, file in files.items():
        rows, wrong = read[split] if split in read else task.read(file)
        if wrong and task.drops_broken_rows:
            rows = [row for number, row in enumerate(rows, 1) if number not in wrong]
            notes.append(f"{split}: {len(wrong):,} broken rows are left out")
            wrong = {}
        splits[split], malformed[split] = rows, wrong
    notes += task.notes
    plan = Plan(task.name or name, task, method, source, files, tuple(notes), malformed)
    if "dev" not in files:
        if len(splits["train"]) < 2:
            count = "one row" if splits["train"] else "no rows"
            raise DataError(
                f"{files['train']} has {count}. At least two different ones are needed, one of them for dev."
            )
        parts, numbers = split_dev(task, splits)
        return replace(plan, numbers=numbers), parts
    return plan, splits


def guess_shape(given: dict[str, Any], file: Path) -> list[str]:
    """Questions about contexts and lists of words are known by their columns; everything else is classification."""
    nested = is_nested(file)
    row: Row = {} if nested else next(read_rows(file, malformed={}), {})
    if nested or ({"question", "context", "answers"} <= row.keys() and not given.keys() & {"text", "label"}):
        given["kind"] = "span"
        return ["kind (guessed): span, questions answered by a part of their context"]
    lists = [name for name, value in row.items() if is_texts(value)]
    words = next((name for name in given.get("text", ("tokens", "words")) if name in lists), None)
    tags = [name for name in lists if words and name != words and len(row[name]) == len(row[words])]
    preferred = (
        (given["label"],) if "label" in given else ("tags", "labels", *(tags if len(tags) == 1 else ()))
    )
    chosen = next((name for name in preferred if name in tags), None)
    if words and chosen:
        given |= {"kind": "tagging", "tokens": words, "tags": chosen}
        for key in given.keys() & {"text", "label"}:
            del given[key]
        return [f"kind (guessed): tagging, {words} with their {chosen}"]
    if words and tags:
        raise DataError(f"{file}: which of {', '.join(tags)} are the tags of {words}? Say label=NAME.")
    return []


def place(given: dict[str, Any], defaults: Mapping[str, Any]) -> tuple[TaskSettings, MethodSettings]:
    """Keys are flat for people: each belongs to the kind of task or to the method, by its name."""
    kind = settings_class(given.get("kind", "classification"))
    given = kind.named_columns(given)
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
        values = [read_label(row, given["label"]) for row in rows]
        given["kind"] = guess_kind(values, str(given.get("separator") or "|"))
        notes.append(f"kind (guessed from the labels): {given['kind']}")
    return notes


def find_files(
    name: str, data: Path | None, wanted: Mapping[str, str], any_file: bool = False
) -> dict[str, Path]:
    """split -> file. A file is wanted by its path, by its name, or by the beginning of its name, `a|b` meaning b where
    there is no a; of several that begin so, none is chosen for the user. Column files may be called anything."""
    if data is None:
        raise SettingsError(
            f"where are the files of {name}? Add data=FOLDER, with train, dev and test files in it."
        )
    if data.is_file():
        found, folder = {"train": data}, data.parent
        tables: list[Path] = []
    else:
        if not data.is_dir():
            raise DataError(f"{data} is neither a table nor a folder with the files of {name}.")
        alike = (path for path in data.iterdir() if path.is_dir() and plain(path.name) == plain(name))
        folder = min(alike, key=lambda path: (path.name != name, path.name), default=data)
        tables = sorted(
            path
            for path in folder.iterdir()
            if is_table(path) or (any_file and path.is_file() and not path.name.startswith("."))
        )
        found = {}
    for split in dict.fromkeys([*wanted, *SPLITS]):
        if split in found and split not in wanted:
            continue
        prefixes = wanted[split].split("|") if split in wanted else SPLITS[split]
        left = [path for path in tables if path not in found.values()]
        file = find_file(split, prefixes, folder, left)
        if file is None and split in wanted and not tables:
            raise DataError(f"{wanted[split]} does not exist.")
        if file is not None:
            found[split] = file
    if "train" not in found:
        listed = ", ".join(path.name for path in tables) or "no table at all"
        raise DataError(
            f"{data} has no train file for {name} (it has {listed}). Name one with files.train=NAME."
        )
    return {split: found[split] for split in dict.fromkeys([*SPLITS, *wanted]) if split in found}


def plain(name: str) -> str:
    """The official folder of stsb is called STS-B."""
    return "".join(filter(str.isalnum, name)).lower()


def find_file(split: str, prefixes: Sequence[str], folder: Path, tables: Sequence[Path]) -> Path | None:
    for prefix in prefixes:
        for path in (Path(prefix), folder / prefix):
            if path.is_file():
                return path
        exact = [path for path in tables if prefix in (path.name, stem(path))]
        begins = exact or [path for path in tables if path.name.startswith(prefix)]
        if len(begins) > 1:
            raise DataError(
                f"which of {', '.join(path.name for path in begins)} is {split}? Say files.{split}=NAME."
            )
        if begins:
            return begins[0]
    return None


def split_dev(task: TaskSettings, splits: Splits) -> tuple[Splits, dict[str, list[int]]]:
    """A tenth of the different rows of train, chosen by their hash: the same whatever their order, and no row that is
    there twice ends up on both sides. The only rows of a class stay in train. With the numbers that the rows had."""

    def place_of(row: Row) -> bytes:
        return hashlib.blake2b(task.row_key(row).encode("utf-8", "replace"), digest_size=8).digest()

    places = [place_of(row) for row in splits["train"]]
    if (
        len(set(places)) < 2
    ):  # all alike, or their columns are not there, which is said with all other problems
        places = [number.to_bytes(8) for number in range(len(places))]
    different = sorted(set(places))
    classes: dict[bytes, set[str]] = {place: set() for place in different}
    for place, row in zip(places, splits["train"], strict=True):
        classes[place] |= task.row_classes(row)
    left = Counter(name for names in classes.values() for name in names)
    chosen: set[bytes] = set()
    for place in different:
        if len(chosen) < max(1, len(different) // DEV_SHARE) and all(
            left[name] > 1 for name in classes[place]
        ):
            chosen.add(place)
            left.subtract(classes[place])
    chosen = chosen or {different[0]}
    numbers = {
        "train": [number for number, place in enumerate(places, 1) if place not in chosen],
        "dev": [number for number, place in enumerate(places, 1) if place in chosen],
    }
    parts = {split: [splits["train"][number - 1] for number in mine] for split, mine in numbers.items()}
    return parts | {name: rows for name, rows in splits.items() if name != "train"}, numbers


def describe_files(plan: Plan, splits: Splits) -> list[dict[str, Any]]:
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
