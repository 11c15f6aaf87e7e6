"""Runs as a page follows them: what is read of a folder while another process writes it, and what a run keeps for people."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch

from electra.base.files import read_object
from electra.inspector.report import bundled, page_text, write_html
from electra.inspector.results import result_view
from electra.inspector.watch import MOST_RECORDS, News, Tail, last_records, run_settings, run_state, run_view, thinned
from electra.pretraining.load import load_run
from electra.pretraining.run import build_heldout
from electra.pretraining.samples import MOST_STEPS, ROWS_SHOWN, SAMPLES, TOKENS_SHOWN, keep_step, read_samples
from electra.train.log import METRICS, RUN_STATE
from helpers import Forked
from serving import SCRIPT, serving, until


def record(step: int, **values: float) -> bytes:
    return (json.dumps({"kind": "train", "step": step, **values}) + "\n").encode()


def test_a_tail_gives_whole_lines_once_and_everything_after_a_restart(tmp_path):
    tail, path = Tail(tmp_path), tmp_path / METRICS
    assert tail.read() == ([], False)
    path.write_bytes(record(1) + b"not json\n" + record(2) + b'{"kind": "train", "st')
    assert tail.read() == ([{"kind": "train", "step": 1}, {"kind": "train", "step": 2}], True)
    with path.open("ab") as file:
        file.write(b'ep": 3}\n')
    assert tail.read() == ([{"kind": "train", "step": 3}], False)
    assert tail.read() == ([], False)
    other = tmp_path / "other"
    other.write_bytes(record(1))
    other.rename(path)  # as a resumed run does
    assert tail.read() == ([{"kind": "train", "step": 1}], True)
    path.unlink()
    assert tail.read() == ([], True)


def test_long_runs_are_thinned_and_keep_their_end():
    records = [{"kind": "train", "step": step} for step in range(25_001)] + [{"kind": "alarm", "step": 7}]
    kept = thinned(records)
    assert MOST_RECORDS // 2 < len(kept) <= MOST_RECORDS + 1
    assert kept[-1]["step"] == 25_000 and {"kind": "alarm", "step": 7} in kept


def test_of_a_long_file_few_lines_are_parsed_and_none_but_training_is_left_out(tmp_path, monkeypatch):
    parsed = []
    monkeypatch.setattr("electra.inspector.watch.parse_json", lambda line: parsed.append(line) or json.loads(line))
    other = b'{"kind": "heldout", "step": 7}\n{"kind": "alarm", "step": 8}\n'
    (tmp_path / METRICS).write_bytes(b"".join(map(record, range(50_000))) + other + record(50_000))
    records, _ = Tail(tmp_path).read()
    assert len(parsed) < 5 * MOST_RECORDS and records[-1]["step"] == 50_000
    assert [it["step"] for it in records if it["kind"] != "train"] == [7, 8]
    assert [it["step"] for it in last_records(tmp_path)][-1] == 50_000 and len(last_records(tmp_path)) < 2000


def test_whatever_a_file_of_metrics_has_in_it_is_answered_with_json(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    with serving([run]) as server, server.socket() as connection:
        for content in (
            b'{"kind": "alarm", "step": 1, "alarm": "\\ud800", "text": "\\udfff"}\n',
            b'{"kind": "train", "step": 1, "loss": NaN, "mlm_loss": Infinity, "seconds": "x"}\n' * 3,
            b'{"kind": "train", "step": 1e308}\n{"kind": "train", "step": -5}\n{"kind": "alarm", "step": 3}\n',
            bytes(range(256)) * 9 + b"[" * 9000 + b"\n",
        ):
            (run / METRICS).unlink()
            (run / METRICS).write_bytes(content)
            assert server.get("/api/runs")["runs"] and server.get("/api/runs/0")["name"]
        connection.sendall(b"GET /api/events?run=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert events_of(connection, {"history", "state", "samples"})["history"] == []


def test_a_run_says_how_far_it_is_and_what_became_of_it(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    view = run_view(run)
    assert view["state"]["state"] == "finished" and view["state"]["step"] == view["state"]["planned_steps"] == 40
    assert view["state"]["seconds_left"] == 0 and view["settings"]["train.steps"] == "40"
    state = read_object(run / RUN_STATE)
    gone = subprocess.Popen(["true"])
    gone.wait()
    states = {}
    for name, pid, host in (
        ("alive", os.getpid(), state["host"]),
        ("killed", gone.pid, state["host"]),
        ("elsewhere", gone.pid, "another machine"),
    ):
        (run / RUN_STATE).write_text(json.dumps({"state": "running", "pid": pid, "host": host, "step": 5}))
        states[name] = run_state(run, view["records"])["state"]
    assert states == {"alive": "running", "killed": "killed", "elsewhere": "running"}
    (run / RUN_STATE).write_text("{")
    (run / "config.toml").write_text("broken [")
    assert run_state(run, view["records"])["state"] == "unknown" and run_settings(run) == {}


def test_a_run_keeps_what_both_networks_did_with_a_few_rows(finished_run):
    """The last evaluation is that of the last checkpoint: computed again from there."""
    samples = read_samples(finished_run)
    assert [it["step"] for it in samples["steps"]] == [10, 20, 30, 40]
    settings, objective = load_run(finished_run)
    train = settings.train.model_copy(update={"evaluate_rows": ROWS_SHOWN, "batch": ROWS_SHOWN, "accumulate": 1})
    heldout = build_heldout(
        settings.model_copy(update={"train": train}), finished_run.parent / settings.data, objective.corruptor.special
    )
    (batch,) = heldout
    with torch.no_grad():
        corrupted = objective.corruptor(batch)
        said = objective.networks()["discriminator"].detect(corrupted.batch).sigmoid()
    last = samples["steps"][-1]
    for row, tokens in enumerate(samples["rows"]):
        real = min(TOKENS_SHOWN, int(batch.is_real[row].sum()))
        assert len(tokens) == real and tokens[0] == "[CLS]"
        assert last["said"][row] == pytest.approx((100 * said[row, :real]).tolist(), abs=0.51)
        places = corrupted.chosen.positions[row][corrupted.chosen.used[row]].tolist()
        assert sorted(map(int, last["written"][row])) == sorted(place for place in places if place < real)


def test_samples_are_small_thinned_and_begun_anew_where_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr("electra.pretraining.samples.MOST_STEPS", MOST_STEPS // 10)
    row = {"tokens": ["[CLS]", "a"], "written": {"1": "b"}, "said": [0, 99]}
    for step in range(1, 35):
        keep_step(tmp_path, step, [row])
    steps = [it["step"] for it in read_samples(tmp_path)["steps"]]
    assert len(steps) <= MOST_STEPS // 10 and steps[-1] == 34 and steps == sorted(set(steps))
    keep_step(tmp_path, 5, [row])  # resumed from an earlier checkpoint
    assert [it["step"] for it in read_samples(tmp_path)["steps"]][-1] == 5
    keep_step(tmp_path, 6, [{**row, "tokens": ["[CLS]", "other"]}])
    assert [it["step"] for it in read_samples(tmp_path)["steps"]] == [6]
    for damage in (
        "{",
        "[]",
        '{"rows": 3, "steps": []}',
        '{"rows": [["a"]], "steps": [{"step": 1, "written": [], "said": []}]}',
    ):
        (tmp_path / SAMPLES).write_text(damage)
        assert read_samples(tmp_path) == {"rows": [], "steps": []}
        keep_step(tmp_path, 7, [row])
        assert [it["step"] for it in read_samples(tmp_path)["steps"]] == [7]


def test_news_are_events_of_what_changed(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    news = News(run)
    assert [name for name, _ in news.read()] == ["history", "state", "samples"]
    assert news.read() == []
    with (run / METRICS).open("ab") as file:
        file.write(record(41, loss=1.0))
    events = dict(news.read())
    assert events["records"] == [{"kind": "train", "step": 41, "loss": 1.0}] and events["state"]["step"] == 41


def events_of(connection, names, seconds=60):
    """Server-sent events until all of `names` have come; what came last under each."""
    found, name, end = {}, "", time.monotonic() + seconds
    reader = connection.makefile("rb")
    while not names <= found.keys() and time.monotonic() < end:
        line = reader.readline().decode().strip()
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            found[name] = json.loads(line[6:])
    return found


def test_a_run_is_followed_while_it_trains_and_seen_to_be_killed(prepared, recipe, tmp_path):
    run = tmp_path / "live"
    words = f"data={prepared}", f"run={run}", "train.steps=100000", "train.log_every=2", "schedule.warmup=4"
    process = Forked("pretrain", recipe, *words)
    try:
        until(lambda: (run / METRICS).is_file() and (run / METRICS).stat().st_size > 200, 120)
        with serving([run]) as server:
            with server.socket() as connection:
                connection.sendall(b"GET /api/events?run=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
                found = events_of(connection, {"history", "records", "state"})
                assert found["state"]["state"] == "running" and found["state"]["planned_steps"] == 100_000
                assert found["records"][-1]["step"] > found["history"][-1]["step"]
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            state = until(lambda: [it for it in server.get("/api/runs")["runs"] if it["state"] == "killed"])[0]
            assert "newest checkpoint" in state["reason"]
            until(lambda: server.desk.listeners == 0)  # the client that went away is forgotten
    finally:
        process.kill()
        process.wait(30)


# reports and results


def test_a_report_is_one_file_that_can_load_nothing(finished_run, tmp_path):
    folder = tmp_path / f"run & {SCRIPT.replace('/', '')}"
    shutil.copytree(finished_run, folder / "inner")
    with (folder / "inner" / METRICS).open("ab") as file:
        file.write(
            json.dumps({"kind": "alarm", "step": 41, "alarm": "x", "text": f"{SCRIPT} \x1b[31m"}).encode() + b"\n"
        )
    page = write_html(folder, tmp_path / "report.html").read_text()
    assert page.count("<script") == 2 and "default-src 'none'" in page and "<link" not in page
    assert "src=" not in page.replace("img-src", "") and SCRIPT not in page
    data = json.loads(page.partition('id="embedded">')[2].partition("</script>")[0])
    assert data["/api/runs"]["runs"][0]["step"] == 41
    assert data["/api/runs/0"]["records"][-1]["text"].startswith(SCRIPT)
    assert data["/api/runs/0"]["samples"]["steps"]


def test_modules_of_the_page_can_stand_in_one_file():
    import re

    names = re.findall(r"^(?:async )?(?:const|let|function) (\w+)", bundled(), re.MULTILINE)
    assert len(names) > 40 and len(set(names)) == len(names), sorted(it for it in names if names.count(it) > 1)
    assert not re.search(r"^(import|export) ", bundled(), re.MULTILINE)
    assert "innerHTML" not in bundled() and "https://" not in page_text("index.html")


def test_results_of_every_verb_have_one_form(tmp_path):
    spread = {"median": 0.6, "least": 0.5, "greatest": 0.7, "seeds": [0.5, 0.6, 0.7]}
    (tmp_path / "results.json").write_text(
        json.dumps([{"variant": "a", "auc": spread, "mlm_loss": spread, "steps": 5}])
    )
    view = result_view(tmp_path)
    assert view["kind"] == "compare" and [it["metric"] for it in view["groups"]] == ["RTD AUC", "MLM loss"]
    assert view["groups"][1]["is_loss"] and view["groups"][0]["rows"][0]["seeds"] == [0.5, 0.6, 0.7]
    task = {"metric": "mcc", "median": 50.0, "seeds": [49.0, 51.0]}
    (tmp_path / "speedrun.json").write_text(json.dumps({"tasks": {"cola": task}, "minutes": 10, "alarms": ["x"]}))
    view = result_view(tmp_path)
    assert view["kind"] == "speedrun" and view["groups"][0]["rows"][0]["seeds"] == [49.0, 51.0]
