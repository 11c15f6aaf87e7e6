"""What every result is stored with: hardware, versions, command, time. Results are whole files, whoever else writes or is killed."""

import fcntl
import logging
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def description() -> dict[str, Any]:
    import torch

    from electra.base.jobs import cpu_count

    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "cpu": model[0].split(":")[1].strip() if model else platform.processor(),
        "cores": cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write(name: str, result: dict[str, Any]) -> None:
    from electra.base.files import write_json

    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    write_json(path, description() | result)
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def read(name: str) -> dict[str, Any]:
    """What was written last, or nothing. A file that is cut is said in a line and kept under another name."""
    from electra.base.files import read_or_set_aside

    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
    return read_or_set_aside(RESULTS / f"{name}.json") or {}


@contextmanager
def alone() -> Iterator[None]:
    """Between reading a result and writing more into it nobody else does. Whoever comes meanwhile waits."""
    RESULTS.mkdir(exist_ok=True)
    folder = os.open(RESULTS, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
