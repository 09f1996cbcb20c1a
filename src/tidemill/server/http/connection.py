"""Connections of HTTP clients: uvicorn's, which here gets one request at a time.

uvicorn parses all bytes that arrive, so a client could have thousands of requests parsed at once.
Here the parser gets the head of a request, and then its body. Later requests wait, up to a bound.
The keep-alive time also bounds the wait for a whole head.
"""

from __future__ import annotations

import asyncio
import re

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 * 1024  # bytes that the head of a request may have, path included

MAX_UNPARSED = 64 * 1024
"""Bytes of later requests beyond which a connection is not read while a request is served."""

CHUNKED_SLICE = 1024
"""Bytes of a chunked body that are parsed at a time. A later request may follow in these bytes."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_UPGRADE = re.compile(rb"(?<=\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
_HIDDEN = b"x-offer"
"""Replaces the header name Upgrade: the parser would drop the body of a request with Upgrade."""


class _Flow(FlowControl):
    """Reads no more while many bytes wait to be parsed, even if a handler asks for its body."""

    def __init__(self, transport: asyncio.Transport, unparsed: bytearray) -> None:
        super().__init__(transport)
        self._unparsed = unparsed

    def resume_reading(self) -> None:
        if len(self._unparsed) <= MAX_UNPARSED:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unparsed = bytearray()  # received and not parsed
        self._searched = 0  # bytes at the start of ``_unparsed`` in which no head ends
        self._body_left = 0  # bytes of the body to come; -1 for a chunked body
        self.flow = _Flow(transport, self._unparsed)
        if self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            self.connections.discard(self)
            transport.close()
        else:
            self._expect_head()

    def _expect_head(self) -> None:
        """Close the connection if no whole head comes in time."""
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self._unparsed += data
            self._parse()

    @property
    def _is_busy(self) -> bool:
        """True while a complete request is served, so that the next request has to wait."""
        return self.cycle is not None and not self.cycle.response_complete and not self._body_left

    def _parse(self) -> None:
        """Feed the parser the rest of a body or one head, while no request is served."""
        while self._unparsed and not self._is_busy and not self.transport.is_closing():
            part = self._part_of_body() if self._body_left else self._head()
            if not part:
                break
            super().data_received(part)
        if len(self._unparsed) > MAX_UNPARSED:
            self.flow.pause_reading()
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()

    def _part_of_body(self) -> bytes:
        size = self._body_left if self._body_left > 0 else CHUNKED_SLICE
        part = bytes(self._unparsed[:size])
        del self._unparsed[: len(part)]
        if self._body_left > 0:
            self._body_left -= len(part)
        return part

    def _head(self) -> bytes:
        """The next complete head; empty when it is incomplete or refused."""
        unparsed = self._unparsed
        if not self._searched and unparsed[0] in b"\r\n":
            del unparsed[: len(unparsed) - len(unparsed.lstrip(b"\r\n"))]
        found = _END_OF_HEAD.search(unparsed, max(0, self._searched - 2))
        self._searched = len(unparsed)
        if (found.end() if found else len(unparsed)) > MAX_HEAD:
            self.send_400_response(f"The head of the request has more than {MAX_HEAD} bytes.")
        if found is None or self.transport.is_closing():
            return b""
        head = bytes(unparsed[: found.end()])
        del unparsed[: found.end()]
        self._searched = 0
        return _UPGRADE.sub(_HIDDEN, head)

    # -- called by the parser -----------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._body_left:  # fields behind a chunked body are no headers (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._body_left = _body_length(self.headers)
        own = {
            "tidemill.abort": self.transport.abort,
            "tidemill.is_closing": self.transport.is_closing,
        }
        self.scope.update(own)  # type: ignore[typeddict-item]
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._body_left = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unparsed:
            self._parse()
            self.flow.resume_reading()


def _body_length(headers: list[tuple[bytes, bytes]]) -> int:
    """Bytes of the body after a head; -1 for a chunked body. The parser checks the headers."""
    length = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return -1
        if name == b"content-length" and value.isdigit():
            length = int(value)
    return length
