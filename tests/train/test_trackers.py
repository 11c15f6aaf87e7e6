"""Trackers with their real libraries, on this machine alone: what a run measured is read back with each library's own reader, and
metrics.jsonl is what it is held against. A proxy that nobody may ask stands for the network."""

import json
import logging
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from electra.base.errors import MachineError, SettingsError
from electra.train import trackers
from electra.train.log import RunLog, read_metrics
from electra.train.settings import TrainSettings
from electra.train.trackers import Tracked, wanted_trackers
from helpers import command, electra, environment, who_asks

ALL = ("tensorboard", "wandb", "mlflow", "trackio")
Told = Counter[tuple[int, str, float]]


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Path:
    """Of trackio, which asks for its place once a process."""
    return tmp_path_factory.mktemp("trackio")


@pytest.fixture
def alone(monkeypatch, tmp_path, database):
    """Nobody is logged in, and whoever asks for the network is seen."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HOME": str(tmp_path),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRACKIO_DIR", str(database))
    with who_asks() as (proxied, asked):
        for name, value in proxied.items():
            monkeypatch.setenv(name, value)
        yield
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()
    assert asked == []


def told(name: str, run: Path, database: Path) -> Told:
    match name:
        case "tensorboard":
            return told_to_tensorboard(run)
        case "wandb":
            return told_to_wandb(run)
        case "mlflow":
            return told_to_mlflow(run)
    return told_to_trackio(run, database)


def told_to_tensorboard(run: Path) -> Told:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return Counter((it.step, key, it.value) for key in events.Tags()["scalars"] for it in events.Scalars(key))


def told_to_wandb(run: Path) -> Told:
    """One id, a folder for each process. The reader itself asks its server for news, which nobody answers."""
    rows: Told = Counter()
    for folder in sorted((run / "wandb").glob("offline-run-*")):
        assert folder.name.endswith(json.loads((run / "tracking.json").read_text())["wandb"])
        read = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(folder)]
        env = environment({"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"})
        done = subprocess.run(read, capture_output=True, text=True, timeout=60, check=True, env=env)
        lines = done.stdout.splitlines()
        for row in (it["history"]["item"] for it in map(json.loads, lines) if it["type"] == "history"):
            rows.update((row["_step"], key, value) for key, value in row.items() if key[0] != "_")
    return rows


def told_to_mlflow(run: Path) -> Told:
    from mlflow import MlflowClient

    client = MlflowClient((run / "mlflow").absolute().as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'electra'")
    (found,) = client.search_runs([experiment.experiment_id])
    histories = [client.get_metric_history(found.info.run_id, key) for key in found.data.metrics]
    return Counter((it.step, it.key, it.value) for history in histories for it in history)


def told_to_trackio(run: Path, database: Path) -> Told:
    """In a process of its own: this one may have another place for its database."""
    code = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; from trackio import Api;"
        "run, = (it for it in Api().runs('electra') if it.name == sys.argv[1]);"
        "print(json.dumps([{k: v for k, v in row.items() if k != 'timestamp'} for row in S.get_logs('electra', run.name)]))"
    )
    name = json.loads((run / "tracking.json").read_text())["trackio"]
    read = [sys.executable, "-c", code, name]
    env = environment({"TRACKIO_DIR": str(database)})
    rows = json.loads(subprocess.run(read, capture_output=True, text=True, timeout=60, check=True, env=env).stdout)
    return Counter((row["step"], key, row[key]) for row in rows for key in row if key != "step")


def measured(run: Path) -> Told:
    rows: Told = Counter()
    for record in read_metrics(run):
        numbers = {key: value for key, value in record.items() if isinstance(value, float)}
        rows.update((record["step"], f"{record['kind']}/{key}", value) for key, value in numbers.items())
    return rows


def as_written(rows: Told, name: str) -> Told:
    """tensorboard keeps 32 bits of a number."""
    if name != "tensorboard":
        return rows
    import numpy as np

    return Counter({(step, key, float(np.float32(value))): count for (step, key, value), count in rows.items()})


@pytest.mark.parametrize("name", ALL)
def test_an_interrupted_run_is_one_run_to_its_tracker_and_every_value_is_told_once(name, tmp_path, alone, database):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run = tmp_path / "a run"
    run.mkdir()
    for first in (0, 10):  # the process that was interrupted was at step 12, its last checkpoint at 10
        log = RunLog(Tracked(run, settings={"train": {"batch": 8}, "name": "ünï"}, step=first), (name,))
        for step in range(first + 1, 13 if first == 0 else 16):
            log.write("train", step, {"loss": 1 / step, "auc": float("nan"), "f1 of a:b|ü": step / 7})
            if step % 5 == 0:
                log.write("heldout", step, {"auc": step / 100})
        log.write("alarm", step, {"alarm": "collapse", "text": "words"})
        log.close()
        time.sleep(1 - time.time() % 1)  # TensorBoard reads files in the order of the seconds they were begun in
    rows = told(name, run, database)
    if name == "mlflow":  # which has fewer characters for names
        rows = Counter(
            {(step, key.replace("a_b_ü", "a:b|ü"), value): count for (step, key, value), count in rows.items()}
        )
    assert rows == as_written(measured(run), name)
    assert len(rows) == 2 * 15 + 3
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_tracker_that_fails_is_left_out_with_one_warning(tmp_path, monkeypatch, caplog):
    class Broken:
        id = ""

        def __init__(self, run):
            pass

        def log(self, step, metrics):
            raise ConnectionError("no route to host\nand more")

        def close(self):
            raise AssertionError("closed all the same")

    monkeypatch.setattr(trackers, "MLflow", Broken)
    log = RunLog(Tracked(tmp_path), ("mlflow", "tensorboard"))
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            log.write("train", step, {"loss": 0.5})
        log.close()
    (warning,) = caplog.messages
    assert warning.startswith("mlflow receives nothing more") and "no route to host)" in warning
    assert len(read_metrics(tmp_path)) == 3 == len(told_to_tensorboard(tmp_path))


def test_a_tracker_that_cannot_begin_does_not_stop_a_run(tmp_path, alone, caplog, monkeypatch):
    """The address of a server that is not there, as MLflow itself finds it."""
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "electra"):
        log = RunLog(Tracked(tmp_path), ("mlflow",))
        log.write("train", 1, {"loss": 0.5})
        log.close()
    assert time.monotonic() - began < 30
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("electra")]
    assert warning.startswith("mlflow receives nothing more") and len(read_metrics(tmp_path)) == 1
    assert not (tmp_path / "tracking.json").exists()


def test_who_is_told_is_a_list_or_words_with_commas():
    assert TrainSettings().track == ("auto",)
    assert (
        TrainSettings(track="wandb,mlflow").track
        == ("wandb", "mlflow")
        == TrainSettings(track=["wandb", "mlflow"]).track
    )
    assert wanted_trackers(("auto",)) == ["tensorboard"] == wanted_trackers(("auto", "tensorboard", "tensorboard"))
    assert wanted_trackers(TrainSettings(track="none").track) == []
    with pytest.raises(ValueError, match="tensorboard"):
        TrainSettings(track="neptune")


def test_a_missing_library_is_named_before_anything_is_written(prepared, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert wanted_trackers(("auto",)) == []
    with pytest.raises(MachineError, match=r"track=trackio needs .*pip install"):
        wanted_trackers(("auto", "trackio"))
    done = electra("pretrain", recipe, f"data={prepared}", f"run={tmp_path / 'run'}", "train.track=wandb")
    assert done.returncode == 5 and 'pip install ".[track]"' in done.stderr and not (tmp_path / "run").exists()
    done = electra("pretrain", recipe, f"data={prepared}", "train.track=neptune")
    assert done.returncode == SettingsError.exit_code and "train.track" in done.stderr


def test_fine_tuning_tells_trackers_too_and_they_may_change(toy_model, tmp_path, alone, database):
    rows = [(f"a{number} {'good' if number % 2 else 'bad'} thing", number % 2) for number in range(40)]
    table = tmp_path / "table.csv"
    table.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    words = ("finetune", toy_model, table, "epochs=1", "min_steps=0", "batch=8", "--out", tmp_path / "out")
    done = electra(*words, f"track={','.join(ALL[1:])}")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "out" / "table" / "training" / "seed-0"
    assert all(told(name, run, database) == measured(run) for name in ALL[1:]) and not (run / "tensorboard").exists()
    again = electra(*words, "--seeds", "2")  # back to the default: no other run
    assert again.returncode == 0 and "1 finished run kept" in again.stderr, again.stderr
    assert told_to_tensorboard(run.parent / "seed-1") == as_written(measured(run.parent / "seed-1"), "tensorboard")


@pytest.mark.slow
def test_a_killed_run_goes_on_and_its_trackers_with_it(prepared, recipe, tmp_path, alone, database):
    run, words = tmp_path / "run", (f"data={prepared}", "train.steps=400", f"train.track={','.join(ALL)}")
    start = command("pretrain", recipe, f"run={run}", *words)
    process = subprocess.Popen(start, env=environment(), stderr=subprocess.PIPE, text=True)
    while len(read_metrics(run)) < 30 and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=60)
    stopped_at, ids = read_metrics(run)[-1]["step"], (run / "tracking.json").read_bytes()
    done = subprocess.run(start, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "resuming at step" in done.stderr, done.stderr
    assert (run / "tracking.json").read_bytes() == ids
    for name in ALL:
        rows, timed = (
            told(name, run, database),
            ("seconds", "tokens_per_second"),
        )  # a step done again takes another time
        assert set(Counter((step, key) for step, key, _ in rows.elements()).values()) == {1}, f"{name}: told twice"
        missing = as_written(measured(run), name) - rows
        unexplained = [row for row in missing if not row[1].endswith(timed) and row[0] > stopped_at]
        assert not unexplained, f"{name} lost what came after the kill: {unexplained}"
        assert min(step for step, _, _ in rows) < stopped_at < max(step for step, _, _ in rows) == 400
