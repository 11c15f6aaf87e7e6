"""Checkpoints that are whole or not there.

Written into a hidden temporary folder, every file synced, the manifest with the sha256 of each last, then renamed.
Loading verifies every byte and falls back, loudly, on the newest whole one. safetensors and JSON only.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from electra.base.errors import CorruptError, MachineError
from electra.base.files import sync_folder, write_synced

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    step: int
    state: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Empty where there is no such file."""
        path = self.folder / f"{name}.safetensors"
        return load_file(path) if path.is_file() else {}


def save_checkpoint(
    root: Path, step: int, groups: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> Path:
    """`groups`: file name -> tensors. Nothing appears under its final name before all of it is on the disk."""
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
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(root).free
            raise MachineError(
                f"the disk is full: the checkpoint of step {step} does not fit ({free / 1e6:.0f} MB free at {root}). "
                "Earlier checkpoints are whole. Free some space and run the same command again."
            ) from None
        raise MachineError(f"the checkpoint of step {step} could not be written: {error}.") from None
    return target


def write(path: Path, content: bytes) -> dict[str, Any]:
    write_synced(path, content)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def checkpoint_folders(root: Path) -> list[Path]:
    return sorted(root.glob("step-*")) if root.is_dir() else []


def problem_of(folder: Path) -> str | None:
    """Why a checkpoint cannot be used; None when every byte is what was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        for name, entry in manifest.items():
            content = (folder / name).read_bytes()
            if (digest := hashlib.sha256(content).hexdigest()) != entry["sha256"]:
                return f"{name} has sha256 {digest[:12]}…, not {entry['sha256'][:12]}… ({len(content)} bytes)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error)
    return None


def newest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest whole checkpoint. None if there are none at all; an error if there are some and all are damaged:
    starting from zero there would throw work away without a word."""
    folders = checkpoint_folders(root)
    for folder in reversed(folders):
        problem = problem_of(folder)
        if problem is None:
            state = json.loads((folder / STATE).read_bytes())
            return Checkpoint(folder, state["step"], state)
        log.warning("checkpoint %s is damaged and not used: %s.", folder, problem)
    if folders:
        raise CorruptError(
            f"all {len(folders)} checkpoints in {root} are damaged (see above). Restore one from a copy, or remove "
            "the folder to start from the beginning."
        )
    return None


def set_aside(root: Path, step: int) -> None:
    """Take damaged checkpoints beyond `step` out of the count, but keep them for whoever wants to look."""
    for folder in checkpoint_folders(root):
        if int(folder.name.removeprefix("step-")) > step:
            folder.rename(root / f"damaged-{folder.name}-{os.getpid()}")


def clean(root: Path) -> None:
    """Remove what a killed process left behind."""
    for leftover in (*root.glob(".tmp-*"), *root.glob(".del-*")):
        shutil.rmtree(leftover, ignore_errors=True)


def prune(root: Path, keep: int, permanent_every: int) -> None:
    """Keep the newest `keep`, and for ever those whose step is a multiple of `permanent_every`. A folder is renamed
    before it is deleted, so that no half of a checkpoint ever has a checkpoint's name."""
    for folder in checkpoint_folders(root)[:-keep]:
        step = int(folder.name.removeprefix("step-"))
        if not permanent_every or step % permanent_every:
            doomed = root / f".del-{step}"
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def restore(checkpoint: Checkpoint, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Copy a checkpoint into live tensors: names and shapes must agree exactly."""
    for name, live in groups.items():
        try:
            stored = checkpoint.tensors(name)
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
