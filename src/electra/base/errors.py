"""What can go wrong for people, and the exit code each kind of trouble has.

Exit codes are a contract (docs/formats.md): scripts and schedulers act on them. A message is one line with the
offending value and the remedy. Bugs of ours are assertions and keep their traceback.
"""


class ElectraError(ValueError):
    """Base of every error meant for people; `exit_code` is what the command line returns."""

    exit_code = 1


class SettingsError(ElectraError):
    """Wrong usage or settings."""

    exit_code = 2


class DataError(ElectraError):
    """Input text or tables that cannot be used as they are."""

    exit_code = 3


class CorruptError(ElectraError):
    """A file of ours whose bytes are not what was written, or a file that cannot be trusted."""

    exit_code = 4


class MachineError(ElectraError):
    """Disk, permission, lock, missing optional package."""

    exit_code = 5


class DivergedError(ElectraError):
    """Training produced numbers that are not finite."""

    exit_code = 6


class MemoryExhaustedError(ElectraError):
    """The device ran out of memory."""

    exit_code = 7


class PreemptedError(ElectraError):
    """SIGTERM: saved; run the same command again."""

    exit_code = 75


class InterruptedRunError(ElectraError):
    """SIGINT: saved; run the same command again."""

    exit_code = 130
