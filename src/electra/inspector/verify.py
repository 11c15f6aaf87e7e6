"""Finds what was damaged or edited in runs, prepared shards, exports, fine-tuned folders, and folders of those."""

from collections.abc import Callable, Iterator
from pathlib import Path

from electra.base.errors import DataError, ElectraError
from electra.base.files import FOLDER_MANIFEST, folder_problems
from electra.data.shards import MANIFEST, verify_shards
from electra.finetuning.folder import TASK_FILE, load_task_folder
from electra.interop.foreign import INDEX, WEIGHTS
from electra.interop.read import read_network
from electra.pretraining.load import CONFIG, load_run
from electra.train import checkpoint
from electra.train.log import METRICS, read_records


def verify(path: Path) -> list[str]:
    """Every problem, one line each; empty if everything is as it was written."""
    folders = [path, *sorted(it for it in path.rglob("*") if it.is_dir())] if path.is_dir() else []
    known = {folder: kind for folder in folders if (kind := kind_of(folder))}
    if not known:
        raise DataError(f"{path} is neither a run, prepared shards, an export nor a fine-tuned folder, and holds none.")
    return [problem for folder, kind in known.items() for problem in problems_of(folder, kind)]


def kind_of(folder: Path) -> str:
    marks = {"run": CONFIG, "shards": MANIFEST, "model": "config.json"}
    kinds = (kind for kind, mark in marks.items() if (folder / mark).exists())
    is_checkpoint = checkpoint.NAME.fullmatch(folder.name) or folder.name.startswith(("damaged-step-", "."))
    return "" if is_checkpoint else next(kinds, "")


def problems_of(folder: Path, kind: str) -> Iterator[str]:
    match kind:
        case "run":
            for it in checkpoint.checkpoint_folders(folder / "checkpoints"):
                if problem := checkpoint.problem_of(it):
                    yield f"{it}: {problem}"
            if damaged := len(read_records(folder)[1]):
                yield f"{folder / METRICS}: {damaged} damaged lines"
            yield from reading_problems(lambda: load_run(folder))
        case "shards":
            yield from verify_shards(folder)
        case "model":
            differing = folder_problems(folder)
            yield from (f"{folder}: {problem}" for problem in differing)
            # reading a folder that differs fails alike; one with a manifest but no weights (ONNX, a pooling) is for other libraries
            is_ours = (
                (folder / WEIGHTS).exists() or (folder / INDEX).exists() or not (folder / FOLDER_MANIFEST).exists()
            )
            if not differing and is_ours:
                yield from reading_problems(
                    lambda: load_task_folder(folder) if (folder / TASK_FILE).exists() else read_network(folder)
                )


def reading_problems(read: Callable[[], object]) -> Iterator[str]:
    try:
        read()
    except ElectraError as error:
        yield str(error)
