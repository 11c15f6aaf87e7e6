"""What bench/claim.py has measured, run by run, and what follows from it: rows of tables, the best learning rate of each side, the
compute that ELECTRA saves. All of it is in one file, bench/results/claim.json, so that a machine without the runs goes on from there:

    runs       by key (settings, budget, data, fine-tuning, seed): what was measured
    families   by name: rows, each with its budget, tokens, rate and where the rate is from, median and all seeds
    screens    what rates each side was tried with, and which was best
    saving     of family compute: where ELECTRA and BERT cross, and the factor of compute that ELECTRA saves
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from electra.base.progress import Table
from electra.inspector.compare import STORED_RUN, ComparedRun, parse_budget, summary

FIVE = ("cola", "sst2", "mrpc", "stsb", "rte")
SCREEN = "-rates"
"""Ends the name of a family whose rows are a screen of rates."""
FEWEST_RATES = 3
NONE = "none within the measured range"
Record = dict[str, Any]
Row = dict[str, Any]


class Screen(NamedTuple):
    budget: str
    measure: str
    rates: dict[float, float | None]
    """Mean over the seeds; None where all diverged."""
    best: float
    edge: str
    """"lowest" or "highest" where no rate beyond it was tried."""

    def said(self) -> str:
        edge = f", the {self.edge} of {len(self.rates)}" if self.edge else f" of {len(self.rates)}"
        return f"screen at {self.budget} by {self.measure}{edge}"


def stored_run(record: Record) -> ComparedRun:
    return STORED_RUN.validate_python(record["run"])


def mean(record: Record, counted: Sequence[str] | None = None) -> float | None:
    """Of the medians of the tasks that count, where there are any. None where one diverged: the others alone are another mean."""
    tasks, counted = record["run"]["tasks"], record["mean_of"] if counted is None else counted
    medians = [statistics.median(tasks[task]) for task in counted if task in tasks]
    return statistics.fmean(medians) if medians and len(medians) == len(counted) else None


def is_lost(record: Record) -> bool:
    return record["run"]["diverged"] or bool(record["mean_of"] and mean(record) is None)


def finetuning(row: Row) -> str:
    """How its tasks were fine-tuned, beside which others do not stand."""
    return json.dumps(row.get("finetune"), sort_keys=True)


def score(record: Record) -> tuple[str, float] | None:
    """The measure that rates are chosen by, and its value: the higher the better. What a generator of its own makes of a detector's AUC
    says nothing, so a detector has tasks or the yardstick; a masked language model has its loss."""
    run = stored_run(record)
    if (value := mean(record)) is not None:
        return f"the mean of {', '.join(record['mean_of'])}", value
    if "yardstick" in record:
        return "the yardstick's AUC", record["yardstick"]["auc"]
    if record["objective"] == "masked_lm" and "mlm_loss" in run.figures:
        return "the held-out MLM loss", -run.figures["mlm_loss"]
    return None


def screen_of(runs: Mapping[str, Record], identity: str) -> Screen | None:
    """Of a side, by its settings without the rate: at the budget with most rates, then the largest, and at least three of them."""
    by_budget: dict[str, dict[float, list[Record]]] = {}
    for record in runs.values():
        if record["identity"] == identity:
            by_budget.setdefault(record["budget"], {}).setdefault(record["rate"], []).append(record)
    fitting = [budget for budget, rates in by_budget.items() if len(rates) >= FEWEST_RATES]
    for budget in sorted(fitting, key=lambda it: (len(by_budget[it]), parse_budget(it).amount), reverse=True):
        scored = {
            rate: [score(record) for record in records if not is_lost(record)]
            for rate, records in sorted(by_budget[budget].items())
        }
        names = {name for values in scored.values() for name in (it[0] if it else "" for it in values)}
        if len(names) != 1 or "" in names:
            continue
        means = {
            rate: statistics.fmean(it[1] for it in values if it) if values else None for rate, values in scored.items()
        }
        best = max(means, key=lambda rate: -math.inf if means[rate] is None else means[rate])
        edge = {min(means): "lowest", max(means): "highest"}.get(best, "")
        return Screen(budget, names.pop(), means, best, edge)
    return None


def screens(runs: Mapping[str, Record]) -> list[Row]:
    sides = {record["identity"]: record["side"] for record in runs.values()}
    found = ((side, screen_of(runs, identity)) for identity, side in sides.items())
    return [
        {"side": side} | screen._asdict() | {"rates": {f"{k:g}": v for k, v in screen.rates.items()}}
        for side, screen in found
        if screen
    ]


def row(arm: Mapping[str, Any], runs: Mapping[str, Record]) -> Row | None:
    """`arm` has side, budget, rate, rate_from and the key of its runs; those of all seeds that there are."""
    own = {key: record for key, record in runs.items() if record["arm"] == arm["key"]}
    if not own:
        return None
    records = sorted(own.values(), key=lambda record: record["run"]["seed"])
    made = summary([replace(stored_run(record), variant=arm["side"], series=arm["side"]) for record in records])[0]
    shown = {key: arm[key] for key in ("side", "base", "budget", "rate", "rate_from")}
    shown |= {"tokens": records[0]["tokens"], "weight_decay": records[0]["weight_decay"]}
    if arm["words"]:
        shown["words"] = list(arm["words"])
    for name in ("yardstick", "ranking"):
        if extra := [record[name] for record in records if name in record]:
            shown[name] = extra
    shown["finetune"] = records[0]["finetune"]
    counted = [task for task in records[0]["mean_of"] if all(task in record["mean_of"] for record in records)]
    means = [value for record in records if (value := mean(record, counted)) is not None]
    if means:
        shown |= {"mean_of": counted, "mean": spread(means)}
    return made | shown | {"runs": sorted(own, key=lambda key: own[key]["run"]["seed"])}


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values), "seeds": list(values)}


def joined(family: str, before: Sequence[Row], fresh: Sequence[Row], order: Sequence[str]) -> list[Row]:
    """A row takes the place of an earlier one of the same side, budget, fine-tuning and settings for all (in a screen: and rate). Each
    is named by what tells it apart."""
    keys = ("base", "side", "budget", *(["rate"] if family.endswith(SCREEN) else []))
    by_key = {(*(it[key] for key in keys), *it.get("words", ()), finetuning(it)): it for it in (*before, *fresh)}
    places = {side: place for place, side in enumerate(order)}
    rows = sorted(
        by_key.values(),
        key=lambda it: (places.get(it["side"], len(places)), parse_budget(it["budget"]).amount, it["rate"]),
    )
    is_ladder = family == "compute" or len({it["budget"] for it in rows}) > 1
    is_one_way = len({*map(finetuning, rows)}) == 1
    for it in rows:
        tuned = [] if is_one_way else [f"finetune.{key}={value}" for key, value in (it.get("finetune") or {}).items()]
        words = [it["side"], *([it["budget"]] if is_ladder else []), *([f"{it['rate']:g}"] if "rate" in keys else [])]
        it["variant"] = ", ".join([*words, *it.get("words", ()), *tuned])
    return rows


def runs_of(rows: Sequence[Row], runs: Mapping[str, Record]) -> list[ComparedRun]:
    """For tables and pictures."""
    return [
        replace(stored_run(runs[key]), variant=it["variant"], series=", ".join([it["side"], *it.get("words", ())]))
        for it in rows
        for key in it["runs"]
        if key in runs
    ]


def table(rows: Sequence[Row]) -> Table:
    """What `comparison_table` has not: where the rate is from, and how the networks rank what no label was shown of."""
    lines = []
    for it in rows:
        yardstick = [value["auc"] for value in it.get("yardstick", ())]
        ranked = {name: [value[name] for value in it.get("ranking", ()) if name in value] for name in RANKED}
        cells = [f"{statistics.median(values):.3f}" if values else "–" for values in (yardstick, *ranked.values())]
        lines.append((it["variant"], it["budget"], f"{it['tokens']:,}", f"{it['rate']:g}", it["rate_from"], *cells))
    return Table(("side", "budget", "tokens", "rate", "rate from", "yardstick AUC", *RANKED.values()), lines)


RANKED = {"auc_mean": "CoLA AUC", "pairs": "CoLA pairs"}
OURS, THEIRS = SIDES = ("ELECTRA", "BERT")
Points = list[tuple[float, float]]
"""FLOPs and score."""


def saving(rows: Sequence[Row]) -> Row | None:
    """Scores against the logarithm of FLOPs, straight lines between what was measured and nothing beyond. Rows with settings of their
    own are not looked at, nor those with another mean, or fine-tuned otherwise, than most."""
    rows = [it for it in rows if "words" not in it and "mean" in it]
    ways = [(finetuning(it), it.get("mean_of")) for it in rows]
    usual = max(ways, key=ways.count, default=None)
    rows = [it for it, way in zip(rows, ways, strict=True) if way == usual]
    curves: dict[str, Points] = {}
    for side in SIDES:
        points = [(least(it["flops"]), it["mean"]["median"]) for it in rows if it["side"] == side]
        curves[side] = sorted(points)
    if any(len(points) < 2 for points in curves.values()):
        return None
    factors = {f"{flops:.3g}": factor(flops, reached, curves[OURS]) for flops, reached in curves[THEIRS]}
    return {
        "measure": "mean of the tasks, median of the seeds",
        **{side: [list(point) for point in points] for side, points in curves.items()},
        "crossings": crossings(curves[OURS], curves[THEIRS]) or NONE,
        "factor": factors,
    }


def least(cost: float | list[float]) -> float:
    return min(cost) if isinstance(cost, list) else cost


def at(points: Points, flops: float) -> float:
    for (x, y), (next_x, next_y) in pairwise(points):
        if x <= flops <= next_x:
            return y + (next_y - y) * math.log(flops / x) / math.log(next_x / x)
    raise ValueError(f"{flops} is beyond what was measured")


def crossings(ours: Points, theirs: Points) -> list[dict[str, Any]]:
    """Where the lead changes hands. Where both are equal at a point and the lead stays, it does not."""
    low, high = max(ours[0][0], theirs[0][0]), min(ours[-1][0], theirs[-1][0])
    places = sorted({x for x, _ in (*ours, *theirs) if low <= x <= high} | {low, high}) if low < high else []
    ahead = [(x, at(ours, x) - at(theirs, x)) for x in places]
    apart = [(x, lead) for x, lead in ahead if lead]
    found = []
    for (x, lead), (next_x, next_lead) in pairwise(apart):
        if lead * next_lead < 0:
            share = lead / (lead - next_lead)
            found.append({"flops": x * (next_x / x) ** share, "then_ahead": OURS if next_lead > 0 else THEIRS})
    return found


def factor(flops: float, reached: float, ours: Points) -> float | str:
    """How many times less compute ours needs for the same score: above 1 it saves."""
    if ours[0][1] >= reached:
        return f"at least {flops / ours[0][0]:.3g}"
    for (x, y), (next_x, next_y) in pairwise(ours):
        if y < reached <= next_y:
            return flops / (x * (next_x / x) ** ((reached - y) / (next_y - y)))
    return NONE


def saving_text(saved: Row) -> str:
    crossed = saved["crossings"]
    if isinstance(crossed, list):
        crossed = "; ".join(f"{it['flops']:.3g} FLOPs, then {it['then_ahead']} is ahead" for it in crossed)
    lines = [f"ELECTRA and BERT cross: {crossed}."]
    for flops, times in saved["factor"].items():
        less = times if isinstance(times, str) else f"{times:.3g}"
        lines.append(f"What BERT reaches with {flops} FLOPs ELECTRA reaches with so many times less: {less}.")
    return "\n".join(lines)
