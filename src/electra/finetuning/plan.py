"""From a word on the command line to a plan: the word names a shipped task, a TOML file, a table or a folder of tables; the
plan has its settings, its method (`method_defaults`, unless others are set), its files and its rows. Notes say everything that
was guessed."""

import difflib
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import Tensor

from electra.base import config
from electra.base.errors import DataError, SettingsError, counted
from electra.base.files import is_plain_name
from electra.data.tables import (
    Row,
    guess_columns,
    guess_kind,
    is_table,
    label_list,
    label_name,
    read_label,
    read_rows,
    separated,
    stem,
)
from electra.finetuning import LOWER_IS_BETTER, Problem, Splits, Task, TaskSettings
from electra.finetuning.classification import ClassificationSettings
from electra.finetuning.questions import SpanSettings, nested_layout
from electra.finetuning.tagging import TaggingSettings, guess_scheme, is_texts
from electra.interop.formats import own_tensors
from electra.interop.read import Pretrained
from electra.model import EncoderSettings
from electra.train.optimizers import AdamSettings, Beta, OptimizerSettings
from electra.train.trackers import Track

log = logging.getLogger(__name__)
TASKS = "recipes/tasks"
PROBLEMS_SHOWN, ROWS_NAMED = 20, 3
ROWS_GUESSED_BY = 1000
SPLIT_PREFIXES = {"train": ("train",), "dev": ("dev", "validation", "valid", "val"), "test": ("test",)}
KINDS = ("classification", "multilabel", "regression", "tagging", "span")
DEV_SHARE = 10
SPLIT_OFF = "a tenth of train"
FREE_METHOD_KEYS = ("device", "record", "save_minutes", "track")
"""Where a run is computed, how often it is saved and who tracks it do not change what it is: it may resume with other values."""
DecayKind = Literal["exact", "original"]
MethodName = Literal["paper", "robust"]
DEFAULT_METHOD: MethodName = "robust"


def settings_class(kind: object) -> type[TaskSettings]:
    match kind:
        case "classification" | "multilabel" | "regression":
            return ClassificationSettings
        case "tagging":
            return TaggingSettings
        case "span":
            return SpanSettings
    raise SettingsError(f"kind: unknown kind of task {kind!r}. Use one of {', '.join(KINDS)}.")


class SourceSettings(config.Settings):
    """`data` is a folder with the task's files (or with a folder of the task's name), or one table. `rows` are the sizes
    of the official splits: a file with another number of rows is never called official. `submission` names the file
    that a benchmark's server expects for a test split."""

    data: str = ""
    rows: dict[str, int] = Field(default_factory=dict)
    submission: dict[str, str] = Field(default_factory=dict)


class MethodSettings(config.Settings):
    """`method` names the defaults (`method_defaults`); those here are the paper's for a small model. The learning rate warms up
    for `warmup`, a fraction of all steps, and follows `schedule` ("original" multiplies warm-up and decay). Weight decay is 0
    as in the paper; the original code has 0.01. `evaluations` is how many times the dev set is scored during training, for the
    curve. `keep` says which weights are saved, and `patience` stops after that many evaluations without a better headline (0:
    never); with anything but "last" and 0 the dev score has been selected on, which is not the paper's protocol. `min_steps`
    repeats a small table beyond `epochs` until there are that many steps. `reinitialise` is how many of the top layers start
    from random weights: they are the most specialised in detection and the least useful to the task (Zhang et al., 2021).
    `mix` is for tasks that are trained together: batches in proportion to what each would have alone, or equally many.
    `pretrained = false` starts from random weights, for comparison. `record = false` launches every kernel of a step by
    itself instead of as one CUDA graph: slower, for debugging on a GPU. `optimizer = "muon"` updates the matrices inside the
    layers by Muon, at the same layer-wise rates. A checkpoint is saved every `save_minutes`. `track` names trackers that
    receive the metrics, besides metrics.jsonl."""

    method: MethodName = "paper"
    batch: int = Field(32, ge=1, le=1_000_000)
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(3e-4, gt=0)
    layer_decay: float = Field(0.8, gt=0, le=1)
    layer_decay_kind: DecayKind = "exact"
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-6, gt=0)
    bias_correction: bool = False
    clip: float = Field(1.0, gt=0)
    schedule: Literal["original", "linear", "cosine", "constant"] = "original"
    warmup: float = Field(0.1, ge=0, lt=1)
    dropout: float = Field(0.1, ge=0, lt=1)
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    evaluations: int = Field(5, ge=1, le=1_000_000)
    keep: Literal["last", "best"] = "last"
    patience: int = Field(0, ge=0)
    min_steps: int = Field(0, ge=0)
    mix: Literal["size", "even"] = "size"
    reinitialise: int = Field(0, ge=0)
    pretrained: bool = True
    save_minutes: float = Field(5.0, gt=0)
    record: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    track: Track = ("auto",)

    @model_validator(mode="after")
    def patience_fits(self) -> "MethodSettings":
        if self.patience >= self.evaluations:
            raise ValueError(
                f"patience ({self.patience}) must be below evaluations ({self.evaluations}) to stop anything"
            )
        return self

    def optimizer_settings(self) -> OptimizerSettings:
        shared = self.model_dump(include=set(AdamSettings.model_fields))
        return OptimizerSettings(kind=self.optimizer, **shared)


def method_defaults(encoder: EncoderSettings) -> dict[str, dict[str, Any]]:
    """Default settings by the name of the method. "paper" is table 7, by the hidden size (small 256, base 768, large 1024).
    "robust" is for encoders that were trained for minutes and for small tables: rates that grow as networks get narrower, for
    narrow ones without layer-wise decay and with Adam's bias correction, and enough steps. Such encoders have little to forget,
    and weights that were trained at high rates hardly move at the paper's. Detection teaches [CLS] one answer, so the head reads
    the mean of the tokens if transformers has a class that does. Dropout is the model's own: a model that was trained
    without does worse with it (docs/evidence/speedrun.md)."""
    lr = 5e-5 if encoder.hidden >= 1024 else 1e-4 if encoder.hidden >= 768 else 3e-4
    decay = 0.9 if encoder.hidden >= 1024 else 0.8
    dropout = {"dropout": encoder.dropout, "attention_dropout": encoder.attention_dropout}
    paper = dropout | {"lr": lr, "layer_decay": decay}
    narrow = max(1.0, 256 / encoder.hidden)
    robust = dropout | {
        # post-norm layers collapse sooner
        "lr": round(lr * narrow ** (4 / 3 if encoder.kind == "modernbert" else 1), 6),
        "layer_decay": decay if narrow == 1 else 1.0,
        "bias_correction": narrow > 1,
        "min_steps": 250,
        "pooling": "mean" if encoder.kind == "modernbert" else "cls",
        "scale": "auto",
    }
    return {"paper": paper, "robust": robust}


@dataclass(frozen=True)
class Plan:
    """What to train, how, and on which rows. `item` is the word it was made from. `malformed` are rows that could not be read,
    by split and number. `numbers`, if dev was split off, are the row numbers that the rows of each split have in the one file
    they come from."""

    item: str
    name: str
    task: TaskSettings
    method: MethodSettings
    source: SourceSettings
    files: Mapping[str, Path]
    splits: Splits
    notes: tuple[str, ...] = ()
    malformed: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    numbers: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @cached_property
    def shared_rows(self) -> int:
        """How many rows of dev are in train too: `shared_rows=allow` and official sets keep them, and tags have no check."""

        def key(row: Row) -> Hashable:
            own = self.task.identity(row, "dev")
            return self.task.family(row) if own is None else own

        train = set(map(key, self.splits["train"]))
        return sum(key(row) in train for row in self.splits["dev"])


@dataclass(frozen=True)
class Start:
    """The encoder that fine-tuning starts from."""

    path: str
    network: Pretrained

    @property
    def settings(self) -> EncoderSettings:
        return self.network.encoder.settings

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The encoder's weights, by our names."""
        return own_tensors(self.network.encoder)

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(name.encode())
            digest.update(self.tensors[name].detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class PlannedTask:
    """A plan with its task, built once and shared by checks, runs and report. `plan.item` and `overrides` give the same plan in
    another process. `together`: the names of the tasks that share its encoder, with their `data_sha256`."""

    plan: Plan
    task: Task
    start: Start
    overrides: Mapping[str, Any]
    together: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What all runs of a task must have in common, as written to settings.json."""
        plan = self.plan
        settings = {
            "model": self.start.path,
            "model_sha256": self.start.sha256,
            "task": config.dump(plan.task),
            "method": config.dump(plan.method),
            "files": {split: {"file": path.name, "sha256": file_sha256(path)} for split, path in plan.files.items()},
            "rows": {split: len(rows) for split, rows in plan.splits.items()},
        }
        return settings | ({"together": self.together} if self.together else {})

    @property
    def fingerprint(self) -> str:
        """A hash of all settings that must stay the same when a run resumes."""
        return sha256_of(bound(self.settings))

    @property
    def data_sha256(self) -> str:
        return sha256_of({key: self.settings[key] for key in ("task", "files", "rows")})


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def bound(settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings but the model's path and those that are free to change (`FREE_METHOD_KEYS`)."""
    method = {key: value for key, value in settings["method"].items() if key not in FREE_METHOD_KEYS}
    return {key: value for key, value in settings.items() if key != "model"} | {"method": method}


def make_plan(item: str, overrides: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> Plan:
    """`overrides` come from the command line and win; `defaults` of each method fit the model and lose to a TOML file. Epochs on
    the command line or in a file of one's own mean so many and no more."""
    path, shipped = Path(item), config.recipe_names(TASKS)
    kind = settings_class(overrides["kind"]) if "kind" in overrides else None

    # what the item is: a task, whose settings are known, or files, whose settings are guessed
    is_task = item in shipped or (path.suffix == ".toml" and path.is_file())
    if is_task:
        tree, name = config.read_recipe(item, TASKS) | dict(overrides), path.stem
    elif is_table(path) or path.is_dir() or (path.is_file() and kind and not kind.guesses_columns):
        tree, name = {"data": item} | dict(overrides), stem(path if path.name.strip(".") else path.resolve())
    elif path.suffix and not path.exists():
        raise DataError(f"{item} does not exist. Give a file that does, a folder, or the name of a task.")
    elif path.is_file():
        raise SettingsError(
            f"{item} is not a table (.csv, .tsv, .jsonl, .json, .parquet, also compressed). If it is a spreadsheet, save it as csv (UTF-8); if "
            "it has one word per line, set kind=tagging."
        )
    else:
        raise SettingsError(
            f"{item!r} is neither a task ({', '.join(shipped)}), a TOML file, a table (.csv, .tsv, "
            ".jsonl, .json, .parquet, also compressed), nor a folder."
        )
    tree = config.nest(config.flatten(tree))

    # the files
    source_tree = {key: tree.pop(key) for key in SourceSettings.model_fields if key in tree}
    source = config.validate(SourceSettings, source_tree)
    names = tree.get("files", {})
    if Path(source.data).is_file():  # the names that a task gives are for folders
        names = {split: file for split, file in names.items() if f"files.{split}" in overrides}
    own = {split for split in names if item not in shipped or f"files.{split}" in overrides}
    kind = settings_class(tree["kind"]) if "kind" in tree else None
    files = find_files(name, source.data, names, kind is not None and kind.any_file, own)

    # the settings, with what can be guessed from the training file
    notes = guess_shape(tree, files["train"]) if not is_task and kind is None else []
    if not is_task and tree.get("kind") == "tagging" and "scheme" not in tree and is_table(files["train"]):
        notes += guess_tags(tree, files["train"])
    contents: dict[str, tuple[list[Row], dict[int, str]]] = {}
    if not is_task and settings_class(tree.get("kind", "classification")).guesses_columns:
        unread: dict[int, str] = {}
        train: list[Row] = list(read_rows(files["train"], tree.get("header", ()), unread))
        contents["train"] = train, unread
        whole = [row for number, row in enumerate(train, 1) if number not in unread]
        if not whole:  # there is nothing to guess by
            refuse([Problem("train", number, text) for number, text in unread.items()])
        notes += guess(tree, files["train"], whole)
    named = dict(defaults.get(tree.setdefault("method", DEFAULT_METHOD), {}))
    if "epochs" in overrides or ("epochs" in tree and item not in shipped):
        named["min_steps"] = 0
    task, method = place(tree, named)

    # the rows
    splits: dict[str, Sequence[Row]] = {}
    malformed: dict[str, Mapping[int, str]] = {}
    for split, file in files.items():
        rows, broken = contents.get(split) or task.read(file)
        # of a submission none is left out: its answers are numbered by their rows
        if broken and task.drops_broken_rows and split not in source.submission:
            notes.append(f"{split}: {len(broken):,} broken rows are left out")
            rows, broken = [row for number, row in enumerate(rows, 1) if number not in broken], {}
        splits[split], malformed[split] = rows, broken
    numbers: dict[str, list[int]] = {}
    if "dev" not in files:
        if len(splits["train"]) < 2:
            count = "one row" if splits["train"] else "no rows"
            raise DataError(f"{files['train']} has {count}. At least two different ones are needed, one for dev.")
        splits, numbers = split_dev(task, splits)
    notes += task.notes
    if method.keep == "best" or method.patience:
        notes.append("weights chosen by their dev scores, which are therefore optimistic: expect less elsewhere")
    refuse_names(task.name or name, source)
    return Plan(item, task.name or name, task, method, source, files, splits, tuple(notes), malformed, numbers)


def refuse_names(name: str, source: SourceSettings) -> None:
    """Refuses a task's name or a submission's file that is not a plain name: it must not lead out of the results' folder."""
    if not is_plain_name(name) or name in ("submission", "results.md", "results.json"):
        raise SettingsError(f"name: a task cannot be called {name[:60]!r}: not a valid folder name. Set name=….")
    for file in source.submission.values():
        if not is_plain_name(file):
            raise SettingsError(f"submission: {file[:60]!r} is not a file name. Give one without a folder.")


def guess_shape(tree: dict[str, Any], file: Path) -> list[str]:
    """Recognises questions about contexts and lists of words by their columns; everything else is left to classification."""
    nested = nested_layout(file)
    row: Row = {} if nested else next(read_rows(file, malformed={}), {})
    if nested or ({"question", "context", "answers"} <= row.keys() and not tree.keys() & {"text", "label"}):
        tree["kind"] = "span"
        return ["kind (guessed): span, questions answered by a part of their context"]
    lists = [name for name, value in row.items() if is_texts(value)]
    words = next((name for name in tree.get("text", ("tokens", "words")) if name in lists), None)
    tags = [name for name in lists if words and name != words and len(row[name]) == len(row[words])]
    preferred = (tree["label"],) if "label" in tree else ("tags", "labels", *(tags if len(tags) == 1 else ()))
    chosen = next((name for name in preferred if name in tags), None)
    if words and chosen:
        tree |= {"kind": "tagging", "tokens": words, "tags": chosen}
        tree.pop("text", None)
        tree.pop("label", None)
        return [f"kind (guessed): tagging, {words} with their {chosen}"]
    if words and tags:
        raise DataError(f"{file}: which of {', '.join(tags)} are the tags of {words}? Say label=NAME.")
    return []


def guess_tags(tree: dict[str, Any], file: Path) -> list[str]:
    """Sets the scheme by which the first thousand rows write their spans, if it is not the default, iob2."""
    column = tree.get("tags", tree.get("label", "tags"))
    read = (row.get(column) for row in islice(read_rows(file, malformed={}), ROWS_GUESSED_BY))
    scheme = guess_scheme({tag for tags in read if is_texts(tags) for tag in tags})
    if scheme == "iob2":
        return []
    tree["scheme"] = scheme
    return [f"scheme (guessed from the tags): {scheme}{', a plain tag for each word' * (scheme == 'none')}"]


def place(tree: dict[str, Any], defaults: Mapping[str, Any]) -> tuple[TaskSettings, MethodSettings]:
    """Sorts the flat keys that people write into the settings of the kind of task and those of the method."""
    kind = settings_class(tree.get("kind", "classification"))
    tree = kind.named_columns(tree)
    known = [*kind.model_fields, *MethodSettings.model_fields, *SourceSettings.model_fields]
    if unknown := [key for key in tree if key not in known]:
        elsewhere = {key: [name] for key, name in config.ELSEWHERE.items() if name in known}
        near = {key: elsewhere.get(key) or difflib.get_close_matches(key, known, n=1) for key in unknown}
        lines = [f"unknown key {key}." + "".join(f" Did you mean {it}?" for it in near[key]) for key in unknown]
        raise SettingsError("\n".join(lines))
    tree = {**defaults, **tree}
    parts = ({key: tree[key] for key in tree if key in it.model_fields} for it in (kind, MethodSettings))
    return config.validate(kind, next(parts)), config.validate(MethodSettings, next(parts))


def guess(tree: dict[str, Any], file: Path, rows: Sequence[Row]) -> list[str]:
    """Fills in columns and kind that are not set, and returns lines that say what it chose."""
    if not rows:
        raise DataError(f"{file} has no rows. At least two different ones are needed.")
    notes: list[str] = []
    if not {"text", "label"} <= tree.keys():
        names = tree.get("text", ())
        named = [part for name in ([names] if isinstance(names, str) else names) for part in str(name).split("|")]
        texts, label = guess_columns(rows, named, str(tree.get("label") or ""))
        if "text" not in tree:
            tree["text"] = list(texts)
            notes.append(f"text column{'s' * (len(texts) > 1)} (guessed): {', '.join(tree['text'])}")
        if "label" not in tree:
            tree["label"] = label
            notes.append(f"label column (guessed): {label}")
    if "kind" not in tree and "labels" not in tree:
        values = [read_label(row, tree["label"]) for row in rows]
        separator = str(tree.get("separator") or "|")
        tree["kind"] = guess_kind(values, separator)
        notes.append(
            f"kind (guessed from the labels): {tree['kind']}{classes_in_words(tree['kind'], values, separator)}"
        )
    return notes


def classes_in_words(kind: str, values: Sequence[Any], separator: str) -> str:
    """How many classes there are, with an example of one that may have been meant as several."""
    if kind == "regression":
        return ""
    labels = [value for value in values if value is not None]
    split = kind == "multilabel"
    names = {name for it in labels for name in (label_list(it, separator) if split else [label_name(it)])}
    joined = [] if split else separated(labels, separator)[:1]
    slip = f"; {config.short(joined[0])} is one of them, with kind=multilabel it would be several" if joined else ""
    return f", {len(names):,} class{'es' * (len(names) != 1)}{slip}"


def find_files(
    name: str, source: str, names: Mapping[str, str], any_file: bool, own: Collection[str] = ()
) -> dict[str, Path]:
    """split -> file. A file is given by its path, its name, or the beginning of its name; `a|b` means b if there is no a. If
    several names begin that way, the user must choose. Column files (`any_file`) may have any name. `own` are the splits
    whose names come from the user, which may be paths from the current folder."""
    if not source:
        raise SettingsError(f"where are the files of {name}? Add data=FOLDER, with train, dev and test files in it.")
    data = Path(source)
    folder, files, tables = data.parent, {"train": data}, list[Path]()
    if not data.is_file():
        if not data.is_dir():
            raise DataError(f"{data} is neither a table nor a folder with the files of {name}.")
        alike = (path for path in data.iterdir() if path.is_dir() and plain(path.name) == plain(name))
        folder, files = min(alike, key=lambda path: (path.name != name, path.name), default=data), {}
        visible = (path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
        tables = sorted(path for path in visible if any_file or is_table(path))
    for split in dict.fromkeys([*names, *SPLIT_PREFIXES]):
        if split in names or split not in files:
            prefixes = names[split].split("|") if split in names else SPLIT_PREFIXES[split]
            left = [path for path in tables if path not in files.values()]
            places = [Path(), folder] if split in own else [folder] if data.is_dir() else []
            if file := find_file(split, prefixes, places, left):
                files[split] = file
            elif split in names and not tables:
                raise DataError(f"{names[split]} does not exist.")
    if "train" not in files:
        listed = ", ".join(path.name for path in tables) or "no table at all"
        others = "" if any_file else " A file with one word per line needs kind=tagging."
        raise DataError(
            f"{data} has no train file for {name} (it has {listed}). Name one with files.train=NAME.{others}"
        )
    if odd := next((it for it in files.values() if it.name != it.name.encode("utf-8", "replace").decode()), None):
        raise DataError(f"{odd}: its name has bytes that are not UTF-8. Rename it.")
    return {split: files[split] for split in dict.fromkeys([*SPLIT_PREFIXES, *names]) if split in files}


def plain(name: str) -> str:
    """Letters and digits only, in lower case: the official folder of stsb is called STS-B."""
    return "".join(filter(str.isalnum, name)).lower()


def find_file(split: str, prefixes: Sequence[str], places: Sequence[Path], tables: Sequence[Path]) -> Path | None:
    for prefix in prefixes:
        named = [place / prefix for place in places if (place / prefix).is_file()][:1]
        exact = named or [path for path in tables if prefix in (path.name, stem(path))]
        begins = exact or [path for path in tables if path.name.startswith(prefix)]
        if len(begins) > 1:
            raise DataError(f"which of {', '.join(path.name for path in begins)} is {split}? Say files.{split}=NAME.")
        if begins:
            return begins[0]
    return None


def split_dev(task: TaskSettings, splits: Splits) -> tuple[dict[str, Sequence[Row]], dict[str, list[int]]]:
    """Splits a tenth of the distinct rows off train, chosen by their hash: the same rows whatever their order, and no two rows that
    differ only in case end up on both sides. The only rows of a class stay in train. Also returns the numbers that the rows had."""
    rows = splits["train"]
    keys = (task.row_key(row).encode("utf-8", "replace") for row in rows)
    families, first = [task.family(row) for row in rows], dict[Hashable, bytes]()
    for family, key in zip(families, keys, strict=True):
        place = hashlib.blake2b(key, digest_size=8).digest()
        first[family] = min(place, first.get(family, place))
    places = [first[family] for family in families]
    if len(set(places)) < 2:  # all alike, or their columns are missing, which is reported with all other problems
        places = [number.to_bytes(8) for number in range(len(places))]
    classes: dict[bytes, set[str]] = {place: set() for place in sorted(set(places))}
    for place, row in zip(places, rows, strict=True):
        classes[place] |= task.row_classes(row)
    left = Counter(name for names in classes.values() for name in names)
    chosen: set[bytes] = set()
    most = max(1, len(classes) // DEV_SHARE)
    for place, names in classes.items():
        if len(chosen) < most and all(left[name] > 1 for name in names):
            chosen.add(place)
            left.subtract(names)
    chosen = chosen or {min(classes)}
    numbers: dict[str, list[int]] = {"train": [], "dev": []}
    for number, place in enumerate(places, 1):
        numbers["dev" if place in chosen else "train"].append(number)
    parts: dict[str, Sequence[Row]] = {split: [rows[number - 1] for number in numbers[split]] for split in numbers}
    return parts | {split: rows for split, rows in splits.items() if split != "train"}, numbers


def describe_files(plan: Plan) -> list[dict[str, Any]]:
    """Each split with its file and number of rows, and whether that is the official set's size (None if unknown)."""
    entries = []
    for split, rows in plan.splits.items():
        file = plan.files[split].name if split in plan.files else SPLIT_OFF
        size = plan.source.rows.get(split)
        official = {"official_rows": size, "official": None if size is None else size == len(rows)}
        entries.append({"split": split, "file": file, "rows": len(rows), **official})
    return entries


def file_line(entry: Mapping[str, Any]) -> str:
    line = f"{entry['split']}: {entry['file']}, {counted(entry['rows'], 'row')}"
    if entry["official"] is False:
        line += f", NOT the official set of {entry['official_rows']:,}"
    return line + (", the official set's size" if entry["official"] else "")


# Problems of rows


def table_problems(
    task: Task, splits: Splits, malformed: Mapping[str, Mapping[int, str]], numbers: Mapping[str, Sequence[int]]
) -> list[Problem]:
    """Rows that could not be read, then the problems of the others, each with its row number in the file."""
    unread = [Problem(split, row, text) for split, texts in malformed.items() for row, text in texts.items()]
    places = {(problem.split, problem.row) for problem in unread}
    others = (problem.renumbered(numbers) for problem in task.problems(splits))
    return [*unread, *(it for it in others if (it.split, it.row) not in places)]


def read_answered(task: Task, file: Path) -> list[Row]:
    """Reads the rows to score a task on; all of them must have answers."""
    rows, malformed = task.settings.read(file)
    refuse(table_problems(task, {"dev": rows}, {"dev": malformed}, {}))
    return rows


def plan_problems(plan: Plan, task: Task) -> list[Problem]:
    """What keeps a plan from being carried out. Official sets are used as they are: rows that they have both in train and in
    another split are logged, not refused."""
    problems = table_problems(task, plan.splits, plan.malformed, plan.numbers)
    official = {entry["split"] for entry in describe_files(plan) if entry["official"]}
    shared = {it for it in problems if it.other and it.split != it.other[0] and {it.split, it.other[0]} <= official}
    if shared:
        text = "%s: %s rows of the official sets are in train and in another split (%s). They are used as they are."
        log.warning(text, plan.name, f"{len(shared):,}", min(shared, key=lambda it: (it.split, it.row)))
    return [problem for problem in problems if problem not in shared]


def refuse_errors(plan: Plan) -> None:
    """Refuses a headline that is better the lower it is, where scores are averaged."""
    if plan.task.metric in LOWER_IS_BETTER:
        what = f"{plan.name}: {plan.task.metric} is better the lower it is, so no score."
        raise SettingsError(f"{what} Use metric=spearman.")


def refuse(problems: Sequence[Problem], remedies: Collection[str] = ()) -> None:
    """Raises a DataError if there are problems. A problem that many rows share is one line, and problems of a whole split come
    first. `remedies` are lines that each serve many problems."""
    if not problems:
        return
    alike: dict[object, list[Problem]] = {}
    for it in sorted(problems, key=lambda it: it.row > 0):
        alike.setdefault((it.split, it.text) if it.row and not it.other else it, []).append(it)
    lines: list[str] = []
    for group in alike.values():
        if len(group) <= ROWS_NAMED:
            lines += map(str, group)
        else:
            named = ", ".join(str(it.row) for it in group[:ROWS_NAMED])
            rows = f"rows {named} and {len(group) - ROWS_NAMED:,} more: {group[0].text}"
            lines.append(f"{group[0].split} {rows}".lstrip())
    more = len(lines) - PROBLEMS_SHOWN
    lines = [*lines[:PROBLEMS_SHOWN], *([f"… and {more:,} more"] if more > 0 else []), *remedies]
    count = counted(len(problems), "problem")
    raise DataError(f"the data cannot be used as it is ({count}):\n  " + "\n  ".join(lines))
