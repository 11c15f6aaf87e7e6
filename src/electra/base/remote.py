"""Places that are not paths of this machine: `s3://bucket/corpus`, `memory://folder` and all else that fsspec opens.

`RemotePath` has the few methods of a Path that reading text and writing shards need, under the same names. Files are written
complete or not at all, as object stores do; there are no locks."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from electra.base.errors import ElectraError, MachineError, SettingsError

_STAMPS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime", "created")
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")


@dataclass(frozen=True, order=True)
class RemotePath:
    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def in_this_process(self) -> bool:
        return self.url.startswith("memory:")

    def resolve(self) -> "RemotePath":
        return self

    def exists(self) -> bool:
        with self._asking() as (system, path):
            system.invalidate_cache()  # others write there too
            return bool(system.exists(path))

    def is_file(self) -> bool:
        with self._asking() as (system, path):
            if system.isfile(path):
                return True
            try:
                system.info(path)
            except Exception as error:  # to isfile, a server that does not answer is a file that is not there
                cause = error.__cause__
                if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                    raise cause from None
            return False

    def is_dir(self) -> bool:
        with self._asking() as (system, path):
            system.invalidate_cache()
            return bool(system.isdir(path))

    def status(self) -> tuple[int, str]:
        """The size, and a stamp that changes with the content."""
        with self._asking() as (system, path):
            system.invalidate_cache()
            return _size_and_stamp(system.info(path))

    def files(self) -> "Iterator[tuple[RemotePath, int, str]]":
        """The files of this folder and those below, by name, with size and stamp."""
        with self._asking() as (system, path):
            system.invalidate_cache()
            entries = system.find(path, detail=True)
        for name, entry in sorted(entries.items()):
            relative = name.strip("/").removeprefix(path.strip("/")).strip("/")
            yield self / relative, *_size_and_stamp(entry)

    def iterdir(self) -> "Iterator[RemotePath]":
        with self._asking() as (system, path):
            system.invalidate_cache()
            names = system.ls(path, detail=False) if system.isdir(path) else []
        yield from (self / name.rstrip("/").rpartition("/")[2] for name in sorted(names))

    def open(self, mode: Literal["rb"]) -> io.BufferedReader:
        with self._asking() as (system, path):
            return io.BufferedReader(_Reported(system.open(path, mode), self))

    def read_bytes(self) -> bytes:
        with self._asking() as (system, path):
            return bytes(system.cat_file(path))

    def write_bytes(self, data: bytes) -> None:
        with self._asking() as (system, path):
            try:
                system.pipe_file(path, data)
            except FileNotFoundError:  # a file system with real folders
                system.makedirs(system._parent(path), exist_ok=True)
                system.pipe_file(path, data)

    def unlink(self) -> None:
        with self._asking() as (system, path):
            system.rm_file(path)

    def remove(self) -> None:
        """Remove it with all that is below."""
        with self._asking() as (system, path):
            system.invalidate_cache()
            if system.exists(path):
                system.rm(path, recursive=True)

    @contextmanager
    def _asking(self) -> Iterator[tuple[Any, str]]:
        """Turn a store's errors, which come in many classes, into ours; a missing file stays a FileNotFoundError."""
        try:
            import fsspec
        except ImportError:
            raise MachineError(f"{self} needs fsspec. pip install fsspec.") from None
        try:
            yield fsspec.core.url_to_fs(self.url)
        except (FileNotFoundError, ElectraError):
            raise
        except ImportError as error:
            raise MachineError(f"{self} cannot be opened: {error}.") from None
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, ValueError) and "rotocol" in reason:
                raise SettingsError(
                    f"{self} cannot be opened: {reason}. Give a path, or a URL that fsspec knows."
                ) from None
            raise MachineError(f"{self} cannot be reached: {reason}. Check the address and the credentials.") from None


def _size_and_stamp(entry: dict[str, Any]) -> tuple[int, str]:
    stamp = next((entry[name] for name in _STAMPS if entry.get(name)), "")
    return int(entry["size"]), str(stamp.timestamp() if isinstance(stamp, datetime) else stamp)


class _Reported(io.RawIOBase):
    """A file of a store, whose errors name it."""

    def __init__(self, file: Any, place: RemotePath) -> None:
        self.file, self.place = file, place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self.place._asking():
            data = self.file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self.file.seek(offset, whence))

    def tell(self) -> int:
        return int(self.file.tell())

    def close(self) -> None:
        if not self.closed:
            self.file.close()
        super().close()


Place = Path | RemotePath


def is_url(text: str) -> bool:
    return _URL.match(text) is not None


def as_place(text: str | Path | RemotePath) -> Place:
    """A path as it is, a `file://` URL as the path it means, any other URL as a RemotePath."""
    if isinstance(text, RemotePath | Path):
        return text
    match = _URL.match(text)
    if not match:
        return Path(text)
    path = text[len(match[0]) :]
    match match[1].lower():
        case "file":
            return Path(unquote(re.sub("^localhost(?=/)", "", path), errors="surrogateescape"))
        case "local":  # fsspec's own scheme, whose names are not quoted
            return Path(path)
    return RemotePath(text)
