"""Does pre-training help? The same network fine-tuned from its pre-trained and from random weights, over several seeds.

    python bench/pretraining_helps.py RUN --data ../shared/data/glue --tasks cola rte sst2 [--seeds 3] [--rates 1e-3 3e-3] [KEY=VALUE]...

RUN is a run folder or an export; --tasks are tasks or tables. Both sides have every rate, and the best median of each counts.
Layer-wise decay holds the lower layers near where they began, so random weights have one rate for all layers.
"""

import argparse
import statistics
from itertools import product
from pathlib import Path

import machine
from electra.base import config
from electra.finetuning.run import finetune

STARTS = {"pre-trained": {}, "random": {"pretrained": False, "layer_decay": 1.0}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--data", default="", help="the folder of the tasks; tables need none")
    parser.add_argument("--tasks", nargs="+", default=["cola", "rte", "sst2"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", help="else that of the settings")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="pretraining_helps")
    given = parser.parse_intermixed_args()
    words = ({"data": given.data} if given.data else {}) | config.parse_overrides(given.words)

    scores: dict[str, dict[str, list[float]]] = {}
    rates = [{"lr": rate} for rate in given.rates] if given.rates else [{}]
    for (start, more), rate in product(STARTS.items(), rates):
        name = " ".join([start, *(f"lr {lr:g}" for lr in rate.values())])
        results = finetune(
            given.model, given.tasks, words | more | rate, given.out / name.replace(" ", "-"), given.seeds, given.jobs
        )
        for task, result in results["tasks"].items():
            metric = result["metric"]
            by_seed = [result["scores"]["dev"][f"seed {seed}"][metric] for seed in range(given.seeds)]
            scores.setdefault(f"{task} ({metric})", {})[name] = by_seed

    report = {}
    for task, by_name in scores.items():
        medians = {name: statistics.median(values) for name, values in by_name.items()}
        best, rival = (max((n for n in by_name if n.startswith(start)), key=medians.__getitem__) for start in STARTS)
        margin = medians[best] - medians[rival]
        spread = max(max(by_name[name]) - min(by_name[name]) for name in (best, rival))
        verdict = "larger than the spread" if margin > spread else "NOT larger than the spread"
        print(f"{task}")
        for name, values in by_name.items():
            print(f"  {name:22} median {medians[name]:.4f}  ({', '.join(f'{v:.4f}' for v in values)})")
        print(f"  {best} against {rival}: margin {margin:+.4f}, spread {spread:.4f}: {verdict}")
        report[task] = {"scores": by_name, "margin": margin, "spread": spread}
    machine.write(given.name, {"seeds": given.seeds, "tasks": report})


if __name__ == "__main__":
    main()
