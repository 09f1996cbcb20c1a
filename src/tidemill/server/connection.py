"""What holds for every connection: how many there are, how slow each may be, how it ends.

uvicorn's own protocol has no bound on how long, or how long a time, a request may take to come,
and answers everybody with 503 once there are too many connections. Here those that are too many
are closed, the others are served, and one look a second at those that keep us waiting closes those
that are late: a timer for each step of each request would cost more than the rest of it, and a look
at all connections more than thousands of long polls.

While a request is behind another nothing is read, and who reads nothing does not hear that the
client leaves. Behind a long poll we read on, and keep what comes.

Who is answered while it still sends, as with 413, is heard out for a moment (RFC 9112, 9.6): to
close on what was not read is to reset the connection, and the answer may be lost with it.
"""

from __future__ import annotations

import asyncio
import http
import os
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tidemill.server.edge import LINE
from tidemill.server.problems import Problem
from tidemill.server.settings import Settings

__all__ = ["Connection", "connection_class", "sweep"]

MAX_HEAD = 64 * 1024
"""Bytes the head of a request may have, with its path."""

MAX_BEHIND = 64 * 1024
"""Bytes that are kept of what comes behind a long poll and the request after it; about so many."""

REST, REST_TIME = 64 << 20, 5.0
"""Bytes, and seconds about, for which a client that has been answered may go on sending."""

_TOO_MANY = Problem(
    "too-many-connections", "too many connections are open; close some, or come again later"
)
_TOO_LONG = Problem(
    "head-too-large", f"the head of the request has more than {MAX_HEAD:,} bytes, which is the most"
)
_TOO_SLOW = Problem("timeout", "the request did not come in time; send it again")
_NO_METHOD = Problem(
    "unknown-method",
    "the server knows no such method; what there is takes GET, POST, PUT, PATCH and DELETE",
)


class Gathering:
    """A transport that sends what is written in one turn of the loop at once.

    The head and the body of an answer are written one after the other, and each write that goes out
    by itself is a system call in which nothing else runs here: for a small answer most of its cost.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        hears_out: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._hears_out = hears_out
        self._parts: list[bytes] = []
        self._over = False
        self.abort = transport.abort
        self.get_extra_info = transport.get_extra_info
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def is_closing(self) -> bool:
        """True when nothing more is to be said."""
        return self._over or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send it with all else that is written now."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """Send what was written, and close; the second time at once, whoever is heard out."""
        answers = bool(self._parts) and not self.is_closing()
        self._flush()
        self._over = True
        if not (answers and self._hears_out()):
            self._transport.close()
            return
        if self._transport.can_write_eof():  # not with TLS
            self._transport.write_eof()
        self._transport.resume_reading()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))


class Connection(HttpToolsProtocol):
    """One connection. Each ``since`` is when it began to wait for something of its client, or 0."""

    most = 10_000
    waiting: ClassVar[set[Connection]] = set()  # at least those that wait for something
    head_since = 0.0
    body_since = 0.0
    full_since = 0.0
    rest_since = 0.0  # that it has been answered, and heard out
    rest = 0
    in_head = False
    head_bytes = 0
    lost = False
    served: RequestResponseCycle | None = None  # ``cycle`` may be that of one behind it
    when_lost: Callable[[], None] | None = None
    behind = b""  # what came meanwhile

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        gathering: Any = Gathering(transport, self.loop, self._hears_out)
        super().connection_made(gathering)
        self.head_since = time.monotonic()
        self.waiting.add(self)
        if len(self.connections) > self.most:
            self._refuse(_TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.discard(self)
        self.lost = True
        self.behind = b""
        if self.served is not None:
            self.served.disconnected = not self.served.response_complete
            self.served.message_event.set()
        super().connection_lost(exc)
        if self.when_lost is not None:
            self.when_lost()

    def watch(self, when_lost: Callable[[], None] | None) -> None:
        """Call this when the client leaves, from now on; or nothing any more."""
        self.when_lost = when_lost
        self._read_on()

    def _read_on(self) -> None:
        if self.when_lost is not None and len(self.behind) <= MAX_BEHIND:
            self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self.rest += len(data)
            if self.rest > REST:
                self.transport.close()
            return
        if self.behind or (self.when_lost is not None and self.pipeline):
            self.behind += data
            if len(self.behind) > MAX_BEHIND:
                self.flow.pause_reading()
            return
        idle = self.cycle is None or self.cycle.response_complete
        if not self.head_since and idle:
            self.head_since = time.monotonic()
        if idle or self.in_head:  # which may be that of a request behind another
            self.head_bytes += len(data)
        super().data_received(data)
        if self.in_head and self.head_bytes > MAX_HEAD and not self.transport.is_closing():
            self._refuse(_TOO_LONG)
        if self.head_since or self.body_since:  # not all of the request was there
            self.waiting.add(self)
        self._read_on()

    def on_message_begin(self) -> None:
        self.in_head = True
        super().on_message_begin()
        self.scope["extensions"] = {LINE: {"line": self}}

    def on_headers_complete(self) -> None:
        self.in_head = False
        self.head_bytes = 0
        super().on_headers_complete()
        self.head_since = 0.0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.more_body:
            self.body_since = self.head_since
            if not self.head_since:  # it came behind another, and since then we read nothing
                self.body_since = time.monotonic()
                self.waiting.add(self)
        self.served = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.behind:
            behind, self.behind = self.behind, b""
            self.data_received(behind)

    def on_message_complete(self) -> None:
        self.body_since = 0.0
        super().on_message_complete()

    def pause_writing(self) -> None:
        self.full_since = time.monotonic()
        self.waiting.add(self)
        super().pause_writing()

    def resume_writing(self) -> None:
        self.full_since = 0.0
        super().resume_writing()

    def close_late(self, now: float, head: float, body: float) -> None:
        """End the connection if what it waits for did not come, or was not taken, for so long."""
        if not (self.head_since or self.body_since or self.full_since or self.rest_since):
            self.waiting.discard(self)
        elif 0 < self.full_since < now - body:
            self.transport.abort()  # it takes nothing: there is no telling it
        elif self.rest_since:
            if self.rest_since < now - min(body, REST_TIME):
                self.transport.close()
        elif 0 < self.head_since < now - head or 0 < self.body_since < now - body:
            self.body_since = 0.0  # it sends nothing: there is nothing to hear out
            self._refuse(None if self.cycle and self.cycle.response_started else _TOO_SLOW)

    def send_400_response(self, msg: str) -> None:
        """What came is no request: uvicorn says so while it handles what the parser raised."""
        error, begun = sys.exception(), self.served
        if begun is not None and begun.response_started and not begun.response_complete:
            self._refuse(None)  # what is said now would be taken for a part of that answer
            return
        if isinstance(error, httptools.HttpParserInvalidMethodError):
            self._refuse(_NO_METHOD)
            return
        of_ours = isinstance(error, httptools.HttpParserCallbackError)
        why = "its path cannot be read" if of_ours else str(error)
        self._refuse(Problem("invalid-request", f"this is no request of HTTP/1.1: {why}"))

    def _refuse(self, problem: Problem | None) -> None:
        if problem is not None:
            self.transport.write(_answer(problem))
        self.transport.close()

    def _hears_out(self) -> bool:
        """Whether its client is still sending a body when it is closed; it may for a moment."""
        if not self.body_since:
            return False
        self.rest_since = time.monotonic()
        self.waiting.add(self)
        return True


def _answer(problem: Problem) -> bytes:
    """The whole answer of a problem that ends its connection."""
    request_id = os.urandom(8).hex()
    body = problem.body(request_id)
    head = (
        f"HTTP/1.1 {problem.status} {http.HTTPStatus(problem.status).phrase}\r\n"
        f"content-type: application/problem+json\r\ncontent-length: {len(body)}\r\n"
        f"x-request-id: {request_id}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def connection_class(settings: Settings) -> type[Connection]:
    """The class of a server's connections."""
    return type("Connection", (Connection,), {"most": settings.max_connections, "waiting": set()})


def sweep(connections: type[Connection], settings: Settings) -> None:
    """Close the connections of a server that are late."""
    now = time.monotonic()
    for connection in list(connections.waiting):
        connection.close_late(now, settings.header_timeout, settings.body_timeout)
