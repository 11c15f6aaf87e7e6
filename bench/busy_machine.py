"""What other work on the machine does to pre-training on its processors: tokens a second, idle and beside busy processes, with threads
that wait awake (OpenMP's default, GOMP_SPINCOUNT=300000) and as the command line sets it (5000), in turns. Busy
processes multiply matrices with all threads, each in a session of its own, as other people's do.

    electra quickstart
    python bench/busy_machine.py runs/quickstart/shards [--recipe modern-tiny] [--steps 100] [--busy 1] [--repeats 3]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import machine

SPINS = {"awake": "300000", "ours": "5000"}
BUSY = "import torch\na = torch.randn(600, 600)\nwhile True: a @ a"
SECONDS = 60.0
"""A run that takes longer is stopped, and counts with the steps that it has done."""


def speed(shards: Path, recipe: str, steps: int, spin: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = [recipe, f"data={shards}", f"run={run}", f"train.steps={steps}", "train.log_every=1"]
        command = [sys.executable, "-m", "electra", "pretrain", *words, f"train.evaluate_every={steps}"]
        process = subprocess.Popen(
            [*command, "train.evaluate_rows=1"], env={**os.environ, "GOMP_SPINCOUNT": spin}, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    speeds = [it["tokens_per_second"] for it in records if it["kind"] == "train" and it["tokens_per_second"]]
    return len(speeds) / sum(1 / it for it in speeds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", type=Path)
    parser.add_argument("--recipe", default="modern-tiny")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--busy", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="busy_machine")
    given = parser.parse_args()
    rows = []
    for busy in (0, given.busy):
        others = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(busy)]
        try:
            measured: dict[str, list[float]] = {name: [] for name in SPINS}
            for _ in range(given.repeats):
                for name, spin in SPINS.items():
                    measured[name].append(speed(given.shards, given.recipe, given.steps, spin))
        finally:
            for other in others:
                other.kill()
                other.wait()
        for name, speeds in measured.items():
            rows.append({"busy": busy, "threads": name, "tokens_per_second": statistics.median(speeds), "all": speeds})
            print(rows[-1], flush=True)
    machine.write(given.name, {"recipe": given.recipe, "steps": given.steps, "rows": rows})


if __name__ == "__main__":
    main()
