"""Connections of HTTP clients, with bounds of their number, their memory and their delays.

uvicorn parses all bytes that arrive. So a client could have thousands of requests parsed before a
handler gets the first. Here a connection feeds the parser one request at a time: the whole head,
then the body. Later requests stay unparsed until the answer before them has been sent.

The connection reads nothing while a request is served. A long poll is the exception: only a
connection that reads notices that its client has left. Bytes that arrive during a long poll are
kept, up to a bound.

A sweep once a second closes connections that are late. A timer for each step of each request would
cost more than the request.

A client may get its answer, such as a 413, while it still sends. It may then send a little longer
(RFC 9112, 9.6). Closing a connection with unread bytes resets it, and the answer may be lost.
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

from tidemill.server.http.exchange import CONNECTION
from tidemill.server.http.problems import Problem
from tidemill.server.http.unparsed_bytes import UnparsedBytes
from tidemill.server.settings import Settings

MAX_HEAD = 64 * 1024
"""Bytes that the head of a request may have, path included."""

MAX_UNPARSED = 64 * 1024
"""Approximate bytes of later requests that are kept while a request is served."""

CHUNKED_SLICE = 1024
"""Bytes of a chunked body that are parsed at a time. A later request may follow in these bytes."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_UPGRADE = re.compile(rb"(?<=\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
_HIDDEN = b"x-offer"
"""Replaces the header name Upgrade: the parser would drop the body of a request with Upgrade."""

MAX_DRAINED, DRAIN_TIME = 64 << 20, 5.0
"""Bytes and approximate seconds that a client may still send after its answer."""

_TOO_MANY = Problem(
    "too-many-connections", "too many connections are open; close some, or try again later"
)
_TOO_LONG = Problem(
    "head-too-large", f"the head of the request has more than {MAX_HEAD:,} bytes, the maximum"
)
_TOO_MUCH = Problem(
    "busy", "the connections of this address have sent too many requests ahead; send fewer"
)
_TOO_SLOW = Problem("timeout", "the request did not come in time; send it again")
_NO_METHOD = Problem(
    "unknown-method",
    "the server does not know this method; it knows GET, HEAD, POST, PUT, PATCH and DELETE",
)


class BufferedTransport:
    """A transport that sends all writes of one turn of the event loop together.

    The head and the body of an answer are written one after the other. Each write is a system call,
    which is most of the cost of a small answer.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        may_drain: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._may_drain = may_drain
        self._parts: list[bytes] = []
        self._over = False
        self.abort = transport.abort
        self.get_extra_info = transport.get_extra_info
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def is_closing(self) -> bool:
        """True when nothing more can be sent."""
        return self._over or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send these bytes together with other writes of this turn."""
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)

    def close(self) -> None:
        """Send the buffer and close. A client that still sends a body may send a little longer."""
        answers = bool(self._parts) and not self.is_closing()
        self.flush()
        self._over = True
        if not (answers and self._may_drain()):
            self._transport.close()
            return
        if self._transport.can_write_eof():  # False for TLS
            self._transport.write_eof()
        self._transport.resume_reading()

    def flush(self) -> None:
        """Send the buffer."""
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))


class Connection(HttpToolsProtocol):
    """One connection. Each ``…_since`` is the start of a wait for the client; 0 without a wait."""

    most = 10_000
    unparsed_bytes: ClassVar[UnparsedBytes] = UnparsedBytes()
    counted_bytes = 0  # bytes of ``unparsed_data`` that ``unparsed_bytes`` counts
    waiting: ClassVar[set[Connection]] = set()  # has all connections that wait for a client
    head_since = 0.0
    body_since = 0.0
    blocked_since = 0.0
    drain_since = 0.0  # the answer is sent; the rest of the request is read and dropped
    drained = 0
    body_left = 0  # bytes of the body to come; -1 for a chunked body
    lost = False
    when_lost: Callable[[], None] | None = None

    # asyncio passes this kind of transport to a stream protocol.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.answers = BufferedTransport(transport, self.loop, self._may_drain)
        buffered: Any = self.answers
        super().connection_made(buffered)
        self.unparsed_data = bytearray()  # received and not parsed
        self.searched = 0  # bytes at the start of ``unparsed_data`` in which no head ends
        self.head_since = time.monotonic()
        self.waiting.add(self)
        if len(self.connections) > self.most:
            self._refuse(_TOO_MANY)

    def eof_received(self) -> None:
        """The client has closed its side: asyncio now closes the connection."""
        self.answers.flush()
        self.lost = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.discard(self)
        self.lost = True
        self.unparsed_data.clear()
        self._count_unparsed()
        super().connection_lost(exc)
        if self.when_lost is not None:
            self.when_lost()

    def watch(self, when_lost: Callable[[], None] | None) -> None:
        """Call this function when the client leaves; None ends the watch."""
        self.when_lost = when_lost
        if when_lost is not None and len(self.unparsed_data) <= MAX_UNPARSED:
            self.flow.resume_reading()

    def hang_up(self) -> None:
        """Close the connection, also in the middle of an answer."""
        self.transport.close()

    # -- reading ------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        """True while a complete request is served, so that the next request has to wait."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not self.body_left

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self.drained += len(data)
            if self.drained > MAX_DRAINED:
                self.transport.close()
            return
        self.unparsed_data += data
        self._parse_more()

    def _parse_more(self) -> None:
        """Parse as much as possible, and bound the rest."""
        self._parse()
        if self._is_busy and self.unparsed_data and not self.transport.is_closing():
            self._bound_unparsed()
        if len(self.unparsed_data) != self.counted_bytes:
            self._count_unparsed()
        if self.head_since or self.body_since:
            self.waiting.add(self)

    def _count_unparsed(self) -> None:
        """Count the unparsed bytes; close the connection when there are too many."""
        by = len(self.unparsed_data) - self.counted_bytes
        self.counted_bytes += by
        address = self.client[0] if self.client else ""
        if not self.unparsed_bytes.change(address, by) and not self.transport.is_closing():
            self.unparsed_data.clear()
            self._count_unparsed()
            self._refuse(None if self._is_busy else _TOO_MUCH)

    def _bound_unparsed(self) -> None:
        """Stop reading when enough is kept; refuse a head that is too long."""
        if len(self.unparsed_data) > MAX_HEAD and not _END_OF_HEAD.search(self.unparsed_data):
            self._refuse(_TOO_LONG)
        elif self.when_lost is None or len(self.unparsed_data) > MAX_UNPARSED:
            self.flow.pause_reading()

    def _parse(self) -> None:
        """Feed the parser the rest of a body or one head, while no request is served."""
        while self.unparsed_data and not self._is_busy and not self.transport.is_closing():
            part = self._part_of_body() if self.body_left else self._head()
            if not part:
                return
            super().data_received(part)

    def _part_of_body(self) -> bytes:
        size = self.body_left if self.body_left > 0 else CHUNKED_SLICE
        part = bytes(self.unparsed_data[:size])
        del self.unparsed_data[: len(part)]
        if self.body_left > 0:
            self.body_left -= len(part)
        return part

    def _head(self) -> bytes:
        """The next complete head; empty when it is incomplete or refused."""
        unparsed_data = self.unparsed_data
        if not self.searched and unparsed_data[0] in b"\r\n":
            del unparsed_data[: len(unparsed_data) - len(unparsed_data.lstrip(b"\r\n"))]
            if not unparsed_data:
                return b""
        if not self.head_since:
            self.head_since = time.monotonic()
            self._unset_keepalive_if_required()
        found = _END_OF_HEAD.search(unparsed_data, max(0, self.searched - 2))
        self.searched = len(unparsed_data)
        if (found.end() if found else len(unparsed_data)) > MAX_HEAD:
            self._refuse(_TOO_LONG)
            return b""
        if found is None:
            return b""
        head = bytes(unparsed_data[: found.end()])
        del unparsed_data[: found.end()]
        self.searched = 0
        if head.startswith(b"CONNECT "):
            self._refuse(_NO_METHOD)
            return b""
        return _UPGRADE.sub(_HIDDEN, head)

    # -- called by the parser -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: {"connection": self}}

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.body_left:  # fields behind a chunked body are no headers (RFC 9110, 6.5.1)
            super().on_header(name, value)

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
        if self.unparsed_data:
            self._parse_more()

    # -- late clients and invalid bytes -------------------------------------------------------

    def pause_writing(self) -> None:
        self.blocked_since = time.monotonic()
        self.waiting.add(self)
        super().pause_writing()

    def resume_writing(self) -> None:
        self.blocked_since = 0.0
        super().resume_writing()

    def close_late(self, now: float, head: float, body: float) -> None:
        """Close the connection if its client is late with a head, a body, or reading an answer."""
        if not (self.head_since or self.body_since or self.blocked_since or self.drain_since):
            self.waiting.discard(self)
        elif 0 < self.blocked_since < now - body:
            self.transport.abort()  # the client reads nothing, so no answer would reach it
        elif self.drain_since:
            if self.drain_since < now - min(body, DRAIN_TIME):
                self.transport.close()
        elif 0 < self.head_since < now - head or 0 < self.body_since < now - body:
            self.body_since = 0.0  # the client sends nothing, so nothing has to be drained
            self._refuse(None if self.cycle and self.cycle.response_started else _TOO_SLOW)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not a request. uvicorn calls this while it handles the error."""
        error, begun = sys.exception(), self.cycle
        if begun is not None and begun.response_started and not begun.response_complete:
            self._refuse(None)  # a problem would be read as a part of the answer under way
            return
        if isinstance(error, httptools.HttpParserInvalidMethodError):
            self._refuse(_NO_METHOD)
            return
        is_path = isinstance(error, httptools.HttpParserCallbackError)
        reason = "its path cannot be read" if is_path else str(error)
        self._refuse(Problem("invalid-request", f"not a valid HTTP/1.1 request: {reason}"))

    def _refuse(self, problem: Problem | None) -> None:
        if problem is not None:
            self.transport.write(_answer(problem))
        self.transport.close()

    def _may_drain(self) -> bool:
        """Whether the client still sends a body while the connection closes."""
        if not self.body_since:
            return False
        self.drain_since = time.monotonic()
        self.waiting.add(self)
        return True


def _answer(problem: Problem) -> bytes:
    """The complete answer for a problem that closes its connection."""
    request_id = os.urandom(8).hex()
    body = problem.body(request_id)
    head = (
        f"HTTP/1.1 {problem.status} {http.HTTPStatus(problem.status).phrase}\r\n"
        f"content-type: application/problem+json\r\ncontent-length: {len(body)}\r\n"
        f"x-request-id: {request_id}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def _body_length(headers: list[tuple[bytes, bytes]]) -> int:
    """Bytes of the body after a head; -1 for a chunked body. The parser checks the headers."""
    length = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return -1
        if name == b"content-length" and value.isdigit():
            length = int(value)
    return length


def connection_class(settings: Settings) -> type[Connection]:
    """A connection class of one server, with its own counters."""
    own = {"most": settings.max_connections, "waiting": set(), "unparsed_bytes": UnparsedBytes()}
    return type("Connection", (Connection,), own)


def sweep(connections: type[Connection], settings: Settings) -> None:
    """Close the late connections of a server."""
    now = time.monotonic()
    for connection in list(connections.waiting):
        connection.close_late(now, settings.header_timeout, settings.body_timeout)
