"""Finished runs -> results.md, results.json, curves, submissions; and what must not change under a folder of runs."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from electra.base import config
from electra.base.errors import DataError, SettingsError
from electra.base.files import write_atomically, write_json
from electra.data.tables import TableWriter
from electra.finetuning import Outputs, Problem, Splits, Task, report
from electra.finetuning.method import FREE_TO_CHANGE, MethodSettings
from electra.finetuning.plan import Plan, describe_files
from electra.finetuning.start import Start, build, encode_others, usable_length
from electra.train.log import plot_scores

RESULT = "result.json"
SETTINGS = "settings.json"
PROBLEMS_SHOWN = 20


def run_folder(out: Path, name: str, seed: int) -> Path:
    return out / name / f"seed-{seed}"


def refuse_problems(plans: Mapping[str, tuple[str, Plan, Splits]], start: Start) -> None:
    """All that is wrong with all tables, before anything is written."""
    found = []
    for name, (_, plan, splits) in plans.items():
        prefix = f"{name}: " if len(plans) > 1 else ""
        lines = all_problems(build(plan, splits, start), splits, plan.malformed, plan.numbers)
        found += [f"{prefix}{line}" for line in lines]
    if found:
        refuse(found)


def all_problems(
    task: Task,
    splits: Splits,
    malformed: Mapping[str, Mapping[int, str]],
    numbers: Mapping[str, Sequence[int]],
) -> list[Problem]:
    """Rows that could not be read, then what is wrong with the others, each by the number it has in its file."""
    unread = {
        (split, number): Problem(split, number, "", text)
        for split, wrong in malformed.items()
        for number, text in wrong.items()
    }
    others = (problem.renumbered(numbers) for problem in task.problems(splits))
    return [*unread.values(), *(it for it in others if (it.split, it.row) not in unread)]


def refuse(problems: Sequence[object]) -> None:
    more = len(problems) - PROBLEMS_SHOWN
    lines = [*map(str, problems[:PROBLEMS_SHOWN]), *([f"… and {more:,} more"] if more > 0 else [])]
    count = f"{len(problems):,} problem{'s' * (len(problems) > 1)}"
    raise DataError(f"the data cannot be used as it is ({count}):\n  " + "\n  ".join(lines))


def common_settings(plan: Plan, splits: Splits, start: Start) -> dict[str, Any]:
    """What all runs of a task must have in common."""
    return {
        "model": start.path,
        "model_sha256": start.sha256,
        "task": config.dump(plan.task),
        "method": config.dump(plan.method),
        "files": {
            split: {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for split, path in plan.files.items()
        },
        "rows": {split: len(rows) for split, rows in splits.items()},
    }


def refuse_other_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / SETTINGS
    if not path.is_file() or not list(folder.glob("seed-*")):
        return
    stored = json.loads(path.read_bytes())
    stored["method"] = config.dump(
        config.validate(MethodSettings, stored["method"])
    )  # older ones lack newer keys
    before, now = config.flatten(stored), config.flatten(json.loads(json.dumps(settings)))
    free = {"model", *(f"method.{key}" for key in FREE_TO_CHANGE)}
    changed = [
        f"{key.split('.', 1)[-1] if key.startswith(('task.', 'method.')) else key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in free
    ]
    if changed:
        raise SettingsError(
            f"{folder} holds runs with other settings ({'; '.join(changed)}). Use those, or another folder (out)."
        )


def pack(outputs: Sequence[Outputs]) -> dict[str, np.ndarray]:
    """Arrays of any shape, one after the other, with their shapes."""
    packed = {}
    for name in outputs[0] if outputs else ():
        arrays = [np.asarray(output[name], np.float32) for output in outputs]
        packed[f"{name}.values"] = np.concatenate([array.ravel() for array in arrays])
        shapes = [array.shape for array in arrays]
        packed[f"{name}.shapes"] = np.array(shapes, np.int64).reshape(len(arrays), arrays[0].ndim)
    return packed


def unpack(packed: Mapping[str, np.ndarray]) -> list[Outputs]:
    found: list[Outputs] = []
    for key in packed:
        if not key.endswith(".values"):
            continue
        name, values, place = key.removesuffix(".values"), packed[key], 0
        shapes = packed[f"{name}.shapes"]
        found = found or [{} for _ in shapes]
        for index, shape in enumerate(shapes):
            size = int(np.prod(shape))
            found[index][name] = values[place : place + size].reshape(shape)
            place += size
    return found


def write_results(
    out: Path, plans: Mapping[str, tuple[str, Plan, Splits]], start: Start, say: Callable[[str], None]
) -> dict[str, Any]:
    """Every finished run of the folder: those of this command's tasks first, then what earlier commands said of theirs."""
    results = {name: task_result(out, plan, splits, start) for name, (_, plan, splits) in plans.items()}
    earlier = earlier_results(out)
    for name in sorted({path.parents[1].name for path in out.glob(f"*/seed-*/{RESULT}")} - results.keys()):
        if name in earlier:
            results[name] = earlier[name]
        else:
            say(f"{name}: its finished runs are not in the results yet. Repeat its command to the end.")
    glue = report.glue_mean(results)
    whole = {"model": start.path, "tasks": results, "glue": glue}
    write_atomically(out / "results.md", report.markdown(start.path, results, glue).encode())
    write_json(out / "results.json", whole)
    return whole


def earlier_results(out: Path) -> dict[str, dict[str, Any]]:
    path = out / "results.json"
    whole: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {"tasks": {}}
    return {name: {"model": whole["model"], **result} for name, result in whole["tasks"].items()}


def task_result(out: Path, plan: Plan, splits: Splits, start: Start) -> dict[str, Any]:
    seeds = sorted(int(path.parent.name[5:]) for path in (out / plan.name).glob(f"seed-*/{RESULT}"))
    runs = {seed: run_folder(out, plan.name, seed) for seed in seeds}
    found = {seed: json.loads((folder / RESULT).read_bytes()) for seed, folder in runs.items()}
    first = found[seeds[0]]
    task = build(plan, splits, start)
    scores: dict[str, dict[str, Any]] = {
        split: {f"seed {seed}": result["scores"][split] for seed, result in found.items()}
        for split in first["scores"]
    }
    tables: dict[str, Any] = {}
    ensembles: dict[str, Any] = {}
    for split, part in encode_others(task, splits)[0].items():  # dev is the first
        outputs = [unpack(load_file(folder / f"outputs-{split}.safetensors")) for folder in runs.values()]
        predictions = task.ensemble(part.rows, part.examples, outputs)
        if split in scores:
            ensembles[split] = task.scores(part.rows, predictions)
            scores[split]["ensemble"] = ensembles[split]
        if split == "dev":
            tables = task.tables(part.rows, predictions)
            task = task.fitted(ensembles["dev"])
        if split in plan.source.submission:
            submission = task.submission(part.rows, predictions)
            write_submission(out / "submission" / plan.source.submission[split], submission)
    headline = next(iter(first["scores"]["dev"]))
    curves = {seed: result["curve"] for seed, result in found.items()}
    plot_scores(curves, headline, f"{plan.name}: dev {headline}", out / plan.name / "curves.png")
    return {
        "model": start.path,
        **report.summary({seed: result["scores"]["dev"] for seed, result in found.items()}),
        "ensemble": ensembles["dev"],
        "scores": scores,
        "seconds": {seed: result["seconds"] for seed, result in found.items()},
        "files": describe_files(plan, splits),
        "notes": plan.notes,
        "cut": first["cut"],
        "cut_words": plan.task.cut_words(usable_length(plan, start)),
        **tables,
    }


def write_submission(path: Path, content: Sequence[dict[str, Any]] | Mapping[str, Any]) -> None:
    if isinstance(content, Mapping):
        path.parent.mkdir(exist_ok=True)
        write_json(path, content)
        return
    with TableWriter(path) as writer:
        writer.write(content, answers={"prediction"})
