"""All tasks of a GLUE folder, one seed each, several at a time: how long an ELECTRA-Small takes on this machine.

    python bench/glue_small.py MODEL --data ../shared/data [--jobs 8] [--out FOLDER] [KEY=VALUE]...

MODEL is any model folder; where it does not exist, an untrained ELECTRA-Small with BERT's vocabulary is made there. The
files used are named in the results: what is in the folder need not be the official set.
"""

import argparse
import logging
import tempfile
import time
from pathlib import Path

import machine
from random_small import random_small


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--out", default="")
    arguments = parser.parse_intermixed_args()
    from electra.base import config
    from electra.finetuning.plan import file_line
    from electra.finetuning.run import finetune

    data = Path(arguments.data)
    model = random_small(Path(arguments.model), data / "vocab" / "bert-base-uncased-vocab.txt")
    tasks = [name for name in config.recipe_names("recipes/tasks") if (data / "glue" / name).is_dir()]
    out = Path(arguments.out or tempfile.mkdtemp(prefix="glue-"))
    overrides = {"data": str(data / "glue"), "evaluations": 1} | config.parse_overrides(arguments.words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.perf_counter()
    results = finetune(model, tasks, overrides, out, jobs=arguments.jobs)
    total = time.perf_counter() - started
    for name, result in results["tasks"].items():
        files = " · ".join(file_line(entry) for entry in result["files"])
        print(f"{name:6}{result['seconds'][0]:8.1f} s  {result['metric']} {result['median']:.4f}  ({files})")
    print(f"total{total:9.1f} s with {arguments.jobs} at a time")
    kept = {
        name: {"seconds": result["seconds"][0], result["metric"]: result["median"], "files": result["files"]}
        for name, result in results["tasks"].items()
    }
    machine.write("glue_small", {"seconds": total, "jobs": arguments.jobs, "tasks": kept, "glue": results["glue"]})


if __name__ == "__main__":
    main()
