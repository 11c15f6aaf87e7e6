"""Speed-runs with several seeds of pre-training, as one result.

    electra speedrun data=SHARDS glue=GLUE seed=0 --out runs/speed-0
    electra speedrun data=SHARDS glue=GLUE seed=1 --out runs/speed-1
    python bench/speedrun.py runs/speed-0 runs/speed-1
    python bench/speedrun.py --add runs/speed-1
    python bench/speedrun.py --more-tasks 1 FOLDER
    python bench/speedrun.py --overlap SHARDS GLUE mnli qnli qqp

`glue5_median` is the mean over the seeds of pre-training; each has a median over the seeds of fine-tuning. `--add` puts seeds beside
those that are stored, and says which settings are not those of the stored ones. `--more-tasks` puts what `electra finetune runs/speed-1/run
mnli … --out FOLDER` scored beside the seed of pre-training, outside the mean. The last line looks for dev texts of more tasks in the
corpus of the stored runs, on any machine that has it.
"""

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path

import machine
from electra.base import config
from electra.base.files import write_json
from electra.data.overlap import find_overlap
from electra.finetuning.speedrun import SpeedrunSettings, plan_tasks, row_texts

SHOWN = ("glue5_median", "pretraining_seed", "tokens", "steps", "tokens_per_second", "mfu", "flops", "paper_flops")
SHOWN += ("heldout", "tasks", "wall_clock", "overlap", "alarms", "command")
UNSAID = ("seed", "run", "data")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--add", action="store_true", help="to the seeds that are stored")
    parser.add_argument("--more-tasks", nargs=2, metavar=("SEED", "FOLDER"))
    parser.add_argument("--overlap", nargs="+", metavar="SHARDS GLUE TASK")
    arguments = parser.parse_args()
    if arguments.overlap:
        shards, glue, *tasks = arguments.overlap
        add_overlap(SpeedrunSettings(Path(shards), Path(glue), tasks=tasks))
    elif arguments.more_tasks:
        add_tasks(int(arguments.more_tasks[0]), Path(arguments.more_tasks[1]))
    elif arguments.add:
        add_seeds(arguments.folders)
    else:
        put_together(arguments.folders)


def add_overlap(settings: SpeedrunSettings) -> None:
    """The rest of the result stays, with the machine that it was measured on."""
    plans = plan_tasks(settings)
    texts = {name: [row_texts(plan, row) for row in plan.splits["dev"]] for name, plan in plans.items()}
    overlaps = {name: asdict(it) for name, it in find_overlap(texts, settings.data).items()}
    for name, it in overlaps.items():
        print(f"{name}: {it}")
    with machine.alone():
        result = machine.read("speedrun")
        for run in result["runs"]:
            run["overlap"] |= overlaps
        write_json(machine.RESULTS / "speedrun.json", result)


def add_tasks(seed: int, folder: Path) -> None:
    """Scores of the dev split, one for each seed of fine-tuning."""
    tasks = {}
    for path in sorted(folder.glob("*/settings.json")):
        settings = json.loads(path.read_text("utf-8"))
        metric, files = settings["task"]["metric"], sorted(path.parent.glob("seed-*/result.json"))
        scores = [json.loads(file.read_text("utf-8"))["scores"]["dev"][metric] for file in files]
        method = settings["method"] | {"pooling": settings["task"]["pooling"]}
        tasks[path.parent.name] = {"metric": metric, "seeds": [100 * it for it in scores], "method": method}
    with machine.alone():
        result = machine.read("speedrun")
        run = next(it for it in result["runs"] if it["pretraining_seed"] == seed)
        for name, task in tasks.items():
            method = task.pop("method")
            differs = {key: value for key, value in result["method"].items() if method[key] != value}
            assert not differs, f"{name} by another method than the stored {differs}"
            print(f"{name}: {task}")
        run["more_tasks"] = run.get("more_tasks", {}) | tasks
        write_json(machine.RESULTS / "speedrun.json", result)


def add_seeds(folders: list[Path]) -> None:
    """The mean is over all seeds then; what stands beside it is of the first."""
    with machine.alone():
        result = machine.read("speedrun")
        stored = config.flatten(result["pretraining"])
        for run in (json.loads((folder / "speedrun.json").read_text("utf-8")) for folder in folders):
            fixed = {key: result[key] for key in ("minutes", "seeds")} | result["method"]
            differs = {key: value for key, value in fixed.items() if value != (run | run["method"]).get(key)}
            files = [{name: task["files"] for name, task in it["tasks"].items()} for it in (result["runs"][0], run)]
            assert files[0] == files[1], "other files of tasks: no seed of what is stored"
            assert not differs, f"no seed of what is stored, which has {differs}"
            seeds = [it["pretraining_seed"] for it in result["runs"]]
            assert run["pretraining_seed"] not in seeds, f"seed {run['pretraining_seed']} is stored already"
            own = config.flatten(run["pretraining"])
            other = {key: own[key] for key in own if key not in UNSAID and own[key] != stored.get(key)}
            print(f"seed {run['pretraining_seed']}: {run['glue5_median']:.2f}; other settings: {other}")
            added = {"other_settings": other, "gpu": run["environment"]["gpu"]}
            result["runs"].append({key: run[key] for key in SHOWN} | added)
        result["pretraining_seeds"] = [run["glue5_median"] for run in result["runs"]]
        result["glue5_median"] = statistics.fmean(result["pretraining_seeds"])
        write_json(machine.RESULTS / "speedrun.json", result)


def put_together(folders: list[Path]) -> None:
    runs = [json.loads((folder / "speedrun.json").read_text("utf-8")) for folder in folders]
    fixed = [{key: run[key] for key in ("minutes", "seeds", "method")} for run in runs]
    fixed = [
        it | {"files": {name: task["files"] for name, task in run["tasks"].items()}}
        for it, run in zip(fixed, runs, strict=True)
    ]
    settings = [run["pretraining"] | {"seed": None, "run": None, "data": None} for run in runs]
    assert fixed.count(fixed[0]) == settings.count(settings[0]) == len(runs), (
        "runs with other settings are no seeds of one"
    )
    scores = [run["glue5_median"] for run in runs]
    result = {
        "glue5_median": statistics.fmean(scores),
        "minutes": runs[0]["minutes"],
        "tokens": runs[0]["tokens"],
        "seeds": runs[0]["seeds"],
        "pretraining_seeds": scores,
        "gpu": runs[0]["environment"]["gpu"],
        "method": runs[0]["method"],
        "pretraining": runs[0]["pretraining"],
        "runs": [{key: run[key] for key in SHOWN} for run in runs],
    }
    print(
        f"mean of five: {result['glue5_median']:.2f} (seeds of pre-training: {', '.join(f'{it:.2f}' for it in scores)})"
    )
    machine.write("speedrun", result)


if __name__ == "__main__":
    main()
