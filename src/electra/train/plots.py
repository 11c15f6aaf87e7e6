"""The curves of runs as PNGs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from electra.train.log import read_metrics

PANELS = (
    ("loss", (("mlm_loss", "generator (MLM)"),)),
    ("loss", (("rtd_loss", "discriminator (RTD)"),)),
    (
        "ROC-AUC and shares",
        (("auc", "AUC"), ("recall", "recall"), ("mlm_accuracy", "generator accuracy")),
    ),
)


def plot_run(folder: Path, out: Path) -> Path | None:
    """None where there is nothing to draw yet."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = read_metrics(folder)
    train = [record for record in records if record["kind"] == "train"]
    heldout = [record for record in records if record["kind"] == "heldout"]
    if not train:
        return None
    figure, axes = plt.subplots(1, len(PANELS), figsize=(15, 4.2))
    for axis, (label, curves) in zip(axes, PANELS, strict=True):
        for key, name in curves:
            points = axis.plot(*series(train, key), alpha=0.55, linewidth=1, label=f"{name}, training")
            axis.plot(
                *series(heldout, key),
                color=points[0].get_color(),
                marker="o",
                markersize=3,
                label=f"{name}, held-out",
            )
        axis.set_xlabel("step")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    last = train[-1]
    figure.suptitle(
        f"{folder.name}: {last['step']:,} steps, {last['seconds'] / 60:.1f} minutes of training", fontsize=11
    )
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return out


def plot_scores(curves: Mapping[int, Sequence[Mapping[str, Any]]], key: str, title: str, out: Path) -> Path:
    """A line for each seed: a score against the step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.2))
    for seed, records in curves.items():
        axis.plot(*series(records, key), marker="o", markersize=3, label=f"seed {seed}")
    axis.set_xlabel("step")
    axis.set_ylabel(key)
    axis.set_title(title, fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return out


def series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]
