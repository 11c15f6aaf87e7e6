"""The server as its clients meet it: real HTTP on loopback."""

import asyncio
import json
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from electra.base.errors import DataError, SettingsError
from electra.finetuning.run import finetune
from electra.inspector import app as application
from electra.inspector import batching, guard, load
from electra.inspector.batching import Batcher, BusyError, Waiting
from electra.inspector.gallery import Gallery
from helpers import electra
from serving import SCRIPT, Served, serving, until

TEXT = "The barak walks the lonute."


@pytest.fixture(scope="module")
def finetuned(toy_model, tmp_path_factory):
    """Its labels and rows are what a page must show as text."""
    folder = tmp_path_factory.mktemp("finetuned")
    labels = SCRIPT, "\x1b[31mred"
    rows = [
        {"text": f"the barak {'walks' if n % 2 else 'reads'} {n} {SCRIPT}", "label": labels[n % 2]} for n in range(60)
    ]
    (folder / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finetune(
        toy_model, [str(folder / "table.jsonl")], {"epochs": 1, "length": 32, "min_steps": 0}, folder / "out", seeds=2
    )
    return folder / "out"


@pytest.fixture(scope="module")
def served(finished_run, finetuned):
    with serving([finished_run, finetuned]) as server:
        yield server


def number_of(served: Served, part: str) -> int:
    return next(it["number"] for it in served.get("/api/models")["models"] if part in it["name"])


def test_answers_are_those_of_the_library(served, finished_run, finetuned):
    run, task = number_of(served, "run"), number_of(served, "seed-0")
    ours = load(finished_run)
    (tokens,) = served.ask("/api/detect", model=run, texts=[TEXT])
    assert tokens == [vars(token) for token in ours.detect(TEXT)]
    (played,) = served.ask("/api/corrupt", model=run, texts=[TEXT], share=0.3, seed=5)
    assert played == [vars(token) for token in ours.corrupt(TEXT, 0.3, 5)]
    ((proposals,),) = served.ask("/api/fill", model=run, items=[{"text": TEXT, "places": [1]}], top=3)
    assert proposals == [vars(it) for it in ours.fill(TEXT, [1], 3)[0]]
    (replaced,) = served.ask("/api/replace", model=run, items=[{"text": TEXT, "replacements": {"1": "the"}}])
    assert replaced == [vars(token) for token in ours.replace(TEXT, {1: "the"})]
    vectors = served.ask("/api/embed", model=run, texts=[TEXT, "back"])
    assert np.allclose(vectors, ours.embed([TEXT, "back"]), atol=1e-6)
    answers = served.ask("/api/predict", model=task, rows=["the barak walks 3", {"text": "the barak reads 4"}])
    expected = load(finetuned / "table" / "seed-0").predict(["the barak walks 3", {"text": "the barak reads 4"}])
    assert [it["prediction"] for it in answers] == [it["prediction"] for it in expected]
    assert answers[0].keys() == expected[0].keys()


def test_what_a_model_cannot_do_is_said_in_one_line(served):
    run, task = number_of(served, "run"), number_of(served, "seed-0")
    question = {"texts": [TEXT]}
    assert "cannot score text" in served.refusal("POST", "/api/score", {"model": run, **question})[1]
    status, reason = served.refusal("POST", "/api/detect", {"model": task, **question})
    assert status == 400 and "holds no discriminator" in reason
    assert served.refusal("POST", "/api/detect", {"model": 99, **question})[0] == 404
    assert served.refusal("GET", "/api/runs/99")[0] == 404
    assert served.refusal("POST", "/api/detect", {"texts": []})[0] == 422
    assert served.refusal("POST", "/api/detect", {"texts": "x"}) == (422, "texts: Input should be a valid list")
    assert served.refusal("POST", "/api/detect", {"texts": ["x"] * 300})[0] == 422
    assert served.refusal("POST", "/api/detect", {"texts": ["x " * 20_000] * 3})[0] == 413
    assert served.refusal("POST", "/api/detect", b'{"texts": ["\\ud800"]}')[0] in (400, 422)
    assert served.refusal("POST", "/api/detect", b'{"texts": ["a"')[0] == 422
    assert served.refusal("GET", "/nowhere")[0] == 404
    assert served.refusal("POST", "/api/predict", {"model": task, "rows": [{"txet": TEXT}]})[0] == 400
    status, reason = served.refusal("POST", "/api/predict", {"model": task, "rows": [TEXT, {"text": TEXT, "stars": 3}]})
    assert status == 422 and reason.startswith("rows.1.stars: Input should be a valid string")


def test_a_misspelt_key_is_not_ignored(served):
    assert served.refusal("POST", "/api/embed", {"texts": [TEXT], "poling": "cls"})[1].startswith("poling: ")
    item = {"text": TEXT, "places": [1], "replacement": {"0": "the"}}
    assert served.refusal("POST", "/api/fill", {"items": [item]})[1].startswith("items.0.replacement: ")


def test_a_model_says_what_it_can_be_asked(served):
    (run,) = served.get(f"/api/models/{number_of(served, 'run')}")["answers"]
    assert run["kind"] == "discriminator" and run["has_generator"] and run["columns"] == [] and run["positions"] == 32
    (task,) = served.get(f"/api/models/{number_of(served, 'seed-0')}")["answers"]
    assert task["kind"] == "classification" and task["columns"] == ["text"] and SCRIPT in task["labels"]


def test_machines_find_health_metrics_and_a_description(served):
    assert served.get("/health")["status"] == "ok"
    paths = served.get("/openapi.json")["paths"]
    assert {"/api/detect", "/api/fill", "/api/score", "/api/predict", "/api/embed"} <= paths.keys()
    served.ask("/api/detect", model=number_of(served, "run"), texts=[TEXT, TEXT])
    _, headers, text = served.request("GET", "/metrics")
    lines = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#"))
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert float(lines["electra_items_total"]) >= 2 and float(lines["electra_waiting"]) == 0
    assert float(lines['electra_requests_total{route="/api/detect",status="200"}']) >= 1


def test_the_page_comes_with_a_strict_policy_and_asks_nobody_else(served):
    status, headers, page = served.request("GET", "/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert headers["x-content-type-options"] == "nosniff" and "access-control-allow-origin" not in headers
    for name in (
        "main.js",
        "style.css",
        "try.js",
        "watch.js",
        "compare.js",
        "plot.js",
        "tokens.js",
        "dom.js",
        "api.js",
    ):
        status, headers, content = served.request("GET", f"/page/{name}")
        assert status == 200 and headers["content-type"].split("/")[0] == "text"
        assert b"innerHTML" not in content and b"eval(" not in content
        foreign = content.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"http://" not in foreign and b"https://" not in foreign, name
    assert b"https://" not in page and b"http://" not in page


# who may ask


def test_other_names_and_other_pages_are_refused(served):
    question = {"texts": [TEXT]}
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""):
        assert served.refusal("GET", "/api/models", host=host)[0] == 421
    assert served.get("/health", host=f"localhost:{served.port}")["status"] == "ok"
    assert served.get("/health", host="[::1]:1")["status"] == "ok"
    assert served.refusal("POST", "/api/detect", question, origin="https://evil.example")[0] == 403
    assert served.refusal("POST", "/api/detect", question, origin="null")[0] == 403
    assert served.refusal("POST", "/api/detect", question, sec_fetch_site="cross-site")[0] == 403
    own = served.request("POST", "/api/detect", question, origin=f"http://127.0.0.1:{served.port}")
    assert own[0] in (200, 400)
    text = served.refusal("POST", "/api/detect", json.dumps(question).encode(), **{"content-type": "text/plain"})
    assert text[0] == 415
    for method in ("PUT", "DELETE", "OPTIONS", "TRACE"):
        assert served.refusal(method, "/api/models")[0] == 405


@pytest.mark.parametrize(
    "path",
    ["/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e/%2e%2e/__init__.py", "//etc/passwd", "/page/%00", "/page/app.py",
     "/api/models/../../etc", "/api/results/0/wrong/..%2f..%2fsettings.json", "/api/models/-1", "/api/models/1e9"],
)  # fmt: skip
def test_no_path_of_a_request_reaches_the_disk(served, path):
    assert served.refusal("GET", path)[0] in (404, 422)


def test_another_address_needs_a_token(finished_run):
    with serving([finished_run], host="0.0.0.0") as server:
        token = server.url.partition("?token=")[2]
        assert len(token) >= 32
        assert server.get("/health")["status"] == "ok"
        assert server.refusal("GET", "/api/models")[0] == 401
        assert server.refusal("GET", "/metrics")[0] == 401
        assert server.refusal("GET", "/", authorization="Bearer wrong")[0] == 401
        assert server.refusal("GET", f"/api/models?token={token}")[0] == 401  # a link to the page alone carries it
        assert server.get("/api/models", authorization=f"Bearer {token}")["models"]
        status, headers, _ = server.request("GET", f"/?token={token}")
        cookie = headers["set-cookie"]
        assert status == 303 and headers["location"] == "/" and "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert server.get("/api/models", cookie=cookie.partition(";")[0])["models"]
        assert server.refusal("GET", "/api/models", cookie="electra_token=x; a")[0] == 401
        assert server.refusal("GET", "/health", host="rebound.example")[0] == 421
        assert server.get("/health", host="192.168.7.7:80")["status"] == "ok"


def test_tokens_that_can_be_guessed_are_refused():
    with pytest.raises(SettingsError, match="at least 16"):
        guard.token_for("127.0.0.1", "short")
    with pytest.raises(SettingsError, match="ASCII"):
        guard.token_for("127.0.0.1", "with spaces in the middle")
    assert (
        guard.token_for("127.0.0.1", None) == guard.token_for("localhost", None) == guard.token_for("::1", None) == ""
    )
    assert guard.token_for("0.0.0.0", None) != guard.token_for("0.0.0.0", None)


def test_another_site_is_let_in_only_by_name(finished_run):
    with serving([finished_run], origin="https://mine.example") as server:
        status, headers, _ = server.request("OPTIONS", "/api/detect", origin="https://mine.example")
        assert status == 204 and headers["access-control-allow-origin"] == "https://mine.example"
        assert server.refusal("OPTIONS", "/api/detect", origin="https://other.example")[0] == 405
        question = {"texts": [TEXT]}
        status, headers, _ = server.request("POST", "/api/detect", question, origin="https://mine.example")
        assert status == 200 and headers["access-control-allow-origin"] == "https://mine.example"
        _, headers, _ = server.request("GET", "/health", origin="https://other.example")
        assert "access-control-allow-origin" not in headers


def test_a_folder_without_anything_and_a_port_that_is_taken_are_said(tmp_path, finished_run, served):
    with pytest.raises(DataError, match="no run, model or result"):
        Gallery([tmp_path])
    with pytest.raises(DataError, match="is not a folder"):
        Gallery([tmp_path / "absent"])
    done = electra("serve", finished_run, "--port", served.port)
    assert done.returncode == 5 and "--port" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_missing_package_is_named_with_what_to_install(finished_run, monkeypatch):
    for name in ("electra.inspector.app", "electra.inspector.guard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = electra("serve", finished_run)
    assert done.returncode == 5 and "pip install '.[serve]'" in done.stderr and "uvicorn" in done.stderr


# answered together


def test_many_clients_are_answered_together_and_each_gets_its_own(served, finished_run):
    run, texts = number_of(served, "run"), [f"the barak walks {'the lonute ' * n}" for n in range(24)]
    before = served.desk.batcher.counts.groups
    expected = [[token.probability for token in tokens] for tokens in load(finished_run).detect(texts)]
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda text: served.ask("/api/detect", model=run, texts=[text])[0], texts))
    for ours, theirs in zip(expected, answers, strict=True):
        assert [it["probability"] for it in theirs] == pytest.approx(ours, abs=1e-5)
    assert served.desk.batcher.counts.groups - before < 24


def test_a_bad_request_does_not_spoil_the_group_it_is_in():
    def answer(items):
        if "bad" in items:
            raise DataError("bad")
        return [item.upper() for item in items]

    group = [Waiting("key", [it], 1, answer, None) for it in ("a", "bad", "c")]
    first, second, third = batching.answer_group(group)
    assert (first, third) == (["A"], ["C"]) and isinstance(second, DataError)


def test_requests_that_ask_the_same_are_taken_together_as_many_as_may_be():
    async def check():
        batcher, loop = Batcher(), asyncio.get_running_loop()
        for key, length in [("a", 10), ("b", 10), ("a", 90_000), ("a", 12), ("a", 200_000), ("a", 11)]:
            batcher.waiting.append(Waiting(key, ["x"], length, list, loop.create_future()))
        taken = [[(it.key, it.characters) for it in batcher.take()] for _ in range(4)]
        assert taken == [[("a", 10), ("a", 90_000), ("a", 12)], [("b", 10)], [("a", 200_000), ("a", 11)], []]
        batcher.waiting = [Waiting("a", ["x"] * 100, 100, list, loop.create_future()) for _ in range(3)]
        assert [len(batcher.take()) for _ in range(4)] == [1, 1, 1, 0]

    asyncio.run(check())


def test_clients_that_come_back_one_after_the_other_are_answered_in_halves(monkeypatch):
    """Not one of them alone, and then all others."""
    monkeypatch.setattr(batching, "LINGER", 1.0)
    monkeypatch.setattr(batching, "LINGER_SHARE", 10.0)  # also where the machine is busy
    sizes = []

    def answer(items):
        time.sleep(0.02)
        return list(items)

    monkeypatch.setattr(
        batching, "answer_group", lambda group: sizes.append(len(group)) or [answer(it.items) for it in group]
    )

    async def client(batcher, number):
        for _ in range(3):
            await batcher.ask("key", [number], 1, answer)
            await asyncio.sleep(0.004 * number)

    async def check():
        batcher = Batcher()
        batcher.start()
        await asyncio.gather(*(client(batcher, number) for number in range(10)))
        await batcher.stop()

    asyncio.run(check())
    assert sum(sizes) == 30 and min(sizes[:-2]) >= 2, sizes


def test_a_full_queue_says_when_to_come_again(served, monkeypatch):
    monkeypatch.setattr(batching, "MOST_WAITING", 2)
    gate, run = threading.Event(), number_of(served, "run")
    monkeypatch.setattr(application, "describe_model", lambda model: gate.wait(20) and {})
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(served.request, "GET", f"/api/models/{run}") for _ in range(8)]
        until(lambda: sum(it.done() for it in asked) >= 4)
        gate.set()
        answers = [it.result() for it in asked]
    refused = [headers for status, headers, _ in answers if status == 503]
    assert 4 <= len(refused) < 8 and all(1 <= int(headers["retry-after"]) <= 60 for headers in refused)
    assert {status for status, _, _ in answers} == {200, 503}


def test_a_client_that_goes_away_takes_its_request_along():
    async def check():
        batcher = Batcher()
        asked = asyncio.create_task(batcher.ask("key", ["x"], 1, list))
        await asyncio.sleep(0)
        assert len(batcher.waiting) == 1
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert not batcher.waiting
        for _ in range(batching.MOST_WAITING):
            batcher.waiting.append(Waiting("key", [], 0, list, asyncio.get_running_loop().create_future()))
        with pytest.raises(BusyError):
            await batcher.ask("key", ["x"], 1, list)

    asyncio.run(check())


def test_the_newest_checkpoint_answers(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    checkpoints = sorted((run / "checkpoints").iterdir())
    newest = checkpoints[-1].rename(tmp_path / checkpoints[-1].name)
    gallery = Gallery([run])
    before = gallery.model(0).detect(TEXT)
    assert gallery.model(0) is gallery.model(0)
    newest.rename(run / "checkpoints" / newest.name)
    assert gallery.model(0).detect(TEXT) != before and len(gallery.loaded) == 1


def test_a_model_that_was_made_anew_in_its_place_answers(exported, tmp_path):
    shutil.copytree(exported / "discriminator", tmp_path / "model")
    gallery = Gallery([tmp_path / "model"])
    first = gallery.model(0)
    assert gallery.model(0) is first
    shutil.rmtree(tmp_path / "model")
    shutil.copytree(exported / "discriminator", tmp_path / "model")
    assert gallery.model(0) is not first and len(gallery.loaded) == 1


def test_new_runs_are_added_at_the_end(finished_run, tmp_path, monkeypatch):
    import shutil

    shutil.copytree(finished_run, tmp_path / "b")
    gallery = Gallery([tmp_path])
    assert [it.name for it in gallery.runs] == ["b"]
    shutil.copytree(finished_run, tmp_path / "a")
    gallery.look()
    assert [it.name for it in gallery.runs] == ["b"]  # a moment ago
    gallery.looked -= 60
    gallery.look()
    assert [it.name for it in gallery.runs] == ["b", "a"]
    assert time.monotonic() - gallery.looked < 5
