"""A real server on loopback, in a thread of the test, and clients for it that need no library."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = "<script>window.pwned = 1</script>"


@dataclass(frozen=True)
class Served:
    port: int
    url: str
    running: Any

    @property
    def desk(self) -> Any:
        return self.running.desk

    def connections(self) -> Any:
        return self.running.server.server_state.connections

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        if data is not None and "content-type" not in sent:
            sent["content-type"] = "application/json"
        try:
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            return response.status, {key.lower(): value for key, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Any:
        status, _, body = self.request("GET", path, **headers)
        assert status == 200, body
        return json.loads(body)

    def ask(self, path: str, **question: Any) -> Any:
        status, _, body = self.request("POST", path, question)
        assert status == 200, body
        return json.loads(body)["answers"]

    def refusal(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """Status and reason, which is one line of JSON."""
        status, _, data = self.request(method, path, body, **headers)
        reason = json.loads(data)["error"]
        assert status >= 400 and reason and "\n" not in reason and len(reason) < 500
        return status, reason

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextmanager
def serving(paths: Sequence[Path], **address: Any) -> Iterator[Served]:
    from electra.inspector.app import Address, build_server

    running = build_server(paths, Address(**{"port": 0, **address}))
    thread = threading.Thread(target=running.server.run, kwargs={"sockets": [running.socket]}, daemon=True)
    thread.start()
    try:
        until(lambda: running.server.started)
        yield Served(running.socket.getsockname()[1], running.url, running)
    finally:
        running.server.should_exit = True
        thread.join(20)
        running.socket.close()
        assert not thread.is_alive(), "the server does not stop"


def until(condition: Any, seconds: float = 20) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value
