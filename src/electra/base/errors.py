"""Errors for people, and the exit code of each kind.

Exit codes are a contract (docs/formats.md): scripts and schedulers act on them. A message is one line with the
offending value and the remedy. Bugs of ours are assertions and keep their traceback.
"""

import os
import shlex
from typing import TypeVar

LONGEST_MESSAGE_LINE = 1000
COMMON = "in all processes"
SAID = "said already"
AnyError = TypeVar("AnyError", bound=BaseException)


class ElectraError(ValueError):
    """Base of every error meant for people; `exit_code` is what the command line returns. A message may quote a cell of 20 MB
    or a hundred thousand columns, so of each long line only the beginning and the remedy are kept. `parameters` are the
    function parameters that the message names and that the command line knows as options."""

    exit_code = 1

    def __init__(self, message: object = "", parameters: tuple[str, ...] = ()) -> None:
        super().__init__("\n".join(map(shortened, str(message).split("\n"))))
        self.parameters = parameters


class SettingsError(ElectraError):
    exit_code = 2  # wrong usage or settings


class DataError(ElectraError):
    exit_code = 3  # input text or tables that cannot be used as they are


class CorruptError(ElectraError):
    exit_code = 4  # a file of ours whose bytes are not what was written, or a file that cannot be trusted


class MachineError(ElectraError):
    exit_code = 5  # disk, permission, lock, missing optional package


class DiskFullError(MachineError):
    """The disk is full. A class of its own, so that whoever writes in parts can say more about what is kept."""


class ForbiddenError(MachineError):
    """A file that this user may not read: nothing is known of it, so it counts neither as damaged nor as absent."""


class PeerError(MachineError):
    """Another process of the run is gone or does not answer."""


class DivergedError(ElectraError):
    exit_code = 6  # training produced numbers that are not finite


class MemoryExhaustedError(ElectraError):
    exit_code = 7  # the device ran out of memory


class PreemptedError(ElectraError):
    exit_code = 75  # SIGTERM: saved; run the same command again


class InterruptedRunError(ElectraError):
    exit_code = 130  # SIGINT: saved; run the same command again


class PipeClosedError(ElectraError):
    exit_code = 141  # the reader of our output went away (`| head`): saved; run the same command again


def shortened(line: str) -> str:
    return line if len(line) <= LONGEST_MESSAGE_LINE else f"{line[: LONGEST_MESSAGE_LINE - 300]} … {line[-290:]}"


def first_line(error: object) -> str:
    """The first line of a library's error message, which may be a page long, or empty."""
    return next(iter(str(error).splitlines()), "")


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def command(*words: object) -> str:
    """A command to type, with quotes around words that a shell would split."""
    return shlex.join(["electra", *map(str, words)])


def common(error: AnyError) -> AnyError:
    """Mark an error that all processes of a run raise, so that only the first one reports it."""
    error.add_note(COMMON)
    return error


def is_common(error: BaseException) -> bool:
    return COMMON in getattr(error, "__notes__", ())


def already_said(error: AnyError) -> AnyError:
    error.add_note(SAID)
    return error


def is_said(error: BaseException) -> bool:
    """Whether another process has reported the error, so that this one keeps silent."""
    return SAID in getattr(error, "__notes__", ()) or (is_common(error) and not is_first_process())


def is_first_process() -> bool:
    """Whether this is process 0 of those that torchrun started, or a process alone."""
    return os.environ.get("RANK", "0") == "0"


def error_of(exit_code: int) -> type[ElectraError]:
    kinds = [kind for kind in ElectraError.__subclasses__() if kind.exit_code == exit_code]
    return kinds[0] if kinds else ElectraError
