"""Files that are whole or absent, and folders that belong to one process at a time."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from electra.base.errors import CorruptError, MachineError


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """A rename is only safe from a power cut once its folder is on the disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """The file is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write_synced(temporary, data)
    temporary.replace(path)
    sync_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptError(f"{path} cannot be read: {error}. It was cut or edited: restore it, or remove it.") from None


def remove_leftovers(folder: Path) -> None:
    """What a killed process was about to write. The caller holds the lock."""
    for leftover in folder.glob(".*.tmp"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """One process at a time in a folder. The lock goes with its process, however that ends: a stale file never blocks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+")
    except OSError as error:
        raise MachineError(f"{folder} cannot be written: {error.strerror}. Choose another folder.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise MachineError(
                f"{folder} is in use by process {file.read().strip()}. Wait for it, stop it, or choose another folder."
            ) from None
        except OSError as error:  # some network file systems
            raise MachineError(f"{folder} cannot be locked: {error.strerror}. Choose one on a local disk.") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
