"""Screens of pre-training recipes: every arm is pre-trained for the same tokens, annealed, then fine-tuned on the same tasks.

    python bench/screens.py ARMS.json --data SHARDS --glue GLUE --out FOLDER [--at-once 2]

ARMS.json is a list of {"name", "recipe", "overrides": ["key=value", …], "tasks": ["mnli", …], "finetune": ["epochs=1", …]}.
A finished arm is kept, so the same command goes on after a stop. Arms that run at the same time share the device (start
CUDA's MPS first): compare their losses and scores, not their speeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import machine


def electra(log: Path, *words: object) -> float:
    """Runs a command with its output in `log`; returns the seconds it took."""
    started = time.perf_counter()
    with log.open("w") as out:
        subprocess.run(
            [sys.executable, "-m", "electra", *map(str, words)], stdout=out, stderr=subprocess.STDOUT, check=True
        )
    return time.perf_counter() - started


def pretrain(arm: dict[str, Any], data: Path, out: Path) -> dict[str, Any]:
    run = out / "runs" / arm["name"]
    words = [f"data={data}", f"run={run}", *arm["overrides"]]
    seconds = electra(out / f"{arm['name']}.log", "pretrain", arm["recipe"], *words)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    speeds = [r["tokens_per_second"] for r in records if r["kind"] == "train" and r["tokens_per_second"]]
    return {
        "seconds": round(seconds, 1),
        "tokens_per_second": round(statistics.median(speeds)),
        "heldout": [r for r in records if r["kind"] == "heldout"][-1],
        "alarms": [r["text"] for r in records if r["kind"] == "alarm"],
    }


def finetune(arm: dict[str, Any], glue: Path, out: Path) -> dict[str, Any]:
    target = out / "finetuned" / arm["name"]
    words = [*arm["tasks"], f"data={glue}", *arm.get("finetune", ()), "--jobs", len(arm["tasks"]), "--out", target]
    electra(out / f"{arm['name']}.finetune.log", "finetune", out / "runs" / arm["name"], *words)
    results = json.loads((target / "results.json").read_text("utf-8"))
    return {name: result["median"] for name, result in results["tasks"].items()}


def measure(arm: dict[str, Any], data: Path, glue: Path, out: Path) -> dict[str, Any]:
    path = out / f"{arm['name']}.json"
    if not path.is_file():
        result: dict[str, Any] = {"arm": arm}
        try:
            result |= pretrain(arm, data, out)
            if arm.get("tasks"):
                result["scores"] = finetune(arm, glue, out)
        except subprocess.CalledProcessError as error:
            result["exit_code"] = error.returncode
        path.write_text(json.dumps(result, indent=1))
    return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arms", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=2)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arms = json.loads(arguments.arms.read_text("utf-8"))
    with ThreadPoolExecutor(arguments.at_once) as pool:
        paths = arguments.data, arguments.glue, arguments.out
        results = list(pool.map(lambda arm: measure(arm, *paths), arms))
    for result in results:
        heldout, scores = result.get("heldout", {}), result.get("scores", {})
        shown = " ".join(f"{name} {score:.4f}" for name, score in scores.items())
        print(f"{result['arm']['name']:20} MLM {heldout.get('mlm_loss', float('nan')):.3f} {shown}")
    machine.write("screens", {"arms": results})


if __name__ == "__main__":
    main()
