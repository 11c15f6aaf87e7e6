"""Where metrics are sent, beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, trackio.

Each is an adapter that imports its library when it is opened. Where the data go, and under which account, is set in each
library's own way, by its environment variables and logins; without any, everything stays on this machine and nobody is asked.
"""

import io
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator

from electra.base.config import flatten
from electra.base.errors import MachineError, first_line
from electra.base.files import read_or_set_aside, write_json

log = logging.getLogger(__name__)
TRACKING = "tracking.json"
PROJECT = "electra"
SERVER_SECONDS = 30
"""Seconds that a run waits for a tracker's server, when it begins and when it ends."""
MOST_PARAMETERS = 100  # in one request to MLflow

TrackerName = Literal["auto", "tensorboard", "wandb", "mlflow", "trackio"]
Track = Annotated[
    tuple[TrackerName, ...],
    BeforeValidator(lambda value: [it for it in value.split(",") if it != "none"] if isinstance(value, str) else value),
]
"""`train.track=wandb,mlflow`, or a list of them; "auto" is tensorboard if it is installed, "none" sends nothing."""


class Tracker(Protocol):
    """Receives metrics. `id` is what it knows the run by, so that a resumed run continues there and no step is sent twice; "" if it
    drops what comes after the step it is opened at. To add one: a class, its name in `TrackerName`, an arm in `open_tracker`."""

    id: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Tracked:
    """The run whose metrics a tracker receives. `step` is the one after which it resumes; `id` is empty if this tracker does not
    know the run yet."""

    folder: Path
    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    id: str = ""

    @property
    def title(self) -> str:
        return self.name or self.folder.absolute().name


def open_tracker(name: TrackerName, run: Tracked) -> Tracker:
    match name:
        case "auto" | "tensorboard":
            return TensorBoard(run)
        case "wandb":
            return WeightsAndBiases(run)
        case "mlflow":
            return MLflow(run)
        case "trackio":
            return Trackio(run)


def wanted_trackers(track: Sequence[TrackerName]) -> list[TrackerName]:
    """The trackers to open. One that is named but not installed is an error, before a run begins."""
    wanted: list[TrackerName] = ["tensorboard"] if "auto" in track and find_spec("tensorboard") else []
    wanted += [name for name in dict.fromkeys(track) if name not in ("auto", *wanted)]
    if missing := [name for name in wanted if not find_spec(name)]:
        raise MachineError(
            f'track={",".join(missing)} needs a package that is not installed. Install it from the clone (pip install ".[track]"), or leave it out.'
        )
    return wanted


class Trackers:
    """All trackers of a run. One that fails receives nothing more, with one warning: a run never ends because of a tracker.
    `told` are the last steps, by kind, that earlier processes have sent: steps that are repeated are not sent again."""

    def __init__(self, names: Sequence[TrackerName], run: Tracked, told: Mapping[str, int]):
        ids: dict[str, Any] = read_or_set_aside(run.folder / TRACKING) or {}
        self.told, self.open = {name: told for name in ids}, dict[str, Tracker]()
        for name in names:
            with self.surviving(name):
                self.open[name] = open_tracker(name, replace(run, id=str(ids.get(name, ""))))
        known = ids | {name: tracker.id for name, tracker in self.open.items() if tracker.id}
        if known != ids:
            write_json(run.folder / TRACKING, known)

    @contextmanager
    def surviving(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.open.pop(name, None)
            reason, rest = first_line(error) or type(error).__name__, "Training goes on; metrics.jsonl has everything."
            log.warning("%s receives nothing more of this run (%s). %s", name, reason, rest)

    def log(self, kind: str, step: int, values: Mapping[str, float | str]) -> None:
        metrics = {f"{kind}/{key}": it for key, it in values.items() if isinstance(it, float) and math.isfinite(it)}
        for name, tracker in list(self.open.items()):
            if metrics and step > self.told.get(name, {}).get(kind, 0):
                with self.surviving(name):
                    tracker.log(step, metrics)

    def close(self) -> None:
        for name, tracker in list(self.open.items()):
            with self.surviving(name):
                tracker.close()


class TensorBoard:
    id = ""

    def __init__(self, run: Tracked):
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Offline if nobody is logged in: a run must not stop at a prompt. WANDB_MODE, WANDB_PROJECT, WANDB_DIR, … apply. Usage reports
    to wandb's makers, which it sends even offline, are switched off unless WANDB_ERROR_REPORTING is set."""

    def __init__(self, run: Tracked):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.id = run.id or uuid.uuid4().hex[:12]
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.id,
            name=run.title,
            dir=os.environ.get("WANDB_DIR", run.folder),
            config=dict(run.settings),
            resume="allow",
            mode=mode,
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=SERVER_SECONDS,
                finish_timeout=SERVER_SECONDS,
                x_transaction_log_flush_interval=1,  # seconds of metrics that a kill may lose
            ),
        )
        if mode == "offline":
            log.info("wandb keeps this run offline; upload it with: wandb sync %s", Path(self.run.dir).parent)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME apply; without a server the files are in the run folder. Usage reports to
    MLflow's makers are switched off unless MLFLOW_DISABLE_TELEMETRY is set."""

    def __init__(self, run: Tracked):
        quick = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": str(SERVER_SECONDS // 3)}
        for key, value in {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true", **quick}.items():
            os.environ.setdefault(key, value)
        import mlflow
        from mlflow.entities import Metric, Param

        self.metric: Callable[..., Metric] = Metric
        local = (run.folder / "mlflow").absolute().as_uri()
        self.client = mlflow.MlflowClient(None if mlflow.is_tracking_uri_set() else local)
        if run.id:
            self.client.update_run(run.id, status="RUNNING")
            self.id = run.id
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self.client.create_experiment(name)
        self.id = self.client.create_run(number, run_name=run.title).info.run_id
        parameters = [Param(key, str(value)[:500]) for key, value in flatten(run.settings).items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self.client.log_batch(self.id, params=parameters[first : first + MOST_PARAMETERS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w./ -]", "_", key): value for key, value in metrics.items()}
        self.client.log_batch(self.id, [self.metric(key, value, now, step) for key, value in named.items()])

    def close(self) -> None:
        self.client.set_terminated(self.id)


class Trackio:
    """Writes to trackio's database on this machine; TRACKIO_DIR, TRACKIO_PROJECT, TRACKIO_SPACE_ID, … apply. trackio knows runs by
    their names, and prints to standard output, which is kept for our own."""

    def __init__(self, run: Tracked):
        import trackio

        self.trackio, self.id = trackio, run.id or f"{run.title} {uuid.uuid4().hex[:6]}"
        with redirect_stdout(io.StringIO()):
            self.run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=self.id,
                config=dict(run.settings),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self.trackio.finish()
