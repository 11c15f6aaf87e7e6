"""Checkpoints that are complete or absent.

They are written into a hidden temporary folder, every file synced, the manifest with the sha256 of each file last, then renamed.
Loading verifies every byte and falls back, with a warning, on the newest intact one. safetensors and JSON only.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from electra.base.config import short
from electra.base.errors import CorruptError, DiskFullError, ForbiddenError, MachineError
from electra.base.files import file_problem, manifest_entry, manifest_problems, read_object, sync_folder, write_synced

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
STATE = "state.json"
NAME = re.compile(r"step-(\d{9}|[1-9]\d{9,14})", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    step: int
    state: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one file; empty if there is no such file."""
        path = self.folder / f"{name}.safetensors"
        return load_file(path) if path.is_file() else {}


def save_checkpoint(
    root: Path, step: int, groups: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> Path:
    """Write a checkpoint; returns its folder. `groups`: file name -> tensors. It gets its final name once all of it is on the disk."""
    target = root / f"step-{step:09d}"
    temporary = root / f".tmp-{step}-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        manifest = {}
        for name, tensors in groups.items():
            content = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
            manifest[f"{name}.safetensors"] = write(temporary / f"{name}.safetensors", content)
        manifest[STATE] = write(temporary / STATE, json.dumps({"step": step, **state}, indent=1).encode())
        write(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        sync_folder(temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        sync_folder(root)
    except DiskFullError:
        shutil.rmtree(temporary, ignore_errors=True)
        needed = sum(tensor.nbytes for tensors in groups.values() for tensor in tensors.values()) / 1e6
        free = shutil.disk_usage(root).free / 1e6
        raise DiskFullError(
            f"the disk is full: the checkpoint of step {step} does not fit ({needed:.1f} MB needed, {free:.0f} MB free at "
            f"{root}). Earlier checkpoints are intact. Free some space and run the same command again."
        ) from None
    except (OSError, MachineError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise MachineError(f"the checkpoint of step {step} could not be written: {error}.") from None
    return target


def write(path: Path, content: bytes) -> dict[str, Any]:
    write_synced(path, content)
    return manifest_entry(content)


def checkpoint_folders(root: Path) -> list[Path]:
    """All checkpoint folders, oldest first. Copies that people made beside them have other names."""
    folders = (path for path in root.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir())
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def problem_of(folder: Path) -> str | None:
    """Why a checkpoint cannot be used; None if every byte is what was written."""
    files = {"model.safetensors", STATE, *(path.name for path in folder.glob("*.safetensors"))}
    try:
        if problem := next(manifest_problems(folder, read_object(folder / MANIFEST), sorted(files)), None):
            return problem
        read_state(folder)
    except ForbiddenError:
        raise
    except (CorruptError, MachineError) as error:
        return str(error).rstrip(".")
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """The state.json of a checkpoint. Its step must match the folder's name, because somebody may have renamed the folder."""
    state = read_object(folder / STATE)
    if state.get("step") != step_of(folder) or not isinstance(state.get("seconds"), int | float):
        raise CorruptError(f"{STATE} is for step {short(state.get('step'))}, or has no time.")
    return state


def newest_state(root: Path) -> dict[str, Any]:
    """The state of the newest checkpoint whose state.json is intact; empty if there is none. Weights are not read."""
    for folder in reversed(checkpoint_folders(root)):
        with suppress(CorruptError, MachineError):
            entry = read_object(folder / MANIFEST).get(STATE)
            if isinstance(entry, dict) and not file_problem(
                folder / STATE, entry.get("bytes"), str(entry.get("sha256"))
            ):
                return read_state(folder)
    return {}


def newest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest intact checkpoint. None if there are none at all; an error if there are some and all are damaged,
    because starting from zero would silently throw work away."""
    folders = checkpoint_folders(root)
    for folder in reversed(folders):
        problem = problem_of(folder)
        if problem is None:
            return Checkpoint(folder, step_of(folder), read_state(folder))
        log.warning("checkpoint %s is damaged and not used: %s.", folder, problem)
    if folders:
        raise CorruptError(
            f"all {len(folders)} checkpoints in {root} are damaged (see above). Restore one from a copy, or remove "
            "the folder to start from the beginning."
        )
    return None


def set_aside(root: Path, step: int) -> None:
    """Rename damaged checkpoints beyond `step`, so that they no longer count but can still be inspected."""
    for folder in checkpoint_folders(root):
        if step_of(folder) > step:
            folder.rename(root / f"damaged-{folder.name}-{os.getpid()}")


def clean(root: Path) -> None:
    """Remove what a killed process left behind."""
    for leftover in (*root.glob(".tmp-*"), *root.glob(".del-*")):
        shutil.rmtree(leftover, ignore_errors=True)


def prune(root: Path, keep: int, permanent_every: int) -> None:
    """Delete all but the newest `keep` checkpoints and those whose step is a multiple of `permanent_every`. A folder is renamed
    before it is deleted, so that half a checkpoint never has a checkpoint's name."""
    for folder in checkpoint_folders(root)[:-keep]:
        step = step_of(folder)
        if not permanent_every or step % permanent_every:
            doomed = root / f".del-{step}"
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def require_floats(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not finite, which would make every answer NaN, and integers, which a silent cast would turn into
    weights. The index tensors (position_ids) that transformers stores among the weights are skipped."""
    for name, tensor in tensors.items():
        if name.endswith("_ids"):
            continue
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:  # eight bits mean nothing without their scales
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CorruptError(f"{path}: {name} is {kind}, not floating point of 16 bits or more.")
        if not torch.isfinite(tensor).all():
            raise CorruptError(f"{path}: {name} has NaN or infinity. Use a file whose numbers are all finite.")


def restore(checkpoint: Checkpoint, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Copy a checkpoint into live tensors. Names and shapes must agree exactly."""
    for name, live in groups.items():
        try:
            stored = checkpoint.tensors(name)
            if name == "model":
                require_floats(checkpoint.folder / "model.safetensors", stored)
        except SafetensorError as error:
            raise CorruptError(f"{checkpoint.folder}/{name}.safetensors cannot be read: {error}.") from None
        there, here = ({(key, tensor.shape) for key, tensor in tensors.items()} for tensors in (stored, live))
        if different := sorted({key for key, _ in there ^ here}):
            raise CorruptError(
                f"{checkpoint.folder} is of another network: {len(different)} tensors differ, {different[0]} among them."
            )
        with torch.no_grad():
            for key, tensor in live.items():
                tensor.copy_(stored[key])
