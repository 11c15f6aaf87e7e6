"""Screens of pre-training recipes and fine-tuning protocols: every arm is pre-trained, annealed, then fine-tuned on the same tasks.

    python bench/screens.py bench/arms.json --data SHARDS --glue GLUE --out FOLDER [--at-once 2] [--seconds 400] [--name screens]

The file is a list of {"name", "recipe", "overrides": ["key=value", …], "tasks": ["mnli", …], "finetune": ["epochs=1", …],
"seeds": 1}. With "of": "another arm" instead of "recipe" that arm's network is fine-tuned by another protocol; with "model": FOLDER a
network that is there already, with "data": SHARDS on other shards. With "yardstick": "an arm"
the discriminator is also scored on text corrupted by that arm's generator (`electra evaluate --generator`), which compares across arms.

A finished arm is kept as long as the file says the same of it, so the same command goes on after a stop, and what is measured is written after each. No arm is begun later
than `--seconds` after the start. Arms that run at the same time share the device (start CUDA's MPS first): compare their losses
and scores, not their speeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import machine

Arm = dict[str, Any]
SHOWN = ("auc", "mlm_loss")


class Screens:
    def __init__(self, arms: list[Arm], data: Path, glue: Path, out: Path, seconds: float):
        self.arms, self.data, self.glue, self.out = arms, data, glue, out
        self.until = time.monotonic() + seconds
        self.done = {arm["name"]: threading.Event() for arm in arms}

    def measure(self, arm: Arm) -> dict[str, Any]:
        path, result = self.out / f"{arm['name']}.json", {"arm": arm}
        for other in {arm.get("of"), arm.get("yardstick")} - {None, arm["name"]}:
            self.done[other].wait()
        kept = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        if kept.get("arm") == arm:
            result = kept
        elif time.monotonic() > self.until:
            result["skipped"] = "no time left"
        else:
            try:
                if "recipe" in arm:
                    result |= self.pretrain(arm)
                if "yardstick" in arm:
                    result["yardstick"] = self.judge(arm)
                self.done[arm["name"]].set()  # whoever waits needs the network, not its scores
                if arm.get("tasks"):
                    result["scores"] = self.finetune(arm)
            except subprocess.CalledProcessError as error:
                result["exit_code"] = error.returncode
            path.write_text(json.dumps(result, indent=1))
        self.done[arm["name"]].set()
        print(line(result), flush=True)
        return result

    def electra(self, log: str, *words: object) -> float:
        """Runs a command with its output in a file; returns the seconds it took."""
        started = time.perf_counter()
        with (self.out / log).open("w") as output:
            command = [sys.executable, "-m", "electra", *map(str, words)]
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=True)
        return time.perf_counter() - started

    def run_of(self, arm: Arm) -> Path:
        return Path(arm["model"]) if "model" in arm else self.out / "runs" / arm.get("of", arm["name"])

    def pretrain(self, arm: Arm) -> dict[str, Any]:
        run = self.run_of(arm)
        words = [f"data={arm.get('data', self.data)}", f"run={run}", *arm["overrides"]]
        seconds = self.electra(f"{arm['name']}.log", "pretrain", arm["recipe"], *words)
        records = [json.loads(text) for text in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
        lines = [r for r in records if r["kind"] == "train"]
        speeds = [line["tokens_per_second"] for line in lines if line["tokens_per_second"]]
        return {
            "seconds": round(seconds, 1),
            "tokens_per_second": round(statistics.median(speeds)),
            "training": {key: statistics.fmean(line[key] for line in lines[-4:]) for key in SHOWN if key in lines[-1]},
            "heldout": [r for r in records if r["kind"] == "heldout"][-1],
            "alarms": [r["text"] for r in records if r["kind"] == "alarm"],
        }

    def judge(self, arm: Arm) -> dict[str, float]:
        log = f"{arm['name']}.yardstick.json"
        self.electra(log, "evaluate", self.run_of(arm), "--generator", self.out / "runs" / arm["yardstick"], "--json")
        text = (self.out / log).read_text("utf-8")
        metrics: dict[str, float] = json.loads(text[text.index("{") :])["trained"]
        return metrics

    def finetune(self, arm: Arm) -> dict[str, list[float]]:
        """Each task's headline, seed by seed."""
        target, seeds = self.out / "finetuned" / arm["name"], arm.get("seeds", 1)
        settings = [f"data={self.glue}", *arm.get("finetune", ())]
        options = ["--seeds", seeds, "--jobs", len(arm["tasks"]) * seeds, "--out", target]
        self.electra(f"{arm['name']}.finetune.log", "finetune", self.run_of(arm), *arm["tasks"], *settings, *options)
        tasks = json.loads((target / "results.json").read_text("utf-8"))["tasks"]
        return {
            name: [task["scores"]["dev"][f"seed {seed}"][task["metric"]] for seed in range(seeds)]
            for name, task in tasks.items()
        }


def line(result: dict[str, Any]) -> str:
    metrics = {key: f"{result['heldout'][key]:.3f}" for key in reversed(SHOWN) if key in result.get("heldout", {})}
    metrics |= {"yardstick": f"{result['yardstick']['auc']:.3f}"} if "yardstick" in result else {}
    metrics |= {name: f"{100 * statistics.median(by_seed):.1f}" for name, by_seed in result.get("scores", {}).items()}
    metrics |= {key: str(result[key]) for key in ("exit_code", "skipped") if key in result}
    return f"{result['arm']['name']:20} " + " ".join(f"{name} {value}" for name, value in metrics.items())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arms", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no arm later than that")
    parser.add_argument("--name", default="screens", help="of the file under bench/results")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arms = json.loads(arguments.arms.read_text("utf-8"))
    screens = Screens(arms, arguments.data, arguments.glue, arguments.out, arguments.seconds)
    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for result in pool.map(screens.measure, arms):
            results.append(result)
            machine.write(arguments.name, {"arms": results})


if __name__ == "__main__":
    main()
