"""speedrun.json for people: report.md and report.png, beside what the paper and its code report of ELECTRA-Small."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from electra.base.files import write_atomically
from electra.base.progress import Table, duration
from electra.train.log import Record

NAMES = {
    "cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "rte": "RTE", "mnli": "MNLI", "qnli": "QNLI",
    "qqp": "QQP", "wnli": "WNLI",
}  # fmt: skip
FULLY_TRAINED = {
    "cola": 56.8, "sst2": 88.3, "mrpc": 87.4, "stsb": 86.8, "rte": 68.5, "mnli": 78.9, "qnli": 87.9, "qqp": 88.3,
}  # fmt: skip
"""Dev scores of ELECTRA-Small on OpenWebText, a million steps, in the README of the original code. The five have a mean of 77.6."""
TOKENS, V100_HOURS = 128 * 128 * 1_000_000, 96
CURVE = {0.0625: (74.1, 8.9e16), 0.125: (76.0, 1.8e17), 0.25: (77.7, 3.6e17), 0.5: (79.0, 7.1e17), 1.0: (79.9, 1.4e18)}
"""The paper's table 1: mean of eight tasks, dev, and FLOPs of ELECTRA-Small after a share of its training."""


def write_report(out: Path, result: Mapping[str, Any], records: Sequence[Record]) -> None:
    plot(out / "report.png", result, records)
    write_atomically(out / "report.md", page(result).encode())


def page(result: Mapping[str, Any]) -> str:
    five, device = result["glue5_median"], result["environment"]["gpu"] or f"{result['environment']['cpu_count']} cores"
    headline = f"**{five:.1f}**" if five is not None else "not known, since tasks are missing"
    paragraphs = [
        f"# {result['minutes']:g} minutes on {device}",
        f"Mean of CoLA, SST-2, MRPC, STS-B and RTE, dev, median of {result['seeds']} fine-tuning seeds: {headline}.",
        "![scores beside the fully trained original; losses over time](report.png)",
        "## Scores",
        tasks_table(result).markdown(),
        "\\* not the official files: their sizes are below. `±` is the standard deviation over seeds. Weights are those of the last "
        "step of each run; nothing was selected on dev." + changed_method(result["method"]),
        "\n".join(f"- {line}" for line in file_lines(result)),
        "## Beside ELECTRA-Small",
        beside_table(result).markdown(),
        "`five` is the mean of CoLA, SST-2, MRPC, STS-B and RTE, `eight` that of all GLUE tasks but WNLI; the original's five are "
        "those of its released code. FLOPs are counted as the paper counts.",
        "## Pre-training",
        run_table(result).markdown(),
        *(f"Alarm: {text}" for text in result["alarms"]),
        "## Wall-clock",
        clock_table(result["wall_clock"]).markdown(),
        f"The budget of {result['minutes']:g} minutes is for `train` alone.",
        "## Dev texts in the corpus",
        overlap_table(result["overlap"]).markdown(),
        "Rows whose text (either of two) shares an n-gram of words with the training split: 13 words for texts of at least 13, 8 for "
        "texts of 8 to 12; shorter texts are not judged. `whole text`: every n-gram of a text is in the corpus.",
        *(
            f"- {NAMES.get(name, name)}: “{it['examples'][0]}”"
            for name, it in result["overlap"].items()
            if it["examples"]
        ),
    ]
    return "\n\n".join(paragraph.strip() for paragraph in paragraphs) + "\n"


def changed_method(method: Mapping[str, Any]) -> str:
    shown = {key: method[key] for key in ("optimizer", "schedule", "warmup", "batch", "bias_correction", "keep")}
    return " One method for all tasks: " + ", ".join(f"{key} {value}" for key, value in shown.items()) + "."


def tasks_table(result: Mapping[str, Any]) -> Table:
    rows = []
    for name, task in result["tasks"].items():
        wrong = any(entry["official"] is False for entry in task["files"] if entry["split"] in ("train", "dev"))
        spread = f"{task['least']:.1f} – {task['greatest']:.1f}" + (f" (± {task['sd']:.1f})" if "sd" in task else "")
        original = f"{FULLY_TRAINED[name]:.1f}" if name in FULLY_TRAINED else "–"
        title = NAMES.get(name, name) + "*" * wrong
        rows.append((title, task["metric"], f"{task['median']:.1f}", spread, original))
    if result["glue5_median"] is not None:
        rows.append(("mean of the five", "", f"{result['glue5_median']:.1f}", "", "77.6"))
    return Table(("task", "metric", "median", "spread", "ELECTRA-Small, 100 %"), rows)


def file_lines(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, task in result["tasks"].items():
        parts = [f"{it['split']} {it['rows']:,} rows" for it in task["files"] if it["split"] in ("train", "dev")]
        seeds = " ".join(f"{value:.1f}" for value in task["seeds"])
        lines.append(f"{NAMES.get(name, name)}: {', '.join(parts)}, epochs: {task['epochs']}, seeds: {seeds}")
    return lines


def beside_table(result: Mapping[str, Any]) -> Table:
    five = "–" if result["glue5_median"] is None else f"{result['glue5_median']:.1f}"
    flops = "–" if result["paper_flops"] is None else f"{result['paper_flops']:.2g}"
    rows = [("this run", f"{result['minutes']:g} min", f"{result['tokens'] / 1e6:,.0f} M", flops, five, "–")]
    for share, (mean, operations) in CURVE.items():
        hours, tokens = f"{share * V100_HOURS:g} h, V100", f"{share * TOKENS / 1e6:,.0f} M"
        full = "77.6" if share == 1 else "–"
        rows.append((f"ELECTRA-Small, {100 * share:g} %", hours, tokens, f"{operations:.2g}", full, f"{mean:.1f}"))
    return Table(("", "training", "tokens", "FLOPs", "five", "eight"), rows)


def run_table(result: Mapping[str, Any]) -> Table:
    heldout = result["heldout"]
    rows = [
        ("steps", f"{result['steps']:,}"),
        ("tokens", f"{result['tokens']:,}"),
        ("tokens per second", f"{result['tokens_per_second']:,.0f}"),
        ("MFU (of the nominal bfloat16 peak)", "–" if result["mfu"] is None else f"{result['mfu']:.1%}"),
        ("FLOPs, matrix products", f"{result['flops']:.3g}"),
        ("FLOPs as the paper counts", "–" if result["paper_flops"] is None else f"{result['paper_flops']:.3g}"),
        *((f"held-out {key}", f"{heldout[key]:.4f}") for key in ("mlm_loss", "rtd_loss", "auc") if key in heldout),
        ("seed", str(result["pretraining_seed"])),
    ]
    return Table(("", "pre-training"), rows)


def clock_table(seconds: Mapping[str, float]) -> Table:
    meanings = {
        "prepare": "tokenizer and shards",
        "start": "data, network, export",
        "compile": "compiling and capturing the step",
        "train": "pre-training",
        "evaluate": "held-out metrics",
        "save": "checkpoints",
        "overlap": "dev texts in the corpus",
        "finetune": "fine-tuning, all tasks and seeds",
        "total": "",
    }
    rows = [(name, meanings[name], f"{seconds[name]:,.1f} s", duration(seconds[name])) for name in meanings]
    return Table(("stage", "", "seconds", "time"), rows)


def overlap_table(overlap: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = []
    for name, it in overlap.items():
        shares = (f"{it[key]:,} ({it[key] / max(1, it['rows']):.1%})" for key in ("with_ngram", "whole_text"))
        rows.append((NAMES.get(name, name), f"{it['rows']:,}", f"{it['rows'] - it['checked']:,}", *shares))
    return Table(("task", "dev rows", "too short", "with an n-gram in the corpus", "whole text"), rows)


def plot(out: Path, result: Mapping[str, Any], records: Sequence[Record]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (scores, losses, detection) = plt.subplots(1, 3, figsize=(16, 4.6), width_ratios=(1.4, 1, 1))

    # scores beside those of the fully trained original
    tasks = result["tasks"]
    for place, (name, task) in enumerate(tasks.items()):
        scores.bar(place, task["median"], 0.6, color="tab:blue", alpha=0.6, label="median" if not place else None)
        dots = [place] * len(task["seeds"]), task["seeds"]
        scores.plot(*dots, "o", color="black", markersize=3, label="seeds" if not place else None)
        if name in FULLY_TRAINED:
            there = [place - 0.38, place + 0.38], [FULLY_TRAINED[name]] * 2
            label = "ELECTRA-Small, 4 days on a V100" if not place else None
            scores.plot(*there, color="tab:red", linewidth=2, label=label)
    scores.set_xticks(range(len(tasks)), [NAMES.get(name, name) for name in tasks])
    scores.set_ylim(0, 119)
    scores.set_ylabel("dev score")

    # losses against minutes of training
    curves = {kind: [it for it in records if it["kind"] == kind] for kind in ("train", "heldout")}
    minutes = {it["step"]: it["training_seconds"] / 60 for it in curves["train"]}
    panels = ((losses, "mlm_loss", "generator's loss (MLM)"), (detection, "auc", "discriminator's AUC"))
    for axis, key, label in panels:
        for kind, style in (("train", {"linewidth": 1, "alpha": 0.6}), ("heldout", {"marker": "o", "markersize": 3})):
            points = [(minutes[it["step"]], it[key]) for it in curves[kind] if it["step"] in minutes and it.get(key)]
            axis.plot(
                *zip(*points, strict=True), label=kind.replace("heldout", "held-out"), **style
            ) if points else None
        axis.set_xlabel("minutes of training")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    scores.legend(fontsize=8, loc="upper center", ncols=3)
    five = (
        "" if result["glue5_median"] is None else f", mean of five {result['glue5_median']:.1f} (fully trained: 77.6)"
    )
    figure.suptitle(f"{result['minutes']:g} minutes, {result['tokens'] / 1e6:,.0f} M tokens{five}", fontsize=11)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)
