"""What holds for every request, whatever it is for: ids, access, sizes, times, the access log.

The outermost layer of the application. All below may raise, and what it raises becomes a problem
here (:mod:`.problems`); all below may read a body, and gets no more than is allowed, in time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.server.access import Access
from tidemill.server.budget import SMALL, Budget, Share
from tidemill.server.logs import AccessLog
from tidemill.server.problems import Problem, not_allowed, problem_of
from tidemill.server.settings import Settings
from tidemill.server.tokens import Role, Token

__all__ = ["LINE", "Edge", "Exchange", "Line", "nothing_at", "require"]

log = logging.getLogger("tidemill.server")

PUBLIC = frozenset({"/", "/health", "/ready", "/v1/docs", "/v1/openapi.json"})
"""Paths that say nothing of the jobs, and are served without a token."""

LINE = "tidemill.line"
"""The extension of a request's scope that has its connection, as ``line``."""

_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,100}")
_HEADERS = frozenset(
    {
        *(b"host", b"origin", b"sec-fetch-site", b"authorization", b"x-request-id"),
        *(b"content-encoding", b"content-length", b"content-type", b"transfer-encoding"),
    }
)


class Line(Protocol):
    """The connection of a request: whether it is lost, and what to call when it is."""

    lost: bool

    def watch(self, when_lost: Callable[[], None] | None) -> None: ...

    def hang_up(self) -> None: ...


class Exchange:
    """One request on its way through: what is known of it, its body within bounds, its answer."""

    __slots__ = (
        *("content_type", "id", "name", "role", "scope", "settings", "share", "status", "token"),
        *("_given", "_receive", "_send", "_size", "started"),
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, settings: Settings, budget: Budget
    ) -> None:
        self.scope = scope
        self.settings = settings
        self.share = Share(budget)
        self._receive = receive
        self._send = send
        self.status = 0
        self.started = False
        self.name = ""
        self.role = Role.ADMIN
        self.token: Token | None = None
        self._size = 0
        self._given: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in _HEADERS:
                self._given[name] = value
        given = self._given.get(b"x-request-id", b"")
        self.id = given.decode() if _SANE_ID.fullmatch(given) else os.urandom(8).hex()
        self.content_type = self.header(b"content-type")

    def header(self, name: bytes) -> str:
        """A header of the request, empty when it has none."""
        return self._given.get(name, b"").decode("latin-1")

    @property
    def address(self) -> str:
        """Of the client."""
        client = self.scope.get("client")
        return client[0] if client else "-"

    def check_length(self) -> None:
        """Refuse a body that says it is too large before any of it is read."""
        length = self._given.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.settings.max_request:
            raise self._too_large()

    def check_coding(self) -> None:
        """Refuse a body that is compressed: it would be taken for something else."""
        coding = self.header(b"content-encoding")
        length = self.header(b"content-length").strip("0")
        if coding.lower() in ("", "identity") or not (length or self.header(b"transfer-encoding")):
            return
        raise Problem(
            "unsupported-media-type",
            f"send the body as it is, without Content-Encoding, not as {coding[:100]}",
            headers={"accept-encoding": "identity"},
        )

    def _too_large(self) -> Problem:
        return Problem(
            "too-large",
            f"the body has more than {self.settings.max_request:,} bytes, which is the most; "
            "send it in several requests, or start the server with a larger --max-request",
            headers={"connection": "close"},
        )

    async def receive(self) -> Message:
        """The next part of the body, within its size; or that the client is gone."""
        message = await self._receive()
        if message["type"] == "http.request":
            before = self._size
            self._size += len(message.get("body", b""))
            if self._size > self.settings.max_request:
                raise self._too_large()
            if self._size > SMALL:
                self._hold(self._size if before <= SMALL else self._size - before)
        return message

    def _hold(self, size: int) -> None:
        """Count a part of the body."""
        try:
            self.share.take(size)
        except Problem as problem:
            problem.headers["connection"] = "close"  # else the rest of the body had to be read
            raise

    async def body(self) -> bytes:
        """The whole body."""
        message = await self.receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            whole: bytes = message["body"]
            return whole
        parts: list[bytes] = []
        while message["type"] == "http.request":
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)
            message = await self.receive()
        raise Gone

    @property
    def line(self) -> Line:
        """The connection that it came by."""
        line: Line = self.scope["extensions"][LINE]["line"]
        return line

    async def gone(self) -> None:
        """Return when the client has gone away; only once the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: Message) -> None:
        """A part of the answer; a large one goes in pieces, each when the last was taken."""
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            headers = [(b"x-request-id", self.id.encode()), *message.get("headers", ())]
            message = {**message, "headers": headers}
        elif len(body := message.get("body", b"")) > SMALL:
            at = 0
            while len(body) - at > SMALL:
                piece = body[at : at + SMALL]
                await self._send({"type": message["type"], "body": piece, "more_body": True})
                await asyncio.sleep(0)  # the connection writes what it was given in this turn
                at += SMALL
            message = {**message, "body": body[at:]}
        await self._send(message)

    async def answer(
        self, status: int, body: bytes, media: bytes, headers: dict[str, str] | None = None
    ) -> None:
        """A whole answer."""
        self.started = True
        self.status = status
        given = [
            (b"content-type", media),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.id.encode()),
        ]
        if headers:
            given += [(k.encode(), v.encode("latin-1", "replace")) for k, v in headers.items()]
        if status == 204:
            del given[:2]
        await self._send({"type": "http.response.start", "status": status, "headers": given})
        if len(body) > SMALL:
            self.share.at_least(len(body))
            await self.send({"type": "http.response.body", "body": body})
            return
        await self._send({"type": "http.response.body", "body": body})


class Gone(Exception):
    """The client went away before it had sent all of its request: there is nobody to answer."""


def require(scope: Scope, role: Role, *, whole: bool = True) -> Exchange:
    """The exchange of a request, if its token has the role; for routes of all kinds.

    With ``whole`` a token for some queues is refused: the route concerns all of the store.

    Raises:
        Problem: it has not.
    """
    exchange: Exchange = scope["tidemill.exchange"]
    if exchange.role < role:
        who = f"the token {exchange.name!r}" if exchange.name else "a certificate without a token"
        raise Problem(
            "forbidden",
            f"this needs the role {role.name.lower()}; {who} has {exchange.role.name.lower()}",
        )
    if whole and exchange.token is not None and exchange.token.queues:
        raise Problem(
            "forbidden",
            f"the token {exchange.name!r} is for some queues, and this concerns all of the store; "
            "use a token without --queue",
        )
    return exchange


class Edge:
    """The application within its bounds."""

    def __init__(self, app: ASGIApp, settings: Settings, log: AccessLog | None = None) -> None:
        self.app = app
        self.settings = settings
        self.access = Access(settings)
        self.budget = Budget(settings.max_memory)
        self.log = log
        self._of_tokens: set[Exchange] = set()  # those under way that a token let in

    def sweep(self) -> None:
        """End the polls and streams of tokens that were revoked or have expired."""
        tokens = self.access.tokens
        if tokens is None:
            return
        tokens.refresh()
        for exchange in list(self._of_tokens):
            if exchange.token is not None and not tokens.is_good(exchange.token):
                exchange.line.hang_up()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        exchange = Exchange(scope, receive, send, self.settings, self.budget)
        scope["tidemill.exchange"] = exchange
        scope["app"] = self  # has Starlette raise what it refuses, for us to word
        try:
            try:
                self._let_in(exchange, scope)
            except Problem as problem:
                if problem.kind != "too-many-requests":  # what is refused counts, too
                    self.access.check_rate(exchange.name or exchange.address)
                raise
            await self.app(scope, exchange.receive, exchange.send)
        except Gone:
            exchange.status = 499
        except Exception as error:
            await self._fail(exchange, error)
        finally:
            exchange.share.free()
            if exchange.token is not None:
                self._of_tokens.discard(exchange)
            if self.log is not None:
                self.log.add(exchange, time.perf_counter() - began)

    def _let_in(self, exchange: Exchange, scope: Scope) -> None:
        exchange.check_length()
        exchange.check_coding()
        self.access.check_origin(
            scope["method"],
            exchange.header(b"host"),
            exchange.header(b"origin"),
            exchange.header(b"sec-fetch-site"),
        )
        if scope["path"] in PUBLIC:
            return
        client = self.access.identify(exchange.header(b"authorization"))
        exchange.name, exchange.role, exchange.token = client
        if client.token is not None:
            self._of_tokens.add(exchange)
        self.access.check_rate(exchange.name or exchange.address)

    async def _fail(self, exchange: Exchange, error: Exception) -> None:
        if isinstance(error, HTTPException):
            problem = _refused(exchange, error)
        else:
            problem = problem_of(error)
        if problem is None:
            log.error("request %s failed", exchange.id, exc_info=error)
            problem = Problem("error", "this is a mistake of ours; the log has it by the id")
        if exchange.started:  # too late to say it: the client sees an answer that ends early
            raise error
        await exchange.answer(
            problem.status, problem.body(exchange.id), b"application/problem+json", problem.headers
        )


def nothing_at(path: str) -> Problem:
    """There is nothing at a path."""
    return Problem("not-found", f"nothing is served at {path[:200]!r}; see /v1/docs")


def _refused(exchange: Exchange, error: HTTPException) -> Problem | None:
    """What Starlette's own routes refuse."""
    if error.status_code == 405:
        return not_allowed(dict(error.headers or {}).get("Allow", "").split(", "))
    if error.status_code == 404:
        return nothing_at(exchange.scope["path"])
    return Problem("invalid-request", error.detail) if error.status_code < 500 else None
