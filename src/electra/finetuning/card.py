"""The card of a fine-tuned folder: first of one seed, and of all seeds with their baselines once there are results."""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from electra.base import config
from electra.base.progress import Table, literal
from electra.finetuning import Task
from electra.finetuning.folder import architecture
from electra.finetuning.plan import Plan, describe_files, file_line
from electra.interop.card import LIMITS, PIPELINES, Card, facts, update_card, usage
from electra.model import EncoderSettings


def task_card(
    plan: Plan,
    task: Task,
    start: str,
    encoder: EncoderSettings,
    seed: int,
    scores: Mapping[str, Mapping[str, float]],
    result: Mapping[str, Any] | None = None,
) -> str:
    """`scores` by split are this seed's, `result` is what results.json says of the task."""
    name, kind = architecture(encoder, task), str(config.dump(plan.task)["kind"])
    use = usage(name) if name else usage("") + "\n\ntransformers has no class for this head; it reads the encoder."
    use += '\n\nWith the toolkit: `electra predict FOLDER "some text"`, or a table of many. `task.json` says what it expects.'
    labels = task.config_entries().get("id2label") or {}
    pipeline = PIPELINES.get(kind, "text-classification")
    sections = {
        "Data": facts(
            [
                *((split["split"], literal(file_line(split).partition(": ")[2])) for split in describe_files(plan)),
                ("labels", literal(", ".join(map(str, labels.values())))),
            ]
        ),
        "Scores": score_table(seed, scores, result),
        "Limits": "\n".join(
            [
                LIMITS,
                "- Scores on dev are of rows that were not trained on"
                + (
                    "; its weights were chosen by them, so expect less elsewhere."
                    if plan.method.keep == "best"
                    else "."
                ),
                f"- Text beyond {task.length} tokens is cut.",
            ]
        ),
    }
    results = [
        {
            "task": {"type": pipeline},
            "dataset": {"type": plan.name, "name": plan.name, "split": split},
            "metrics": [
                {"type": metric, "value": round(value, 6), "name": f"{metric}, seed {seed}"}
                for metric, value in metrics.items()
                if math.isfinite(value)
            ],
        }
        for split, metrics in scores.items()
    ]
    title, settings = f"Fine-tuned on {plan.name}", config.to_toml(plan.method)
    about = f"One seed ({seed}) of {literal(kind)}, made with the `electra` toolkit from {literal(start)}."
    return Card(
        title, about, use, ("electra", encoder.kind, kind), pipeline, sections, settings, results=results
    ).text()


def score_table(seed: int, scores: Mapping[str, Mapping[str, float]], result: Mapping[str, Any] | None) -> str:
    """A row for each split and metric: this seed, the mean over all seeds with its spread, and the baselines."""
    baselines = list((result or {}).get("baselines", {}).get("dev", {}))
    seeds: Mapping[str, Mapping[str, Mapping[str, float]]] = (result or {}).get("scores", {})
    columns, rows = ["split", "metric", f"seed {seed}"], []
    count = max((sum(name.startswith("seed ") for name in runs) for runs in seeds.values()), default=0)
    if count > 1:
        columns.append(f"mean of {count} seeds (± sd)")
    for split, metrics in scores.items():
        for metric, value in metrics.items():
            row = [literal(split), literal(metric), f"{value:.4f}"]
            if count > 1:
                values = [run[metric] for name, run in seeds.get(split, {}).items() if name.startswith("seed ")]
                row.append(
                    f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
                )
            for name in baselines:
                baseline = (result or {})["baselines"].get(split, {}).get(name, {}).get(metric)
                row.append("" if baseline is None else f"{baseline:.4f}")
            rows.append(row)
    return Table([*columns, *(f"baseline: {name}" for name in baselines)], rows).markdown()


def update_cards(
    folders: Mapping[int, Path], plan: Plan, task: Task, start: str, encoder: EncoderSettings, result: Mapping[str, Any]
) -> None:
    """Of all finished seeds, with what is known at the end."""
    for seed, folder in folders.items():
        own = {split: runs[f"seed {seed}"] for split, runs in result["scores"].items() if f"seed {seed}" in runs}
        if own:
            update_card(folder, task_card(plan, task, start, encoder, seed, own, result))
