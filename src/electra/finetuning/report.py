"""Finished runs -> a table of results for people (Markdown, terminal) and for programs (JSON)."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from electra.finetuning.plan import file_line

GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
"""The eight of the paper's mean: WNLI is left out."""


def summary(seeds: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Over seeds, of the headline. `best` was chosen on the dev set that it is a score of."""
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


def markdown(model: str, results: Mapping[str, Mapping[str, Any]], glue: Mapping[str, Any] | None) -> str:
    lines = [f"# Fine-tuning {model}", "", *summary_rows(results)]
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
        lines += ["", *score_rows(result)]
        if result.get("confusion"):
            lines += ["", "Rows are the true classes, columns the answers of the ensemble:", ""]
            lines += confusion_rows(result["labels"], result["confusion"])
        if result.get("per_class"):
            lines += ["", *per_class_rows(result["per_class"])]
        lines += ["", f"![dev score against steps]({name}/curves.png)"]
    return "\n".join(lines) + "\n"


def summary_rows(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [
        "| task | metric | median | mean | sd | best (chosen on dev) | ensemble | runs | dev |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        dev = next(entry for entry in result["files"] if entry["split"] == "dev")
        star = "*" if any(entry["official"] is False for entry in result["files"]) else ""
        cells = (
            f"{name}{star}",
            result["metric"],
            *(shown(result[key]) for key in ("median", "mean", "sd")),
            f"{shown(result['best'])} (seed {result['best_seed']})",
            shown(result["ensemble"][result["metric"]]),
            str(result["runs"]),
            f"{dev['file']} ({dev['rows']:,} rows)",
        )
        rows.append("| " + " | ".join(cells) + " |")
    if any("*" in row.split("|")[1] for row in rows[2:]):
        rows += ["", "\\* not the official files: see below which and how many rows."]
    return rows


def score_rows(result: Mapping[str, Any]) -> list[str]:
    """Every metric of every seed and of the ensemble, for each set that has labels."""
    rows = []
    for split, by_seed in result["scores"].items():
        columns = list(next(iter(by_seed.values())))
        rows += [f"| {split} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for seed, scores in by_seed.items():
            rows.append(f"| {seed} | " + " | ".join(shown(scores[name]) for name in columns) + " |")
        rows.append("")
    return rows[:-1]


def confusion_rows(labels: Sequence[str], matrix: Sequence[Sequence[int]]) -> list[str]:
    head = ["| | " + " | ".join(map(cell, labels)) + " |", "|---" * (len(labels) + 1) + "|"]
    return head + [
        f"| **{cell(label)}** | " + " | ".join(f"{count:,}" for count in row) + " |"
        for label, row in zip(labels, matrix, strict=True)
    ]


def per_class_rows(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["| class | precision | recall | F1 | rows |", "|---|---|---|---|---|"]
    return head + [
        f"| {cell(entry['label'])} | {entry['precision']:.4f} | {entry['recall']:.4f} | {entry['f1']:.4f} | "
        f"{entry['rows']:,} |"
        for entry in entries
    ]


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
