"""Finished runs -> results.md for people, results.json for programs, curves and submissions; and what must not change under
a folder of runs."""

import hashlib
import json
import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from electra.base import config
from electra.base.errors import SettingsError
from electra.base.files import read_json, write_atomically, write_json
from electra.data.tables import TableWriter
from electra.finetuning import Outputs, Prediction, Task
from electra.finetuning.plan import FREE_METHOD_KEYS, MethodSettings, Plan, describe_files, file_line
from electra.finetuning.training import Dev
from electra.train.log import plot_scores

log = logging.getLogger(__name__)
RESULT = "result.json"
SETTINGS = "settings.json"
GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
"""The eight of the paper's mean: WNLI is left out."""


def run_folder(out: Path, name: str, seed: int) -> Path:
    return out / name / f"seed-{seed}"


def common_settings(plan: Plan, model: str, model_sha256: str) -> dict[str, Any]:
    """What all runs of a task must have in common."""
    return {
        "model": model,
        "model_sha256": model_sha256,
        "task": config.dump(plan.task),
        "method": config.dump(plan.method),
        "files": {split: {"file": path.name, "sha256": file_sha256(path)} for split, path in plan.files.items()},
        "rows": {split: len(rows) for split, rows in plan.splits.items()},
    }


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_other_runs(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / SETTINGS
    if not path.is_file() or not list(folder.glob("seed-*")):
        return
    stored = read_json(path)
    # older ones lack newer keys
    stored["method"] = config.dump(config.validate(MethodSettings, stored["method"]))
    before = config.flatten(stored)
    now = config.flatten(json.loads(json.dumps(settings)))
    free = {"model", *(f"method.{key}" for key in FREE_METHOD_KEYS)}
    changed = [
        f"{key.split('.', 1)[-1] if key.startswith(('task.', 'method.')) else key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in free
    ]
    if changed:
        raise SettingsError(
            f"{folder} holds runs with other settings ({'; '.join(changed)}). Use those, or another folder (out)."
        )


# The outputs of a run, for the ensemble


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
    outputs: list[Outputs] = []
    for name in (key.removesuffix(".values") for key in packed if key.endswith(".values")):
        shapes = packed[f"{name}.shapes"]
        ends = np.cumsum(shapes.prod(1))
        outputs = outputs or [{} for _ in shapes]
        for output, values, shape in zip(outputs, np.split(packed[f"{name}.values"], ends[:-1]), shapes, strict=True):
            output[name] = values.reshape(shape)
    return outputs


# Results


def task_result(out: Path, plan: Plan, task: Task, others: Mapping[str, Dev], model: str) -> dict[str, Any]:
    """Over all finished seeds of a task: scores, those of the ensemble, curves and submissions. `others` are the splits that
    were not trained on, dev the first."""
    seeds = sorted(int(path.parent.name[5:]) for path in (out / plan.name).glob(f"seed-*/{RESULT}"))
    folders = {seed: run_folder(out, plan.name, seed) for seed in seeds}
    runs = {seed: read_json(folder / RESULT) for seed, folder in folders.items()}
    first = runs[seeds[0]]
    scores: dict[str, dict[str, Any]] = {
        split: {f"seed {seed}": run["scores"][split] for seed, run in runs.items()} for split in first["scores"]
    }
    tables: dict[str, Any] = {}
    for split, part in others.items():
        outputs = [unpack(load_file(folder / f"outputs-{split}.safetensors")) for folder in folders.values()]
        predictions = task.ensemble(part.rows, part.examples, outputs)
        if split in scores:
            scores[split]["ensemble"] = task.scores(part.rows, predictions)
        if split == "dev":
            tables = task.tables(part.rows, predictions)
            task = task.fitted(scores["dev"]["ensemble"])
        if split in plan.source.submission:
            submission = task.submission(part.rows, predictions)
            write_submission(out / "submission" / plan.source.submission[split], submission)
    headline = next(iter(first["scores"]["dev"]))
    curves = {seed: run["curve"] for seed, run in runs.items()}
    plot_scores(curves, headline, f"{plan.name}: dev {headline}", out / plan.name / "curves.png")
    return {
        "model": model,
        **over_seeds({seed: run["scores"]["dev"] for seed, run in runs.items()}),
        "ensemble": scores["dev"]["ensemble"],
        "scores": scores,
        "seconds": {seed: run["seconds"] for seed, run in runs.items()},
        "files": describe_files(plan),
        "notes": plan.notes,
        "cut": first["cut"],
        "cut_words": plan.task.cut_words(task.length),
        **tables,
    }


def over_seeds(seeds: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Of the headline. `best` was chosen on the dev set that it is a score of."""
    headline = next(iter(next(iter(seeds.values()))))
    values = [scores[headline] for scores in seeds.values()]
    return {
        "metric": headline,
        "runs": len(values),
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "best": max(values),
        "best_seed": max(seeds, key=lambda seed: seeds[seed][headline]),
    }


def write_submission(path: Path, content: Sequence[Prediction] | Mapping[str, Any]) -> None:
    if isinstance(content, Mapping):
        path.parent.mkdir(exist_ok=True)
        write_json(path, content)
        return
    with TableWriter(path) as writer:
        writer.write(content, answers={"prediction"})


def write_results(out: Path, model: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Every finished run of the folder: those of this command's tasks first, then what earlier commands said of theirs."""
    results = dict(results)
    path = out / "results.json"
    earlier: dict[str, Any] = read_json(path) if path.is_file() else {"tasks": {}}
    for name in sorted({path.parents[1].name for path in out.glob(f"*/seed-*/{RESULT}")} - results.keys()):
        if name in earlier["tasks"]:
            results[name] = {"model": earlier["model"], **earlier["tasks"][name]}
        else:
            log.info("%s: its finished runs are not in the results yet. Repeat its command to the end.", name)
    whole = {"model": model, "tasks": results, "glue": glue_mean(results)}
    write_atomically(out / "results.md", results_page(whole).encode())
    write_json(path, whole)
    return whole


def glue_mean(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The mean of the medians over the eight tasks, when all are there, and which sets were not the official ones."""
    if not set(GLUE) <= results.keys():
        return None
    wrong = [
        f"{name} {entry['split']} ({entry['file']})"
        for name in GLUE
        for entry in results[name]["files"]
        if entry["official"] is False
    ]
    return {"mean": statistics.fmean(results[name]["median"] for name in GLUE), "not_official": wrong}


# results.md


def results_page(whole: Mapping[str, Any]) -> str:
    model, results, glue = whole["model"], whole["tasks"], whole["glue"]
    lines = [f"# Fine-tuning {model}", "", *summary_table(results)]
    if glue:
        lines += ["", f"GLUE mean of the eight medians (without WNLI): **{100 * glue['mean']:.2f}**"]
        if glue["not_official"]:
            lines += ["", f"Not comparable with published means: {'; '.join(glue['not_official'])}."]
    for name, result in results.items():
        lines += ["", f"## {name}", ""]
        lines += [f"- started from {result['model']}"] if result["model"] != model else []
        lines += [f"- {line}" for line in (*map(file_line, result["files"]), *result["notes"])]
        lines += [
            f"- {split}: {count:,} of {rows:,} rows {result['cut_words']}"
            for split, (count, rows) in result["cut"].items()
            if count
        ]
        for split, by_seed in result["scores"].items():  # every metric of every seed and of the ensemble
            metrics = list(next(iter(by_seed.values())))
            rows = ([seed, *(shown(scores[name]) for name in metrics)] for seed, scores in by_seed.items())
            lines += ["", *markdown_table([split, *metrics], rows)]
        if result.get("confusion"):
            lines += ["", "Rows are the true classes, columns the answers of the ensemble:", ""]
            counts = ([f"{count:,}" for count in row] for row in result["confusion"])
            pairs = zip(result["labels"], counts, strict=True)
            rows = ([f"**{escaped(label)}**", *cells] for label, cells in pairs)
            lines += markdown_table(["", *map(escaped, result["labels"])], rows)
        if result.get("per_class"):
            keys = ("precision", "recall", "f1")
            rows = (
                [escaped(entry["label"]), *(shown(entry[key]) for key in keys), f"{entry['rows']:,}"]
                for entry in result["per_class"]
            )
            lines += ["", *markdown_table(["class", "precision", "recall", "F1", "rows"], rows)]
        lines += ["", f"![dev score against steps]({name}/curves.png)"]
    return "\n".join(lines) + "\n"


def summary_table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    header = ["task", "metric", "median", "mean", "sd", "best (chosen on dev)", "ensemble", "runs", "dev"]
    rows, starred = [], False
    for name, result in results.items():
        dev = next(entry for entry in result["files"] if entry["split"] == "dev")
        is_other = any(entry["official"] is False for entry in result["files"])
        starred = starred or is_other
        rows.append(
            [
                f"{name}{'*' * is_other}",
                result["metric"],
                *(shown(result[key]) for key in ("median", "mean", "sd")),
                f"{shown(result['best'])} (seed {result['best_seed']})",
                shown(result["ensemble"][result["metric"]]),
                str(result["runs"]),
                f"{dev['file']} ({dev['rows']:,} rows)",
            ]
        )
    note = ["", "\\* not the official files: see below which and how many rows."] if starred else []
    return markdown_table(header, rows) + note


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return [lines[0], "|---" * len(header) + "|", *lines[1:]]


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
