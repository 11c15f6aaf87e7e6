"""What a run leaves behind for people and programs: metrics.jsonl, TensorBoard events, run_state.json."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from electra.base.files import write_atomically, write_json

METRICS = "metrics.jsonl"
RUN_STATE = "run_state.json"
PANELS = (
    ("loss", (("mlm_loss", "generator (MLM)"),)),
    ("loss", (("rtd_loss", "discriminator (RTD)"),)),
    (
        "ROC-AUC and shares",
        (("auc", "AUC"), ("recall", "recall"), ("mlm_accuracy", "generator accuracy")),
    ),
)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every record of a run. A last line cut off by a kill is left out."""
    path = folder / METRICS
    records = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class RunLog:
    """Appends to metrics.jsonl, and to TensorBoard where it is installed. Opening at step n forgets what an
    interrupted process wrote beyond n: those steps are about to be done again."""

    def __init__(self, folder: Path, step: int):
        self.folder = folder
        self.records = [record for record in read_metrics(folder) if record["step"] <= step]
        kept = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in self.records)
        write_atomically(folder / METRICS, kept.encode())
        self.file = (folder / METRICS).open("a", encoding="utf-8")
        self.board = tensorboard(folder, step)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        record = {"kind": kind, "step": step} | {key: finite_or_none(value) for key, value in values.items()}
        self.records.append(record)
        self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.file.flush()
        for key, value in values.items() if self.board else ():
            if isinstance(value, float) and math.isfinite(value):
                self.board.add_scalar(f"{kind}/{key}", value, step)

    def history(self) -> list[dict[str, float]]:
        """The training figures so far; null reads as nan."""
        train = [record for record in self.records if record["kind"] == "train"]
        return [
            {k: math.nan if v is None else v for k, v in record.items() if k != "kind"} for record in train
        ]

    def last(self, kind: str) -> dict[str, Any]:
        return next((record for record in reversed(self.records) if record["kind"] == kind), {})

    def state(self, state: str, step: int, **more: Any) -> None:
        write_json(self.folder / RUN_STATE, {"state": state, "step": step, "pid": os.getpid(), **more})

    def close(self) -> None:
        self.file.close()
        if self.board:
            self.board.close()


def finite_or_none(value: Any) -> Any:
    """JSON has no nan; null says "no such figure"."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


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
