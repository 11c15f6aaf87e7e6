"""Nothing silently wrong: every fault of the table ends as the table says, with one clear line and nothing half-written."""

import os
import re
import resource
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from faults.cases import CASES, ESCAPE, NOT_WRITTEN, Case
from faults.world import run_words
from helpers import command, environment


def run_alone(case: Case, folder: Path) -> tuple[int, str]:
    """As a process, whose memory is measured; a limit on the size of a file stands in for a full disk."""

    def limit() -> None:
        if case.file_limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (case.file_limit, case.file_limit))

    output = folder.parent / "output.txt"
    started = time.monotonic()
    with output.open("wb") as file:
        words = command(*shlex.split(case.words))
        process = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment(), preexec_fn=limit
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert usage.ru_utime + usage.ru_stime < case.seconds, f"{usage.ru_utime:.0f} s of processor time"
    assert time.monotonic() - started < 4 * case.seconds
    assert usage.ru_maxrss < case.megabytes * 1024, f"{usage.ru_maxrss // 1024} MB"
    return process.returncode, output.read_text("utf-8", "replace")


@pytest.mark.parametrize(
    "case", [pytest.param(it, id=it.id, marks=[] if it.fast else [pytest.mark.slow]) for it in CASES]
)
def test_a_fault_ends_as_the_table_says(case: Case, world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "world"
    shutil.copytree(world, folder)
    case.change(folder)
    before = {path: path.read_bytes() for pattern in case.unchanged for path in folder.glob(pattern)}
    assert bool(before) == bool(case.unchanged)
    if case.alone:
        code, output = run_alone(case, folder)
    else:
        done = run_words(case.words, folder, case.stdin)
        code, output = done.returncode, done.stdout + done.stderr
    assert code == case.code, output
    assert re.search(case.says, output), output
    assert "Traceback" not in output and "A bug in electra" not in output
    assert not set("\x1b\x9b\u202e") & set(output), "an escape sequence reached the terminal"
    assert len(output) < (20_000 if code else 2_000_000)  # a text that was asked about is shown whole
    assert {path: path.read_bytes() for path in before} == before
    assert not [path for path in folder.rglob(".*.tmp")]
    assert not list(tmp_path.rglob(NOT_WRITTEN)) and not Path(NOT_WRITTEN).exists(), "somebody's code was run"
    for page in folder.rglob("*.md"):
        assert "\x1b" not in page.read_text("utf-8") and not re.search(r"(?<!\\)<img", page.read_text("utf-8"))


def test_the_table_is_large_and_its_names_are_different() -> None:
    assert len(CASES) >= 150 and len({case.id for case in CASES}) == len(CASES)
    assert ESCAPE.startswith("\x1b")
