"""The checks between the network and the application: who may ask, how much, how long. Requests are refused with one line of JSON
before anything is parsed.

A page of another site cannot use its visitor's server: requests for other host names than ours are refused (DNS rebinding), and so
are posts that are not JSON or come from another origin. On any address but this machine's own, a token is needed.
"""

import asyncio
import hmac
import ipaddress
import json
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from uvicorn.protocols.http.h11_impl import H11Protocol

from electra.base.errors import SettingsError

Message = dict[str, Any]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Coroutine[None, None, None]]

MOST_BODY = 1 << 20
MOST_HEAD = 1 << 14
MOST_CONNECTIONS = 256
HEAD_SECONDS, BODY_SECONDS, SEND_SECONDS = 10.0, 15.0, 30.0
SHORTEST_TOKEN = 16
COOKIE = "electra_token"
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
NO_ROOM = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host name in digits means; None for other names."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_local(host: str) -> bool:
    address = address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def token_for(host: str, token: str | None) -> str:
    """The token that requests must have; "" if only this machine can ask and none was given."""
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise SettingsError(f"a token needs at least {SHORTEST_TOKEN} characters, so nobody guesses it.", ("token",))
    if token is not None and not (token.isascii() and token.isprintable() and not set(token) & set(' ;,"\\')):
        raise SettingsError("a token must be ASCII, without spaces, quotes, commas or semicolons.", ("token",))
    return token or ("" if is_local(host) else secrets.token_urlsafe(24))


@dataclass(frozen=True)
class Guard:
    """The ASGI application behind all checks."""

    application: Application
    host: str
    token: str = ""
    origin: str = ""
    """Another site whose pages may ask; "" means none."""
    counted: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How many answers there were, by route and status."""

    @cached_property
    def names(self) -> set[str]:
        """The host names that a request may be for."""
        own = [] if is_local(self.host) else [socket.gethostname(), socket.getfqdn()]
        return {*LOCAL_NAMES, *map(str.lower, [self.host, *own])}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.application(scope, receive, send)
        elif scope["type"] == "http":
            status = [0]
            try:
                await self.answer(scope, receive, armoured(send, self.cors(headers_of(scope)), status))
            finally:
                self.counted[getattr(scope.get("route"), "path", "other"), status[0]] += 1

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, method = headers_of(scope), scope["method"]
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEAD:
            await refuse(send, 431, f"request headers may have at most {MOST_HEAD:,} bytes.")
        elif not self.is_name(headers.get("host", "")):
            await refuse(send, 421, "that is not this server's host name. Use the address that it printed.")
        elif method == "OPTIONS" and self.origin and headers.get("origin") == self.origin:
            await respond(send, 204, b"")
        elif method not in ("GET", "HEAD", "POST"):
            await refuse(send, 405, f"{method[:20]} is not allowed. Use GET or POST.")
        elif not self.is_known(scope, headers):
            await refuse(send, 401, "a token is needed: open the address that the server printed.")
        elif method == "GET" and self.token and scope["path"] == "/" and scope["query_string"]:
            await self.keep_token(send)
        elif method != "POST":  # the HTTP server drops the body of an answer to HEAD
            await self.application(scope if method == "GET" else scope | {"method": "GET"}, receive, send)
        elif not self.is_own_page(headers):
            await refuse(send, 403, "the request comes from a page of another site.")
        elif headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            await refuse(send, 415, "send JSON, with content-type: application/json.")
        elif "content-encoding" in headers:
            await refuse(send, 415, "send the JSON as it is, not compressed.")
        else:
            body = await read_body(headers, receive, send)
            if body is not None:
                await unless_gone(self.application(scope, replayed(body), send), receive)

    def is_name(self, host: str) -> bool:
        """Whether a request may name this host. If the server listens on all addresses, any IP address too: DNS cannot rebind it."""
        name = name_of(host)
        return name in self.names or (self.host in ("0.0.0.0", "::") and address_of(name) is not None)

    def is_known(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        """Whether a request has the token: in a header, in the cookie that the first visit set, or in the link that was printed."""
        if not self.token or scope["path"] == "/health":
            return True
        tokens = [headers.get("authorization", "").removeprefix("Bearer ")]
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
            tokens += [cookies[COOKIE].value] if COOKIE in cookies else []
        except CookieError:
            pass
        if scope["path"] == "/":
            tokens += parse_qs(scope["query_string"].decode("latin-1")).get("token", [])[:1]
        return any(hmac.compare_digest(it.encode(), self.token.encode()) for it in tokens)

    async def keep_token(self, send: Send) -> None:
        """Moves the token from the address bar into a cookie that is sent to this server only."""
        cookie = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
        await respond(send, 303, b"", {"location": "/", "set-cookie": cookie})

    def is_own_page(self, headers: Mapping[str, str]) -> bool:
        """Whether a request comes from our page or from a program, which sends no origin."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        return origin == self.origin or urlsplit(origin).netloc == headers.get("host", "")

    def cors(self, headers: Mapping[str, str]) -> dict[str, str]:
        if not self.origin or headers.get("origin") != self.origin:
            return {}
        return {
            "access-control-allow-origin": self.origin,
            "access-control-allow-headers": "authorization, content-type",
            "access-control-allow-methods": "GET, POST",
            "cross-origin-resource-policy": "cross-origin",
            "vary": "origin",
        }


def headers_of(scope: Scope) -> dict[str, str]:
    """The headers of a request. One that is sent twice becomes a list, as in HTTP, so that of two origins none counts as our own."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def name_of(host: str) -> str:
    """The host without its port; [::1] also without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


async def read_body(headers: Mapping[str, str], receive: Receive, send: Send) -> bytes | None:
    """The whole body, or None if it was refused for its size or time, or the client has disconnected."""
    length = headers.get("content-length", "0")
    is_small = not length.isdigit() or int(length[:20]) <= MOST_BODY
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while is_small and more and len(body) <= MOST_BODY:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        await refuse(send, 408, f"the body did not arrive within {BODY_SECONDS:.0f} s.")
        return None
    if more or len(body) > MOST_BODY:
        await refuse(send, 413, f"a request body may have at most {MOST_BODY:,} bytes. Send less text at once.")
        return None
    return bytes(body)


def replayed(body: bytes) -> Receive:
    async def again() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def unless_gone(answer: Coroutine[None, None, None], receive: Receive) -> None:
    """Cancels the answer if the client disconnects."""
    work, gone = asyncio.create_task(answer), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
        with suppress(asyncio.CancelledError):
            await work
    finally:
        work.cancel()
        gone.cancel()


def armoured(send: Send, more: Mapping[str, str], status: list[int]) -> Send:
    """Adds the security headers to every answer, and stores its status code in `status`."""
    extra = [(name.encode(), value.encode()) for name, value in {**HEADERS, **more}.items()]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message.get("headers", [])}
            added = [pair for pair in extra if pair[0] not in own]
            message = {**message, "headers": [*message.get("headers", []), *added]}
            status[0] = message["status"]
        await send(message)

    return sending


async def respond(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    pairs = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.encode(), value.encode()) for name, value in pairs.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, status: int, reason: str) -> None:
    await respond(send, status, json.dumps({"error": reason}).encode(), {"connection": "close"})


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 with a limit on connections, on the time for a whole head (sent byte by byte it would never time out), and on the time
    for which a client may leave its answer unread."""

    deadline: asyncio.TimerHandle | None = None
    stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= MOST_CONNECTIONS:
            self.transport = transport  # which connection_lost closes
            transport.write(NO_ROOM)
            transport.close()
            return
        super().connection_made(transport)
        self.expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.forget_deadline()
        self.forget_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.forget_stall()
        self.stalled = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self.forget_stall()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.forget_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self.expect_head()

    def expect_head(self) -> None:
        self.forget_deadline()
        self.deadline = self.loop.call_later(HEAD_SECONDS, self.give_up)

    def forget_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def forget_stall(self) -> None:
        if self.stalled is not None:
            self.stalled.cancel()
            self.stalled = None

    def give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def listen(host: str, port: int) -> socket.socket:
    """Binds the socket now, so that the port is taken before the address is printed."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((host, port))
        own.listen(1024)  # clients that come before the server runs wait for it
    except BaseException:
        own.close()
        raise
    return own
