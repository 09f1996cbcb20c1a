"""Reading an answer of HTTP/1.1 as its bytes come, with the parser that the server reads with."""

from __future__ import annotations

import httptools

__all__ = ["Response"]

_HEAD_MOST = 64 * 1024


class Response:
    """One answer. :meth:`feed` it until it is ``whole``.

    Raises:
        ValueError: these bytes are no answer.
    """

    __slots__ = (
        *("_fed", "_head", "_parser", "_parts"),
        *("body", "headers", "keeps", "status", "whole"),
    )

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.whole = False
        self.keeps = False  # the connection, for another
        self._head: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._fed = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> bool:
        """Take what has come, no bytes for the end of the line; True when all of it is here."""
        if not data:
            self._end()
            return True
        self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ValueError(f"not an answer of HTTP: {error}") from error
        if not self.status and self._fed > _HEAD_MOST:
            raise ValueError("no whole head of an answer")
        if self.whole:
            del self._parser  # which knows us: nobody should have to look for the ring
        return self.whole

    def _end(self) -> None:
        """The line was closed: that ends an answer which says no other end."""
        if not self._fed:
            raise ValueError(
                "it closed the line without an answer; if it always does, it may take https:// "
                "alone, or ask for a certificate (https://…?cert=PATH&key=PATH)"
            )
        if not self.status:
            raise ValueError("no whole head of an answer")
        if not self.headers.keys().isdisjoint({"content-length", "transfer-encoding"}):
            raise ValueError("the line was closed in the middle of an answer")
        self._complete()

    def _complete(self) -> None:
        self.body = b"".join(self._parts)
        self.whole = True

    # -- what the parser tells --------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """One line of the head."""
        self._head[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head is whole; that of an answer before the answer counts for nothing."""
        status = self._parser.get_status_code()
        if status >= 200:
            self.status, self.headers = status, self._head
            self.keeps = self._parser.should_keep_alive()
        self._head = {}

    def on_body(self, data: bytes) -> None:
        """A part of the body."""
        self._parts.append(data)

    def on_message_complete(self) -> None:
        """All has come."""
        if self.status:
            self._complete()
