"""What a comparison came to, as a table and a plot: median and spread over the seeds, nothing left out."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from electra.base.files import write_atomically
from electra.inspector.compare import Result

MEASURES = (("auc", "RTD AUC"), ("mlm_loss", "MLM loss"), ("probe", "probe accuracy"))


def value_of(result: Result, measure: str) -> float | None:
    value = result.probe if measure == "probe" else result.figures.get(measure)
    return None if value is None or value != value else value


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row a variant, in the order given: the median, least and greatest of every measure over its seeds."""
    rows = []
    for name in dict.fromkeys(result.variant for result in results):
        mine = [result for result in results if result.variant == name]
        row: dict[str, Any] = {
            "variant": name,
            "seeds": len(mine),
            "diverged": sum(result.diverged for result in mine),
            "steps": mine[0].steps,
            "flops": mine[0].flops,
        }
        for measure, _ in MEASURES:
            values = [value for result in mine if (value := value_of(result, measure)) is not None]
            if values:
                row[measure] = {
                    "median": statistics.median(values),
                    "least": min(values),
                    "greatest": max(values),
                }
        rows.append(row)
    return rows


def seeds_cell(row: dict[str, Any]) -> str:
    return f"{row['seeds']}" + (f" ({row['diverged']} diverged)" if row["diverged"] else "")


def cell(figures: dict[str, float] | None) -> str:
    return f"{figures['median']:.3f} ({figures['least']:.3f}–{figures['greatest']:.3f})" if figures else "–"


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    shown = [(key, name) for key, name in MEASURES if any(key in row for row in rows)]
    lines = [
        f"| recipe | seeds | steps | FLOPs | {' | '.join(name for _, name in shown)} |",
        "|---|---|---|---|" + "---|" * len(shown),
    ]
    for row in rows:
        cells = " | ".join(cell(row.get(key)) for key, _ in shown)
        lines.append(
            f"| {row['variant']} | {seeds_cell(row)} | {row['steps']:,} | {row['flops']:.2e} | {cells} |"
        )
    return "\n".join(lines) + "\n"


def write_report(out: Path, results: Sequence[Result]) -> list[dict[str, Any]]:
    rows = summary(results)
    write_atomically(out / "comparison.md", markdown(rows).encode())
    write_atomically(out / "results.json", json.dumps(rows, indent=1).encode())
    plot(out / "comparison.png", results)
    return rows


def plot(out: Path, results: Sequence[Result]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(result.variant for result in results))
    shown = [pair for pair in MEASURES if any(value_of(result, pair[0]) is not None for result in results)]
    size = (1.5 + 3.6 * len(shown), 1.2 + 0.42 * len(names))
    figure, axes = plt.subplots(1, len(shown), figsize=size, sharey=True, squeeze=False)
    for axis, (measure, label) in zip(axes[0], shown, strict=True):
        for place, name in enumerate(names):
            values = [v for r in results if r.variant == name and (v := value_of(r, measure)) is not None]
            axis.plot(values, [place] * len(values), "o", color="tab:blue", alpha=0.55)
            if values:
                axis.plot(
                    [statistics.median(values)], [place], "|", color="black", markersize=16, markeredgewidth=2
                )
        axis.set_yticks(range(len(names)), names)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0][0].invert_yaxis()
    figure.suptitle("dots: seeds, bar: median", fontsize=9)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)
