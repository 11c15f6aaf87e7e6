"""A day of training in an hour: very many tiny steps, thousands of saves, evaluations and lines of metrics. A process that
leaks a little at each of them is found here and not on the third day of somebody's run."""

import os
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from electra.train.checkpoint import checkpoint_folders, problem_of, step_of
from electra.train.log import DAMAGED, METRICS, read_metrics, read_records
from helpers import command, environment

STEPS = int(os.environ.get("ELECTRA_LONG_RUN_STEPS", "200000"))
LINES, EVALUATIONS, SAVES, KEPT_FOR_EVER = 4000, 1000, 2000, 4  # however many steps; samples.json is full at a fifth
RECIPE = f"""
seed = 3
encoder = {{layers = 1, hidden = 8, heads = 1, intermediate = 8, embedding = 8, positions = 16}}
generator = {{width = 1.0}}
rows = {{length = 8}}
schedule = {{warmup = 4}}
[train]
steps = {STEPS}
batch = 2
log_every = {STEPS // LINES}
evaluate_every = {STEPS // EVALUATIONS}
evaluate_rows = 4
save_every = {STEPS // SAVES}
keep = 2
keep_every = {STEPS // KEPT_FOR_EVER}
"""


class Look(NamedTuple):
    """What the system says of the process and its folder while it works."""

    step: int
    memory: int
    open_files: int
    threads: int
    disk: int


def look(pid: int, run: Path) -> Look | None:
    """None where it has just ended. Fails where metrics.jsonl cannot be read."""
    records, damaged = read_records(run)
    assert not damaged
    assert all(earlier["step"] <= later["step"] for earlier, later in pairwise(records))
    process = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        open_files = len(list((process / "fd").iterdir()))
        # what it has asked for itself, whether in memory or put aside: pages of libraries come and go as the system likes
        memory = sum(int(status[key].split()[0]) for key in ("RssAnon", "VmSwap")) * 1024
        threads = int(status["Threads"])
    except (OSError, KeyError):
        return None
    return Look(records[-1]["step"] if records else 0, memory, open_files, threads, disk(run))


def disk(run: Path) -> int:
    """Without what grows with every line on purpose. Files may go while we look."""
    total = 0
    for folder, _, names in os.walk(run):
        for name in names:
            path = Path(folder, name)
            if name != METRICS and "tensorboard" not in path.parts and path.is_file():
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue
    return total


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_very_long_run_takes_no_more_memory_files_or_disk_at_its_end(prepared, tmp_path):
    (tmp_path / "long.toml").write_text(RECIPE)
    run, looks = tmp_path / "run", []
    words = command("pretrain", tmp_path / "long.toml", f"data={prepared}", f"run={run}")
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(words, env=environment(), stdout=output, stderr=output)
        while process.poll() is None:
            if (run / METRICS).exists() and (now := look(process.pid, run)) and 0 < now.step < STEPS:
                looks.append(now)
            time.sleep(max(0.1, 2 * STEPS / 200_000))
    assert process.returncode == 0, (tmp_path / "output").read_text()[-2000:]

    early = [seen for seen in looks if 0.1 <= seen.step / STEPS < 0.3]
    late = [seen for seen in looks if seen.step / STEPS >= 0.8]
    print(f"{STEPS} steps, {len(looks)} looks, early {early[-1:]}, late {late[-1:]}")
    assert len(early) > 20 and len(late) > 20
    most_early, most_late = (Look(*map(max, zip(*looks, strict=True))) for looks in (early, late))
    # a run remembers what was evaluated and one loss for each line, less than 1 MB here; everything else is as it was
    assert most_late.memory < most_early.memory + 3_000_000
    assert most_late.open_files <= most_early.open_files
    assert most_late.threads <= most_early.threads

    checkpoints = checkpoint_folders(run / "checkpoints")
    for_ever = [STEPS * n // KEPT_FOR_EVER for n in range(1, KEPT_FOR_EVER + 1)]
    assert list(map(step_of, checkpoints)) == sorted({*for_ever, STEPS - STEPS // SAVES})
    assert not any(map(problem_of, checkpoints)) and len(list((run / "checkpoints").iterdir())) == len(checkpoints)
    one = disk(checkpoints[-1])
    assert most_late.disk < most_early.disk + KEPT_FOR_EVER * 1.1 * one

    kinds = [record["kind"] for record in read_metrics(run)]
    assert kinds.count("train") == LINES and kinds.count("heldout") == EVALUATIONS
    assert (run / METRICS).stat().st_size < 1000 * len(kinds) and not (run / DAMAGED).exists()
    assert (tmp_path / "output").stat().st_size < 200 * len(kinds)
