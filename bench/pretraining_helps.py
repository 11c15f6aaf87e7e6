"""Does pre-training help? The same network fine-tuned from its pre-trained and from random weights, over several seeds.

    python bench/pretraining_helps.py RUN --data ../shared/data/glue --tasks cola rte sst2 [--seeds 3] [KEY=VALUE]...

RUN is a run folder or an export; --tasks are tasks or tables. Layer-wise decay holds the lower layers near where they began,
which is unfair to random weights: they are also trained with one rate for all layers, and the better of the two counts.
"""

import argparse
from pathlib import Path

import machine
from electra.base import config
from electra.finetuning.run import finetune

STARTS = {
    "pre-trained": {},
    "random": {"pretrained": False},
    "random, one rate": {"pretrained": False, "layer_decay": 1.0},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--data", default="", help="the folder of the tasks; tables need none")
    parser.add_argument("--tasks", nargs="+", default=["cola", "rte", "sst2"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="pretraining_helps")
    given = parser.parse_intermixed_args()
    words = ({"data": given.data} if given.data else {}) | config.parse_overrides(given.words)

    scores: dict[str, dict[str, list[float]]] = {}
    for name, more in STARTS.items():
        out = given.out / name.replace(", ", "-").replace(" ", "-")
        results = finetune(given.model, given.tasks, words | more, out, given.seeds, given.jobs)
        for task, result in results["tasks"].items():
            metric = result["metric"]
            by_seed = [result["scores"]["dev"][f"seed {seed}"][metric] for seed in range(given.seeds)]
            scores.setdefault(f"{task} ({metric})", {})[name] = by_seed

    report = {}
    for task, by_start in scores.items():
        medians = {name: sorted(values)[len(values) // 2] for name, values in by_start.items()}
        rival = max((name for name in STARTS if name != "pre-trained"), key=medians.__getitem__)
        margin = medians["pre-trained"] - medians[rival]
        spread = max(max(values) - min(values) for values in (by_start["pre-trained"], by_start[rival]))
        verdict = "larger than the spread" if margin > spread else "NOT larger than the spread"
        print(f"{task}")
        for name, values in by_start.items():
            print(f"  {name:18} median {medians[name]:.4f}  ({', '.join(f'{v:.4f}' for v in values)})")
        print(f"  margin {margin:+.4f}, spread {spread:.4f}: {verdict}")
        report[task] = {"scores": by_start, "margin": margin, "spread": spread}
    machine.write(given.name, {"seeds": given.seeds, "tasks": report})


if __name__ == "__main__":
    main()
