"""Attacks on the server, each bounded in count and time, against the real thing on loopback: memory stays bounded, and it
answers afterwards."""

import contextlib
import gzip
import json
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from electra.inspector import guard
from serving import serving, until

QUESTION = json.dumps({"texts": ["the barak walks"]}).encode()
HEAD = b"POST /api/detect HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def served(finished_run):
    with serving([finished_run]) as server:
        yield server


@pytest.fixture(autouse=True)
def alive_afterwards(served):
    """Whatever was done to it."""
    memory = resident()
    yield
    assert served.get("/health")["status"] == "ok"
    assert served.request("POST", "/api/detect", QUESTION)[0] == 200
    assert resident() - memory < 150 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def answer_to(served, *parts: bytes, pause: float = 0.0) -> bytes:
    """What comes back before the server closes; b"" where it closes at once."""
    with served.socket() as connection, contextlib.suppress(ConnectionError):
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        return received
    return b""


def test_a_head_that_arrives_byte_by_byte_is_cut_off(served, monkeypatch):
    monkeypatch.setattr(guard, "HEAD_SECONDS", 0.5)
    began = time.monotonic()
    assert answer_to(served, *(b"G" for _ in range(30)), pause=0.05) == b""
    assert time.monotonic() - began < 10
    assert answer_to(served, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ") == b""
    with served.socket() as silent:  # says nothing at all
        assert silent.recv(10) == b""


def test_a_body_that_never_ends_is_cut_off(served, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.5)
    answer = answer_to(served, HEAD + b"content-length: 1000\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive" in answer


def test_giant_bodies_are_refused_without_being_read(served):
    answer = answer_to(served, HEAD + b"content-length: 99999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    answer = answer_to(served, HEAD + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 40)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413")
    assert served.refusal("POST", "/api/detect", b"x" * (1 << 20))[0] == 422


def test_giant_and_crooked_heads_are_refused(served):
    giant = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n"
    assert answer_to(served, giant)[:10] in (b"", b"HTTP/1.1 4")
    for head in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
                 HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n", HEAD + b"content-length: -1\r\n\r\n"):  # fmt: skip
        assert answer_to(served, head)[:10] in (b"", b"HTTP/1.1 4"), head


@pytest.mark.parametrize(
    "body",
    [b"[" * 500_000, b'{"texts":' + b"[" * 900 + b"]" * 900 + b"}", b'{"a":' * 100_000, b"9" * 900_000, b'{"texts": [' + b'"", ' * 200_000 + b'""]}',
     b'{"model": 1e400, "texts": ["a"]}', b'{"texts": ["a"], "model": NaN}', b"\xff\xfe", b"", b"null"],
)  # fmt: skip
def test_deep_and_crooked_json_is_refused_in_one_line(served, body):
    assert served.refusal("POST", "/api/detect", body)[0] in (400, 413, 422)


def test_headers_that_are_sent_twice_and_packed_bodies_are_not_believed(served):
    def post(*lines: bytes, body: bytes = QUESTION) -> bytes:
        head = b"POST /api/detect HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + b"".join(
            b"%s\r\n" % it for it in lines
        )
        return answer_to(served, head + b"content-length: %d\r\n\r\n" % len(body) + body)[9:12]

    own, kind = b"origin: http://localhost", b"content-type: application/json"
    assert post(kind, own) == b"200"
    assert post(kind, b"origin: http://evil", own) == b"403"
    assert post(b"content-type: text/plain", kind) == b"415"
    bomb = gzip.compress(b"a" * (1 << 24))
    assert post(kind, b"content-encoding: gzip", body=bomb) == b"415"
    assert answer_to(served, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n")[9:12] == b"400"


def test_a_head_is_asked_for_without_its_body(served):
    for path in ("/", "/health", "/api/models", "/page/main.js"):
        status, headers, body = served.request("HEAD", path)
        assert status == 200 and body == b"" and int(headers["content-length"]) > 0


def test_no_request_is_the_work_of_thousands(served):
    items = [{"text": "the barak walks " * 30, "places": list(range(64))}] * 5
    assert served.refusal("POST", "/api/fill", {"items": items}) == (413, "320 places at once; at most 256 are filled.")


def test_a_thousand_connections_leave_room_for_nobody_and_then_for_all(served, monkeypatch, caplog):
    monkeypatch.setattr(guard, "HEAD_SECONDS", 2.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4000:
        pytest.skip(f"at most {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4000, hard))
    held: list[socket.socket] = []
    try:
        for _ in range(1000):
            held.append(served.socket())
        until(lambda: len(served.connections()) <= guard.MOST_CONNECTIONS)
        refused = 0
        for connection in held[-100:]:
            connection.settimeout(5)
            with contextlib.suppress(ConnectionError, TimeoutError):
                refused += connection.recv(12) == b"HTTP/1.1 503"
        assert refused > 50
    finally:
        for connection in held:
            connection.close()
        until(lambda: len(served.connections()) < 10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not caplog.records, "a flood would fill the terminal"


def test_clients_that_are_killed_in_the_middle_are_forgotten(served):
    def vanish(number: int) -> None:
        connection = served.socket()
        if number % 2:
            connection.sendall(b"GET /api/events?run=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.recv(100)
        else:
            connection.sendall(HEAD + f"content-length: {len(QUESTION)}\r\n\r\n".encode() + QUESTION)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset, no farewell
        connection.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(vanish, range(40)))
    until(lambda: served.desk.listeners == 0 and not served.desk.batcher.waiting, 30)


def test_listeners_are_counted_and_those_who_do_not_read_let_go(served, monkeypatch):
    from electra.inspector import app, watch

    monkeypatch.setattr(app, "MOST_LISTENERS", 2)
    monkeypatch.setattr(guard, "SEND_SECONDS", 1.0)
    monkeypatch.setattr(watch, "SECONDS_BETWEEN_READS", 0.01)
    monkeypatch.setattr(watch.News, "read", lambda self: [("records", "x" * 100_000)])
    deaf = []
    for _ in range(2):
        connection = served.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET /api/events?run=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        deaf.append(connection)
    until(lambda: served.desk.listeners == 2)
    status, headers, _ = served.request("GET", "/api/events?run=0")
    assert status == 503 and headers["retry-after"]
    until(lambda: served.desk.listeners == 0, 30)
    for connection in deaf:
        connection.close()
