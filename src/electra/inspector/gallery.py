"""What a server or a report shows: the models, runs and results in some folders, each known by a number. No path ever comes from
a request; models are loaded when they are first asked for, and only the last few are kept."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from electra.base.errors import DataError
from electra.base.progress import visible
from electra.data.tokenizer import tokenizer_hash, vocabulary_size
from electra.finetuning.baselines import UNTRAINED
from electra.finetuning.folder import TASK_FILE
from electra.inspector import Model, load
from electra.inspector.verify import kind_of
from electra.pretraining.load import CONFIG
from electra.train.checkpoint import checkpoint_folders
from electra.train.log import METRICS

LEVELS, MOST_FOUND = 4, 500  # levels of folders below those given; most models, runs and results each
LOADED = 6
SECONDS_BETWEEN_LOOKS = 3.0
RESULTS = ("results.json", "speedrun.json")
Shelf = Literal["models", "runs", "results"]


@dataclass(frozen=True)
class Found:
    """A model, run or result. `name` tells it from the others, for people."""

    path: Path
    name: str


@dataclass
class Gallery:
    """Models, runs and results by number. Numbers never change: what appears later is added at the end."""

    paths: Sequence[Path]
    models: list[Found] = field(default_factory=list)
    runs: list[Found] = field(default_factory=list)
    results: list[Found] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loaded: OrderedDict[tuple[int, str], Model] = OrderedDict()
        self.lock, self.reading, self.looked = threading.Lock(), threading.Lock(), 0.0
        for path in self.paths:
            if not path.is_dir():
                raise DataError(f"{path} is not a folder. Give runs, exports, fine-tuned folders, or folders of them.")
        self.look()
        if not (self.models or self.runs or self.results):
            names = ", ".join(map(str, self.paths))
            raise DataError(f"{names}: no run, model or result there. Give a folder that has some.")

    def look(self) -> None:
        """Adds what is new, unless the last look was only moments ago."""
        with self.lock:
            if self.looked and time.monotonic() - self.looked < SECONDS_BETWEEN_LOOKS:
                return
            for path in self.paths:
                for folder, shelves in things_in(path, LEVELS):
                    for shelf in shelves:
                        self._add(shelf, path, folder)
            self.looked = time.monotonic()

    def _add(self, shelf: Shelf, root: Path, folder: Path) -> None:
        own: list[Found] = getattr(self, shelf)
        if len(own) < MOST_FOUND and all(it.path != folder for it in own):
            below = folder.relative_to(root)
            name = str(below) if len(self.paths) == 1 and below.parts else str(Path(root.resolve().name) / below)
            own.append(Found(folder, visible(name)))

    def at(self, shelf: Shelf, number: int) -> Found:
        own: list[Found] = getattr(self, shelf)
        if not 0 <= number < len(own):
            raise LookupError(f"there are {len(own)} {shelf}, counted from 0: none has the number {number}.")
        return own[number]

    def model(self, number: int) -> Model:
        """Of a run that is being trained: the one of its newest checkpoint. One that was made anew in its place is another."""
        path = self.at("models", number).path
        checkpoints = checkpoint_folders(path / "checkpoints") if (path / CONFIG).is_file() else []
        newest = (checkpoints or [path])[-1]
        key = number, f"{newest.name} {newest.stat().st_ctime_ns if newest.exists() else ''}"
        with self.reading:
            if key not in self.loaded:
                for older in [other for other in self.loaded if other[0] == number]:
                    del self.loaded[older]
                self.loaded[key] = on_device(load(path))
                while len(self.loaded) > LOADED:
                    self.loaded.popitem(last=False)
            self.loaded.move_to_end(key)
            return self.loaded[key]


def on_device(model: Model) -> Model:
    if torch.cuda.is_available() and model.finetuned is None:
        model.network.encoder.to("cuda")
        if model.network.head is not None:
            model.network.head.to("cuda")
    return model


def things_in(folder: Path, levels: int) -> Iterator[tuple[Path, list[Shelf]]]:
    """Yields every folder with a model, run or result, outermost first. Folders inside a model or a run (its export and its
    checkpoints) are part of it."""
    kind, shelves = kind_of(folder), list[Shelf]()
    if kind == "run":
        if (folder / METRICS).is_file():
            shelves.append("runs")
        if checkpoint_folders(folder / "checkpoints"):
            shelves.append("models")
    elif kind == "model":
        shelves.append("models")
    if any((folder / name).is_file() for name in RESULTS):
        shelves.append("results")
    if shelves:
        yield folder, shelves
    if kind in ("run", "model", "shards") or not levels:
        return
    children = list[Path]()
    with suppress(OSError):  # not readable, or gone
        children = sorted(it for it in folder.iterdir() if it.is_dir() and not it.is_symlink())
    for child in children:
        if child.name.startswith(".") or child.name == UNTRAINED:  # baselines of the results beside it
            continue
        if os.access(child, os.R_OK | os.X_OK):
            yield from things_in(child, levels - 1)


def describe_model(model: Model) -> dict[str, Any]:
    """What a page or a program must know to ask the model something. `columns`: those of a row for a fine-tuned model."""
    task = model.finetuned.task if model.finetuned else None
    network = model.network
    has_generator = False
    with suppress(DataError):
        has_generator = task is None and bool(model.generator)
    return {
        "kind": model.kind,
        "objective": None if task else network.objective,
        "encoder": network.encoder.settings.kind,
        "parameters": sum(it.numel() for it in network.encoder.parameters()),
        "positions": network.encoder.settings.positions,
        "vocabulary": vocabulary_size(model.tokenizer),
        "tokenizer": tokenizer_hash(model.tokenizer)[:16],
        "has_generator": has_generator,
        "task": task.settings.name if task else None,
        "columns": [name.split("|")[0] for name in task.settings.input_columns] if task else [],
        "labels": list(task.labels) if task else [],
        "reads": task.settings.input_form if task else "text",
    }


def is_finetuned(found: Found) -> bool:
    return (found.path / TASK_FILE).is_file()
