"""What a run leaves behind for people and programs: metrics.jsonl, TensorBoard events, run_state.json."""

import json
import math
import os
from pathlib import Path
from typing import Any

from electra.base.files import write_atomically, write_json

METRICS = "metrics.jsonl"
RUN_STATE = "run_state.json"


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
