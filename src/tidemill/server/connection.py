"""Bounds of every connection: how many there are, how slow each may be, how much each may hold.

uvicorn parses all bytes that arrive, so a client could have thousands of requests parsed that no
handler has looked at. Here a connection feeds the parser one request at a time: the whole head,
then the body. The next request stays as bytes until the answer before has been sent.

While a request is served, nothing more is read, except behind a long poll: a connection that does
not read does not hear that its client has left. The bytes read then are kept, up to a bound.

A look once a second closes the connections that are late. A timer for each step of each request
would cost more than the request.

A client that is answered while it still sends, as with 413, may go on for a moment (RFC 9112,
9.6). Closing on unread bytes resets the connection, and the answer may be lost with it.
"""

from __future__ import annotations

import asyncio
import http
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidemill.server.edge import LINE
from tidemill.server.problems import Problem
from tidemill.server.settings import Settings
from tidemill.server.unparsed import Unparsed

__all__ = ["Connection", "connection_class", "sweep"]

MAX_HEAD = 64 * 1024
"""Bytes the head of a request may have, with its path."""

MAX_BEHIND = 64 * 1024
"""Bytes, about, that are kept of the requests behind the one that is served."""

CHUNKED_SLICE = 1024
"""Bytes of a chunked body that are parsed at a time: a few requests at most can hide behind it."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_UPGRADE = re.compile(rb"(?<=\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
_HIDDEN = b"x-offer"
"""Takes the place of Upgrade. The parser ends such a request at its head: its body is lost."""

REST, REST_TIME = 64 << 20, 5.0
"""Bytes, and seconds about, for which a client that has been answered may go on sending."""

_TOO_MANY = Problem(
    "too-many-connections", "too many connections are open; close some, or come again later"
)
_TOO_LONG = Problem(
    "head-too-large", f"the head of the request has more than {MAX_HEAD:,} bytes, which is the most"
)
_TOO_MUCH = Problem(
    "busy", "the connections of this address hold too much that is not served yet; use fewer"
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
            self._loop.call_soon(self.flush)
        self._parts.append(data)

    def close(self) -> None:
        """Send what was written, and close; the second time at once, whoever is heard out."""
        answers = bool(self._parts) and not self.is_closing()
        self.flush()
        self._over = True
        if not (answers and self._hears_out()):
            self._transport.close()
            return
        if self._transport.can_write_eof():  # not with TLS
            self._transport.write_eof()
        self._transport.resume_reading()

    def flush(self) -> None:
        """Send what was written."""
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))


class Connection(HttpToolsProtocol):
    """One connection. Each ``since`` is when it began to wait for something of its client, or 0."""

    most = 10_000
    unparsed: ClassVar[Unparsed] = Unparsed()
    counted = 0  # bytes of what is behind, as ``unparsed`` has them
    waiting: ClassVar[set[Connection]] = set()  # at least those that wait for something
    head_since = 0.0
    body_since = 0.0
    full_since = 0.0
    rest_since = 0.0  # that it has been answered, and heard out
    rest = 0
    body_left = 0  # bytes of the body to come; -1 for a chunked body
    lost = False
    when_lost: Callable[[], None] | None = None

    # asyncio gives a protocol of streams this kind of transport.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.answers = Gathering(transport, self.loop, self._hears_out)
        gathering: Any = self.answers
        super().connection_made(gathering)
        self.behind = bytearray()  # received and not parsed
        self.searched = 0  # bytes of them in which no head ends
        self.head_since = time.monotonic()
        self.waiting.add(self)
        if len(self.connections) > self.most:
            self._refuse(_TOO_MANY)

    def eof_received(self) -> None:
        """The client says nothing more: asyncio closes the connection now, and writes no more."""
        self.answers.flush()
        self.lost = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.discard(self)
        self.lost = True
        self.behind.clear()
        self._count_behind()
        super().connection_lost(exc)
        if self.when_lost is not None:
            self.when_lost()

    def watch(self, when_lost: Callable[[], None] | None) -> None:
        """Call this when the client leaves, from now on; None ends the watch."""
        self.when_lost = when_lost
        if when_lost is not None and len(self.behind) <= MAX_BEHIND:
            self.flow.resume_reading()

    def hang_up(self) -> None:
        """End the connection, whatever is being answered."""
        self.transport.close()

    # -- reading --------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        """True while a whole request is served, so that the next has to wait."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not self.body_left

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self.rest += len(data)
            if self.rest > REST:
                self.transport.close()
            return
        self.behind += data
        self._go_on()

    def _go_on(self) -> None:
        """Parse what may be parsed; bound what has to wait."""
        self._parse()
        if self._is_busy and self.behind and not self.transport.is_closing():
            self._bound_behind()
        if len(self.behind) != self.counted:
            self._count_behind()
        if self.head_since or self.body_since:
            self.waiting.add(self)

    def _count_behind(self) -> None:
        """Close the connection when those of its address, or all, hold too much."""
        by = len(self.behind) - self.counted
        self.counted += by
        address = self.client[0] if self.client else ""
        if not self.unparsed.change(address, by) and not self.transport.is_closing():
            self.behind.clear()
            self._count_behind()
            self._refuse(None if self._is_busy else _TOO_MUCH)

    def _bound_behind(self) -> None:
        """Stop reading while enough is kept; refuse a head that is too long."""
        if len(self.behind) > MAX_HEAD and not _END_OF_HEAD.search(self.behind):
            self._refuse(_TOO_LONG)
        elif self.when_lost is None or len(self.behind) > MAX_BEHIND:
            self.flow.pause_reading()

    def _parse(self) -> None:
        """Feed the parser the rest of a body, or one head, as long as nothing is served."""
        while self.behind and not self._is_busy and not self.transport.is_closing():
            part = self._part_of_body() if self.body_left else self._head()
            if not part:
                return
            super().data_received(part)

    def _part_of_body(self) -> bytes:
        size = self.body_left if self.body_left > 0 else CHUNKED_SLICE
        part = bytes(self.behind[:size])
        del self.behind[: len(part)]
        if self.body_left > 0:
            self.body_left -= len(part)
        return part

    def _head(self) -> bytes:
        """The next head, whole; empty when it has not all arrived, or is refused."""
        behind = self.behind
        if not self.searched and behind[0] in b"\r\n":
            del behind[: len(behind) - len(behind.lstrip(b"\r\n"))]
            if not behind:
                return b""
        if not self.head_since:
            self.head_since = time.monotonic()
            self._unset_keepalive_if_required()
        found = _END_OF_HEAD.search(behind, max(0, self.searched - 2))
        self.searched = len(behind)
        if (found.end() if found else len(behind)) > MAX_HEAD:
            self._refuse(_TOO_LONG)
            return b""
        if found is None:
            return b""
        head = bytes(behind[: found.end()])
        del behind[: found.end()]
        self.searched = 0
        if head.startswith(b"CONNECT "):
            self._refuse(_NO_METHOD)
            return b""
        return _UPGRADE.sub(_HIDDEN, head)

    # -- told by the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {LINE: {"line": self}}

    def on_headers_complete(self) -> None:
        self.head_since = 0.0
        self.body_left = _body_length(self.headers)
        if self.body_left:
            self.body_since = time.monotonic()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.body_left = 0
        self.body_since = 0.0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.behind:
            self._go_on()

    # -- late and wrong -------------------------------------------------------------------------

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
        """The bytes are no request: uvicorn calls this while it handles the parser's error."""
        error, begun = sys.exception(), self.cycle
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


def _body_length(headers: list[tuple[bytes, bytes]]) -> int:
    """Bytes of the body behind a head; -1 for a chunked body. The parser judges what is valid."""
    length = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return -1
        if name == b"content-length" and value.isdigit():
            length = int(value)
    return length


def connection_class(settings: Settings) -> type[Connection]:
    """The class of a server's connections."""
    own = {"most": settings.max_connections, "waiting": set(), "unparsed": Unparsed()}
    return type("Connection", (Connection,), own)


def sweep(connections: type[Connection], settings: Settings) -> None:
    """Close the connections of a server that are late."""
    now = time.monotonic()
    for connection in list(connections.waiting):
        connection.close_late(now, settings.header_timeout, settings.body_timeout)
