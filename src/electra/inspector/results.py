"""Results of `finetune`, `compare` and `speedrun` in one form: groups of scores, each with a value for every seed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from electra.base.errors import CorruptError
from electra.base.files import is_plain_name, read_json, read_json_lines, read_object
from electra.finetuning import LOWER_IS_BETTER
from electra.finetuning.report import MOST_WRONG, WRONG, baselines_of, is_result
from electra.inspector.compare import MEASURES
from electra.inspector.gallery import Gallery

LOSSES = ("mlm_loss", "rtd_loss", "loss")


def results_view(gallery: Gallery) -> dict[str, Any]:
    """Every finished fine-tuning, comparison and speed-run with its number."""
    gallery.look()
    return {"results": [{"number": number, "name": it.name} for number, it in enumerate(gallery.results)]}


def result_view(folder: Path) -> dict[str, Any]:
    """{"kind", "groups": [{"name", "metric", "rows": [{"name", "seeds", "median"}], "levels", …}]}. A group is a task, or a measure
    of a comparison; its levels are the baselines to compare scores with."""
    if (folder / "speedrun.json").is_file():
        return speedrun_view(read_object(folder / "speedrun.json"))
    content = read_json(folder / "results.json")
    if isinstance(content, list):
        return comparison_view(content)
    if isinstance(content, dict) and isinstance(content.get("tasks"), dict):
        return finetuning_view(folder, content)
    raise CorruptError(f"{folder / 'results.json'} was not written by finetune, compare or speedrun.")


def finetuning_view(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    groups = []
    for name, result in content["tasks"].items():
        if not is_plain_name(name) or not is_result(result):
            continue
        metric, dev = result["metric"], result["scores"].get("dev", {})
        seeds = [scores.get(metric) for seed, scores in dev.items() if seed != "ensemble"]
        row = {"name": "fine-tuned", "seeds": seeds, "median": result["median"]}
        levels = {key: scores.get(metric) for key, scores in baselines_of(result).items()}
        levels |= {"ensemble": result["ensemble"].get(metric)} if len(seeds) > 1 else {}
        groups.append(
            {
                "name": name,
                "metric": metric,
                "is_loss": metric in LOWER_IS_BETTER,
                "rows": [row],
                "levels": levels,
                "scores": dev,
                "labels": result.get("labels", []),
                "confusion": result.get("confusion", []),
                "per_class": result.get("per_class", []),
                "alarms": result.get("alarms", []),
                "notes": result.get("notes", []),
                "has_wrong": (folder / name / WRONG).is_file(),
            }
        )
    return {"kind": "finetune", "title": str(content.get("model", "")), "groups": groups}


def comparison_view(variants: Sequence[Any]) -> dict[str, Any]:
    named = [it for it in variants if isinstance(it, dict) and isinstance(it.get("variant"), str)]
    measures = dict.fromkeys(key for it in named for key, value in it.items() if has_seeds(value))
    groups = []
    for measure in measures:
        rows = [
            {"name": it["variant"], "seeds": it[measure]["seeds"], "median": it[measure].get("median")}
            for it in named
            if has_seeds(it.get(measure))
        ]
        name = MEASURES.get(measure, measure)
        groups.append({"name": name, "metric": name, "is_loss": measure in LOSSES, "rows": rows, "levels": {}})
    facts = [{key: it.get(key) for key in ("variant", "seeds", "steps", "flops", "diverged")} for it in named]
    return {"kind": "compare", "title": "", "groups": groups, "variants": facts}


def has_seeds(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("seeds"), list)


def speedrun_view(content: Mapping[str, Any]) -> dict[str, Any]:
    tasks = content.get("tasks", {})
    groups = [
        {
            "name": name,
            "metric": result.get("metric", ""),
            "is_loss": False,
            "rows": [{"name": "fine-tuned", "seeds": result.get("seeds", []), "median": result.get("median")}],
            "levels": {},
        }
        for name, result in (tasks.items() if isinstance(tasks, dict) else ())
        if isinstance(result, dict)
    ]
    alarms = content.get("alarms")
    return {
        "kind": "speedrun",
        "title": f"{content.get('minutes', '')} minutes",
        "groups": groups,
        "mean": content.get("glue5_median"),
        "alarms": alarms if isinstance(alarms, list) else [],
    }


def wrong_rows(folder: Path, number: int) -> list[dict[str, Any]]:
    """The dev rows that the ensemble of the task with this number got wrong, the surest first."""
    groups = result_view(folder)["groups"]
    if number >= len(groups) or not groups[number].get("has_wrong"):
        raise LookupError("there is no list of wrong rows for that task.")
    return read_json_lines(folder / groups[number]["name"] / WRONG)[0][:MOST_WRONG]
