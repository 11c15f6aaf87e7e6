"""`electra push` with the Hub's own client library against a stand-in for its server on this machine: what arrives is what was
written, and whatever goes wrong on the way is one line and the right exit code."""

import base64
import hashlib
import json
import re
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from helpers import electra

REPOSITORY = "me/my-model"


class Hub(ThreadingHTTPServer):
    """As much of it as the client asks for. `private` is of the repository, None where there is none; `failing` maps the beginning
    of a path to a status, or to 0: hang up. `chunks` are the bytes that came by Xet, unpacked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.private: bool | None = None
        self.failing: dict[str, int] = {}
        self.objects: dict[str, bytes] = {}
        self.committed: dict[str, bytes] = {}
        self.chunks = 0
        self.asked: list[str] = []

    def handle_error(self, request, client_address) -> None:
        """A client that has gone is no news."""


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_) -> None:
        pass

    def answer(self, content: object = None, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content or {}).encode()
        self.send_response(status)
        for name, value in (
            {"Content-Length": str(len(data)), "Content-Type": "application/json"} | (headers or {})
        ).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def handle_any(self) -> None:
        hub = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked.append(f"{self.command} {self.path}")
        for beginning, status in hub.failing.items():
            if f"{self.command} {self.path}".startswith(beginning):
                if not status:
                    self.connection.close()
                    return
                return self.answer({"error": "as the test wants it"}, status)
        if not self.path.startswith(("/lfs/", "/xet/")) and self.headers.get("Authorization") != "Bearer hf_good":
            return self.answer({"error": "Invalid username or password."}, 401)
        match self.command, self.path.partition("?")[0]:
            case "GET", "/api/whoami-v2":
                self.answer({"name": "me", "type": "user", "auth": {"type": "access_token"}})
            case "GET", "/api/models/me/my-model" if hub.private is None:
                self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            case "GET", "/api/models/me/my-model":
                self.answer({"id": REPOSITORY, "private": hub.private})
            case "POST", "/api/repos/create":
                asked = json.loads(body)
                assert asked["name"] == "my-model" and asked.get("organization") in ("me", None)
                hub.private = asked.get("private", asked.get("visibility") == "private")
                self.answer({"url": f"{hub.url}/{REPOSITORY}"})
            case "POST", "/api/validate-yaml":
                self.answer({"errors": [], "warnings": []})
            case "POST", "/api/models/me/my-model/preupload/main":
                files = [{"path": it["path"], "size": it["size"]} for it in json.loads(body)["files"]]
                modes = {it["path"]: "lfs" if it["path"].endswith(".safetensors") else "regular" for it in files}
                self.answer(
                    {"files": [{"path": it, "uploadMode": mode, "shouldIgnore": False} for it, mode in modes.items()]}
                )
            case "POST", "/me/my-model.git/info/lfs/objects/batch":
                objects = json.loads(body)["objects"]
                actions = [{"upload": {"href": f"{hub.url}/lfs/{it['oid']}"}} for it in objects]
                told = [{**it, "actions": action} for it, action in zip(objects, actions, strict=True)]
                self.answer({"transfer": "basic", "objects": told})
            case "PUT", path if path.startswith("/lfs/"):
                assert hashlib.sha256(body).hexdigest() == path.removeprefix("/lfs/")
                hub.objects[path.removeprefix("/lfs/")] = body
                self.answer()
            case "GET", "/api/models/me/my-model/xet-write-token/main":
                self.answer({"casUrl": f"{hub.url}/xet", "accessToken": "xet", "exp": int(time.time()) + 3600})
            case "POST", path if path.startswith("/xet/v1/xorbs/"):
                while len(body) >= 8 and body[0] == 0:  # version, packed size, kind of packing, size
                    hub.chunks += int.from_bytes(body[5:8], "little")
                    body = body[8 + int.from_bytes(body[1:4], "little") :]
                self.answer({"was_inserted": True})
            case "POST", "/xet/v1/shards":
                self.answer({"result": 1})
            case "POST", "/api/models/me/my-model/commit/main":
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "file":
                        hub.committed[value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "lfsFile":
                        hub.committed[value["path"]] = hub.objects.get(value["oid"], value["oid"])
                self.answer({"commitUrl": f"{hub.url}/{REPOSITORY}/commit/abc", "commitOid": "abc", "success": True})
            case _:
                self.answer({"error": f"the stand-in has no {self.path}"}, 404)

    do_GET = do_POST = do_PUT = handle_any  # noqa: N815


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(finished_run, tmp_path) -> Path:
    return Path(shutil.copytree(finished_run / "export", tmp_path / "model"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(it.relative_to(folder)): it.read_bytes() for it in folder.rglob("*") if it.is_file()}


def test_a_dry_run_asks_nobody_and_says_what_would_go(folder, hub):
    done = electra("push", folder, REPOSITORY)
    assert done.returncode == 0 and hub.asked == [], done.stderr
    for name, data in contents(folder).items():
        assert name in done.stdout and f"{len(data):,}" in done.stdout
    assert "nothing was sent" in done.stdout and "private" in done.stdout and "license is not filled in" in done.stdout


def test_a_folder_arrives_whole_in_a_private_repository(folder, hub):
    (folder / ".env").write_text("a secret")
    (folder / "notes.txt").write_text("mine")
    done = electra("push", folder, "my-model", "--yes")
    assert done.returncode == 0, done.stderr
    assert hub.committed == {name: it for name, it in contents(folder).items() if name not in (".env", "notes.txt")}
    assert hub.private is True and len(hub.objects) == 1
    assert f"{hub.url}/{REPOSITORY}/commit/abc" in done.stdout and "notes.txt" in done.stdout
    again = electra("push", folder, REPOSITORY, "--yes")
    assert again.returncode == 0 and sum(it == "POST /api/repos/create" for it in hub.asked) == 1, again.stderr


def test_large_files_go_by_xet_where_it_is_installed_and_nobody_is_told_how(folder, hub, monkeypatch):
    """The client's own choice: hf_xet comes with it on usual processors, and asks no other way."""
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.failing = {"GET /api/models/me/my-model/xet-write-token": 404}
    done = electra("push", folder, REPOSITORY, "--yes")
    assert done.returncode == 5 and "HF_HUB_DISABLE_XET=1" in done.stderr and not hub.committed, done.stderr
    hub.failing = {}
    done = electra("push", folder, REPOSITORY, "--yes")
    assert done.returncode == 0, done.stderr
    weights = (folder / "model.safetensors").read_bytes()
    arrived = {"model.safetensors": hashlib.sha256(weights).hexdigest()}
    assert hub.committed == contents(folder) | arrived and hub.chunks == len(weights) and not hub.objects
    assert not [it for it in hub.asked if "telemetry" in it]


def test_an_edited_card_goes_and_an_edited_model_does_not(folder, hub):
    (folder / "README.md").write_text("---\nlicense: mit\nlanguage: en\ndatasets: [x]\n---\nmine")
    done = electra("push", folder, REPOSITORY)
    assert done.returncode == 0 and "not filled in" not in done.stdout, done.stderr
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    done = electra("push", folder, REPOSITORY, "--yes")
    assert done.returncode == 4 and "config.json" in done.stderr and hub.asked == []
    (folder / "MANIFEST.json").unlink()
    done = electra("push", folder, REPOSITORY, "--yes")
    assert done.returncode == 4 and "nobody has checked it" in done.stderr and hub.asked == []


def test_folders_inside_go_with_their_manifests_and_nothing_from_outside(folder, hub, tmp_path):
    shutil.copytree(folder, folder / "detector")
    (tmp_path / "secret.txt").write_text("mine")
    (folder / "link.json").symlink_to(tmp_path / "secret.txt")
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    hostile = {"../secret.txt": {"bytes": 4, "sha256": hashlib.sha256(b"mine").hexdigest()}}
    (folder / "MANIFEST.json").write_text(json.dumps(manifest | hostile | {"link.json": hostile["../secret.txt"]}))
    assert electra("push", folder, REPOSITORY, "--yes").returncode == 4 and hub.asked == []
    done = electra("push", folder, REPOSITORY, "--yes", "--trust")
    assert done.returncode == 0, done.stderr
    names = {"MANIFEST.json", *manifest}
    assert hub.committed.keys() == names | {f"detector/{name}" for name in names}


def test_public_is_said(folder, hub):
    hub.private = False
    done = electra("push", folder, REPOSITORY, "--yes")
    assert done.returncode == 2 and "--public" in done.stderr and not hub.committed
    assert electra("push", folder, REPOSITORY, "--yes", "--public").returncode == 0 and hub.committed


LFS, COMMIT = "PUT /lfs/", "POST /api/models/me/my-model/commit"


@pytest.mark.parametrize(
    ("failing", "code", "says"),
    [
        ({"GET /api/whoami-v2": 401}, 5, "answered 401.*may write"),
        ({"POST /api/repos/create": 403}, 5, "answered 403.*may write"),
        ({COMMIT: 400}, 3, "answered 400.*does not accept"),
        ({COMMIT: 500}, 5, "answered 500.*Nothing was committed"),
        ({LFS: 500}, 5, "answered 500.*Nothing was committed"),
        ({LFS: 0}, 5, "127.0.0.1.*Nothing was committed"),
        ({COMMIT: 0}, 5, "127.0.0.1.*Nothing was committed"),
        ({"GET /api/whoami": 0}, 5, "127.0.0.1.*Nothing was committed"),
    ],
)
def test_what_goes_wrong_is_one_line(failing, code, says, folder, hub):
    hub.failing = failing
    done = electra("push", folder, REPOSITORY, "--yes")
    lines = [line for line in done.stderr.splitlines() if line.startswith("electra: ")]
    assert done.returncode == code and len(lines) == 1 and re.search(says, lines[0]), done.stderr
    assert not hub.committed


def test_without_a_token_or_a_server_nothing_begins(folder, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    done = electra("push", folder, REPOSITORY, "--yes")
    assert done.returncode == 5 and "401" in done.stderr and "hf_bad" not in done.stderr
    monkeypatch.delenv("HF_TOKEN")
    assert "hf auth login" in electra("push", folder, REPOSITORY).stdout
    done = electra("push", folder, REPOSITORY, "--yes")
    assert done.returncode == 5 and "hf auth login" in done.stderr
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = electra("push", folder, REPOSITORY, "--yes")
    assert done.returncode == 5 and "offline" in done.stderr.lower()


@pytest.mark.parametrize("name", ["a b/c", "../x", "a/b/c", "a--b", "ü/x", ""])
def test_a_name_that_is_none(name, folder):
    done = electra("push", folder, name)
    assert done.returncode == 2 and "OWNER/NAME" in done.stderr, done.stderr


def test_a_folder_that_is_no_model(finished_run, folder, tmp_path):
    done = electra("push", finished_run, REPOSITORY)
    assert done.returncode == 3 and f"{finished_run / 'export'}" in done.stderr
    done = electra("push", tmp_path / "nothing", REPOSITORY)
    assert done.returncode == 3 and "config.json" in done.stderr
