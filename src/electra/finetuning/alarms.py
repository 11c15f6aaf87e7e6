"""Warnings in plain words about results that look ordinary and are not, as pre-training has them (objectives.metrics)."""

import statistics
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from electra.finetuning import LOWER_IS_BETTER, Prediction, Rows, Splits, Task, merit
from electra.finetuning.baselines import MAJORITY, UNTRAINED, WORDS

LOGGED_ENOUGH = 10
"""Losses below which nothing is said about their course."""
FALLS = 0.97
"""A loss that ends above this share of its start does not fall."""
CUT_SHARE = 0.01
TRY = "Train longer (epochs, min_steps), try other rates (lr), or give it more rows."


def label_alarms(task: Task, splits: Splits) -> list[str]:
    """Before anything is trained: names that are one label in two spellings, and labels of which train has no row."""
    alike: dict[str, list[str]] = {}
    for label in task.labels:
        alike.setdefault(" ".join(unicodedata.normalize("NFKC", label).casefold().split()), []).append(label)
    texts = [
        f"the labels {' and '.join(map(repr, names))} look like one: they are learned as {len(names)} classes. If they are "
        "the same, spell them alike in the table."
        for names in alike.values()
        if len(names) > 1
    ]
    shown = {name for row in splits["train"] for name in task.settings.row_classes(row)}
    if absent := [label for label in task.unlearnable(shown) if shown]:
        names = ", ".join(map(repr, absent[:8])) + " …" * (len(absent) > 8)
        texts.append(
            f"train has no row of {names}: it will never be answered. Add such rows, or leave it out of labels."
        )
    return texts


def run_alarms(
    task: Task, rows: Rows, predictions: Sequence[Prediction], scores: Mapping[str, float], losses: Sequence[float]
) -> list[str]:
    """After one seed: its answers on dev with their scores, and its losses in their order."""
    texts = []
    answer = task.one_answer(rows, predictions)
    metric, score = next(iter(scores.items()))
    if answer and score != (0 if metric in LOWER_IS_BETTER else 1):
        texts.append(f"the answer to every dev row is {answer}: nothing was learned that tells rows apart. {TRY}")
    if len(losses) >= LOGGED_ENOUGH:
        fifth = len(losses) // 5
        first, last = statistics.fmean(losses[:fifth]), statistics.fmean(losses[-fifth:])
        if last > FALLS * first:
            texts.append(f"the loss does not fall ({first:.3f} at first, {last:.3f} at last). {TRY}")
    return texts


def result_alarms(result: Mapping[str, Any]) -> list[str]:
    """After all seeds: whether something far simpler is better, and what was cut."""
    texts = []
    metric, median = result["metric"], result["median"]
    levels = {name: scores[metric] for name, scores in result["baselines"]["dev"].items()}
    ahead = {name: merit(metric, level) - merit(metric, median) for name, level in levels.items()}
    better = [f"{name} {levels[name]:.4f}" for name, by in ahead.items() if by > 0]
    if ahead.get(MAJORITY, 0) > 0:
        texts.append(f"worse than {' and '.join(better)}: as good as nothing was learned. {TRY}")
    elif ahead.get(UNTRAINED, 0) > (result["sd"] or 0):
        texts.append(
            f"worse than {' and '.join(better)}: pre-training does not help here. Pre-train longer, on text like that of "
            "the task, or try other settings (lr, pooling, layer_decay, reinitialise)."
        )
    elif ahead.get(WORDS, 0) > 0:
        texts.append(f"worse than {' and '.join(better)}: a count of words does better. {TRY} Or pre-train longer.")
    cut, of = result["cut"].get("dev", (0, 0))
    if cut > CUT_SHARE * of:
        texts.append(f"{cut:,} of {of:,} dev rows {result['cut_words']}. {result['cut_remedy']}")
    return texts
