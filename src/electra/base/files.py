"""Files that are complete or absent, folders that belong to one process at a time, and one reader for JSON, whoever wrote it.

What is read may be truncated, corrupted, edited or hostile, so nothing here trusts a name, a size or a number: files are regular
and bounded, JSON is UTF-8 without lone surrogates, endless numbers or endless nesting, and a manifest names plain files only."""

import errno
import fcntl
import glob
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from electra.base.errors import (
    CorruptError,
    DiskFullError,
    ElectraError,
    ForbiddenError,
    MachineError,
    SettingsError,
    command,
)
from electra.base.remote import Place, RemotePath

if TYPE_CHECKING:
    from pydantic import BaseModel, TypeAdapter, ValidationError

log = logging.getLogger(__name__)
Content = TypeVar("Content")
AnyModel = TypeVar("AnyModel", bound="BaseModel")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_JSON = 1 << 28
DEEPEST, MOST_DIGITS = 64, 4300
LONGEST_NAME = 200
TRUST = "ELECTRA_TRUST"
FOLDER_MANIFEST = "MANIFEST.json"
FOLDER_FILES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "task.json",
    "model.onnx",
)
"""The files of a model folder that are read, so its manifest must name them."""
FOLDER_KINDS = {
    "config.toml": "a run",
    "manifest.json": "prepared shards",
    "config.json": "a model",
    "comparison.json": "a comparison",
    "tokenizer.json": "a tokenizer",
}
"""The file by which a folder of ours is recognised, and what the folder then holds; the first of several counts."""
_SURROGATE = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")
_TEMPORARY = re.compile(r"\..+\.(\d+)\.tmp")
_MACHINE = os.urandom(3).hex()
"""Part of temporary names, because processes of several machines or containers that share a disk may have the same pid."""

# Writing


@contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn the system's error into one line if a file cannot be written: the file, the bytes it needs and those that are free."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno not in FULL:
            raise MachineError(f"{path} cannot be written: {error.strerror or error}. Choose another place.") from None
        size = "more bytes" if needed is None else f"{needed:,} bytes"
        free = shutil.disk_usage(next(it for it in path.absolute().parents if it.is_dir())).free
        raise DiskFullError(
            f"{path} does not fit ({error.strerror}): it needs {size}, {free:,} are free. What was there before is "
            "unchanged. Free some space and run the same command again."
        ) from None


def write_synced(path: Path, data: bytes) -> None:
    with writing(path, len(data)), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync a folder to the disk: only then is a rename in it safe from a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_name(path: Path) -> Path:
    """A name beside `path` for this process's temporary file; `remove_leftovers` recognises it."""
    return path.with_name(f".{path.name}.{_MACHINE}.{os.getpid()}.tmp")


@contextmanager
def replacing(path: Path, needed: int | None = None) -> Iterator[Path]:
    """Yield a temporary path, which becomes `path` once all of it is on the disk: complete or absent, also after a power cut."""
    if path.exists() and not path.is_file():  # the rename would replace it: /dev/null for everybody
        raise MachineError(f"{path} is a folder, a pipe or a device, not a file. Choose another place.")
    temporary = temporary_name(path)
    try:
        with writing(path, needed):
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
    finally:
        with suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)


def write_atomically(path: Place, data: bytes) -> None:
    if isinstance(path, RemotePath):
        return path.write_bytes(data)
    with replacing(path, len(data)) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, content: Any) -> None:
    remove_leftovers(path.parent, path.name)
    write_atomically(path, (json_text(content, indent=1) + "\n").encode())


def json_text(content: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """`content` as JSON. Numbers that are not finite become null, because JSON has none."""
    try:
        return json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False, default=default)
    except ValueError:
        finite = json.loads(json.dumps(content, default=default), parse_constant=lambda _: None)
        return json.dumps(finite, indent=indent, ensure_ascii=False)


def remove_leftovers(folder: Place, name: str | None = None) -> None:
    """Remove temporary files of killed processes: without `name` all of them, for a caller who holds the folder's lock. Without a
    lock only those for the file `name`, and none of another process that is running."""
    if isinstance(folder, RemotePath):
        return
    for leftover in folder.glob(".*.tmp" if name is None else f".{glob.escape(name)}.*.tmp"):
        match = _TEMPORARY.fullmatch(leftover.name)
        if name is None or (match and (int(match[1]) == os.getpid() or not is_running(int(match[1])))):
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def is_running(pid: object) -> bool:
    """Whether a process runs on this machine. A zombie has ended."""
    if not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:  # somebody else's
        return True
    except (OSError, OverflowError):
        return False
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


# Reading


def read_bytes(path: Place, most: int = MOST_JSON) -> bytes:
    """Read a regular file of bounded size: a pipe or a device might never end."""
    try:
        if isinstance(path, RemotePath):
            size, _ = path.status()
        else:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise CorruptError(f"{path} is not a regular file. Put the right one there.")
            size = status.st_size
        if size > most:
            raise CorruptError(f"{path} has {size:,} bytes, more than the limit of {most:,}.")
        return path.read_bytes()
    except FileNotFoundError:
        raise CorruptError(f"{path} is missing. Restore it.") from None
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Place, error: OSError) -> MachineError:
    kind = ForbiddenError if isinstance(error, PermissionError) else MachineError
    return kind(f"{path} cannot be read: {error.strerror}.")


def parse_json(data: bytes | str, lone_surrogates: bool = False) -> Any:
    """Parse standard JSON of bounded depth and numbers; a ValueError says what is wrong in words. `lone_surrogates`: accept
    them, for a caller who looks for them."""
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte order mark: save it as UTF-8 without one")
        content = json.loads(
            text, parse_constant=_refuse, parse_float=_finite, parse_int=_integer, object_pairs_hook=_once
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    if text.count("[") + text.count("{") > DEEPEST and _depth(content) > DEEPEST:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if not lone_surrogates and _SURROGATE.search(text):
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"a lone surrogate (\\u{ord(half):04x})") from None
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse two values under one key, of which every reader would choose its own."""
    if len(content := dict(pairs)) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice[:60]!r} appears twice")
    return content


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"the number {digits[:20]} is too large for a float")
    return value


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits, at most {MOST_DIGITS:,} are read")
    return int(digits)


def _depth(content: Any) -> int:
    depth, layer = 0, [content]
    while layer := [part for whole in layer for part in _parts(whole)]:
        depth += 1
    return depth


def _parts(whole: Any) -> Collection[Any]:
    return whole.values() if isinstance(whole, dict) else whole if isinstance(whole, list) else ()


def read_json(path: Place, remedy: str = "restore it, or remove it") -> Any:
    try:
        return parse_json(read_bytes(path))
    except ElectraError:
        raise
    except ValueError as error:
        raise CorruptError(f"{path} cannot be read: {error}. It was cut or edited: {remedy}.") from None


def read_object(path: Place, remedy: str = "restore it, or remove it") -> dict[str, Any]:
    content = read_json(path, remedy)
    if not isinstance(content, dict):
        raise CorruptError(f"{path} cannot be read: it holds {type(content).__name__}, not an object: {remedy}.")
    return content


def read_model(path: Place, kind: type[AnyModel], remedy: str) -> AnyModel:
    """Read a file of ours and validate it as a pydantic model."""
    from pydantic import ValidationError

    try:
        return kind.model_validate(read_object(path, remedy))
    except ValidationError as error:
        what = f"is damaged or of another version ({validation_text(error)})"
        raise CorruptError(f"{path} {what}: {remedy}.") from None


def validation_text(error: "ValidationError") -> str:
    """The first three problems with the content of a file. A check of several values has no location, and pydantic puts a prefix before
    its message, which is removed."""
    problems = [(".".join(map(str, it["loc"])), it["msg"].removeprefix("Value error, ")) for it in error.errors()[:3]]
    return "; ".join(f"{place}: {text}" if place else text for place, text in problems)


def read_or_set_aside(path: Path) -> dict[str, Any] | None:
    """Read a file that its owner can write anew; None if there is none. A damaged one is renamed, and None returned."""
    from pydantic import TypeAdapter

    return read_shaped_or_set_aside(path, TypeAdapter(dict[str, Any]))


def read_shaped_or_set_aside(path: Path, shape: "TypeAdapter[Content]") -> Content | None:
    """The same for a file whose content must also validate as `shape`."""
    from pydantic import ValidationError

    if not path.is_file():
        return None
    try:
        return shape.validate_python(read_object(path))
    except CorruptError as error:
        problem = str(error)
    except ValidationError as error:
        problem = f"{path} is damaged ({validation_text(error)})."
    log.warning("%s Kept as %s; a new one is written.", problem, set_aside_file(path).name)
    return None


def set_aside_file(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in count(1))
    return path.rename(next(name for name in names if not name.exists()))


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The objects of a file that grows line by line, and its damaged lines. A broken last line without a line end is what a kill
    leaves, and is ignored."""
    records: list[dict[str, Any]] = []
    damaged: list[bytes] = []
    *lines, last = (read_bytes(path, 1 << 34) if path.is_file() else b"").split(b"\n")
    for line in (*lines, *([last] if last else [])):
        try:
            record = parse_json(line)
            records.append(record) if isinstance(record, dict) else damaged.append(line)
        except ValueError:
            if line is not last and line.strip():
                damaged.append(line)
    return records, damaged


# Names and manifests


def is_plain_name(name: str) -> bool:
    """Whether a name stays in its folder, on every system, and a terminal shows it as it is."""
    return (
        0 < len(os.fsencode(name)) <= LONGEST_NAME
        and name.isprintable()
        and not name.startswith(".")
        and not set(name) & {"/", "\\"}
    )


def manifest_problems(folder: Path, manifest: Any, required: Collection[str]) -> Iterator[str]:
    """Yield how the files of a folder differ from its manifest; sizes are compared before hashes. `required` are names that
    the manifest must have an entry for."""
    if not isinstance(manifest, Mapping) or not manifest:
        yield "its manifest names no file"
        return
    yield from (f"its manifest does not name {name}" for name in required if name not in manifest)
    for name, entry in manifest.items():
        if not is_plain_name(name):
            yield f"its manifest names {name[:60]!r}, which is no file of the folder"
        elif not isinstance(entry, Mapping) or not isinstance(entry.get("sha256"), str):
            yield f"its manifest has no sha256 of {name}"
        elif problem := file_problem(folder / name, entry.get("bytes"), entry["sha256"]):
            yield f"{name} {problem}"


def manifest_entry(data: bytes) -> dict[str, Any]:
    """The manifest's entry for a file with these bytes."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def file_problem(path: Place, size: Any, sha256: str) -> str | None:
    """How a file differs from its manifest entry; None if it does not."""
    try:
        if isinstance(path, RemotePath):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                return "is not a regular file"
            if size is not None and status.st_size != size:
                return f"has {status.st_size:,} bytes, not {str(size)[:20]}"
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "is missing"
    except PermissionError as error:
        raise unreadable(path, error) from None
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if digest == sha256 else f"has sha256 {digest[:12]}…, not {sha256[:12]}…"


def folder_problems(folder: Path) -> list[str]:
    """How a model folder of ours differs from what was written; empty for a folder without a manifest, such as other people's."""
    path = folder / FOLDER_MANIFEST
    if not path.exists():
        return []
    try:
        manifest = read_object(path)
    except ForbiddenError:
        raise
    except (CorruptError, MachineError) as error:
        return [str(error).rstrip(".")]
    required = [name for name in FOLDER_FILES if (folder / name).exists()]
    required += [path.name for path in folder.glob("model-*.safetensors")]
    return list(manifest_problems(folder, manifest, required))


def refuse_edited(folder: Path) -> None:
    """Refuse a damaged or edited model folder, unless people say that they trust it. Its card is always theirs to edit."""
    problems = [problem for problem in folder_problems(folder) if not problem.startswith("README.md ")]
    if not problems:
        return
    remedy = f'Restore it ("{command("verify", folder)}" says what differs)'
    distrust(f"{folder} was damaged or edited: {'; '.join(problems[:3])}", remedy)


def refuse_other_kind(folder: Path, own: str) -> None:
    """Refuse to write into a folder of another kind (shards, the model that is read). `own` is the file that marks the kind written."""
    mark = next((mark for mark in FOLDER_KINDS if (folder / mark).exists()), own)
    if mark != own:
        raise SettingsError(f"{folder} holds {FOLDER_KINDS[mark]}. Choose another folder.")


def distrust(problem: str, remedy: str) -> None:
    if not os.environ.get(TRUST):
        raise CorruptError(f"{problem}. {remedy}, or trust it as it is.", ("trust",))
    log.warning("%s. Using it anyway, as requested.", problem)


@contextmanager
def trusting(wanted: bool) -> Iterator[None]:
    """A context in which edited model folders are accepted, also by processes started in it."""
    before = os.environ.get(TRUST, "")
    os.environ[TRUST] = "1" if wanted else before
    try:
        yield
    finally:
        os.environ[TRUST] = before


@contextmanager
def lock(folder: Place, shared: bool = False, required: bool = True) -> Iterator[None]:
    """Lock a folder for one process at a time, or for several with `shared`. The lock ends with its process, however that ends: a
    stale file never blocks. Object stores are not locked. Some network file systems have no locks: `required=False` only warns. Folders
    that had to be made are removed again if nothing was written to them, because the work was refused."""
    if isinstance(folder, RemotePath):
        yield
        return
    created = [it for it in (folder, *folder.parents) if not it.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+")
    except OSError as error:
        raise MachineError(f"{folder} cannot be written: {error.strerror}. Choose another folder.") from None
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise MachineError(
                f"{folder} is in use by process {file.read(20).strip()}. Wait for it, stop it, or choose another folder."
            ) from None
        except OSError as error:
            if required:
                raise MachineError(
                    f"{folder} cannot be locked: {error.strerror}. Choose a folder on a local disk."
                ) from None
            log.warning("%s cannot be locked (%s): make sure that nothing else writes there.", folder, error.strerror)
        with suppress(OSError):  # the pid is for people; the lock holds without it, also on a full disk
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                if not shared:  # others that share it may have written the pid
                    file.truncate(0)
                if not shared and created and [it.name for it in folder.iterdir()] == [".lock"]:
                    (folder / ".lock").unlink()
                    for path in created:
                        path.rmdir()


def check_storage(folder: Path) -> None:
    """Refuse storage that is unsafe for a run (the caller holds the lock): two runs must not write the same folder, and a checkpoint
    is a folder renamed when complete. Mounted object stores and some network file systems grant every lock, or rename only files."""
    written, renamed = temporary_name(folder / "trial"), temporary_name(folder / "renamed-trial")
    try:
        is_locked = not is_free(folder)
        written.mkdir()
        written.rename(renamed)
    except OSError as error:
        problem = f"where folders cannot be renamed ({error.strerror or error})"
    else:
        problem = "" if is_locked else "where locks have no effect"
    finally:
        for trial in (written, renamed):
            with suppress(OSError):
                trial.rmdir()
    if problem:
        raise MachineError(
            f"{folder} is on storage {problem}: a run would not be safe there. Choose a folder on a local disk."
        )


def is_free(folder: Path) -> bool:
    try:
        with lock(folder):
            return True
    except MachineError:
        return False
