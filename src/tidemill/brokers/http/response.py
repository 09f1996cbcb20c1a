"""Reads an HTTP/1.1 response as its bytes come, with the parser that the server uses, too."""

from __future__ import annotations

import httptools

_HEAD_MOST = 64 * 1024


class Response:
    """One response. Call :meth:`feed` until it is ``whole``.

    Raises:
        ValueError: the bytes are not a response.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.whole = False
        self.keeps = False  # the connection stays open for another request
        self._head: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._fed = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> bool:
        """Parse bytes, or the end of the connection when there are none; True when complete."""
        if not data:
            self._end()
            return True
        self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ValueError(f"not an HTTP response: {error}") from error
        if not self.status and self._fed > _HEAD_MOST:
            raise ValueError("the head of the response is too long")
        if self.whole:
            del self._parser  # the parser refers to this object: leave no reference cycle
        return self.whole

    def _end(self) -> None:
        """The connection was closed, which ends a response without a length."""
        if not self._fed:
            raise ValueError(
                "the server closed the connection without a response; if this repeats, the server "
                "may need https://, or a client certificate (https://…?cert=PATH&key=PATH)"
            )
        if not self.status:
            raise ValueError("the connection was closed in the middle of the response's head")
        if not self.headers.keys().isdisjoint({"content-length", "transfer-encoding"}):
            raise ValueError("the connection was closed in the middle of a response")
        self._complete()

    def _complete(self) -> None:
        self.body = b"".join(self._parts)
        self.whole = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head is complete; the head of an informational response (1xx) is ignored."""
        status = self._parser.get_status_code()
        if status >= 200:
            self.status, self.headers = status, self._head
            self.keeps = self._parser.should_keep_alive()
        self._head = {}

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        if self.status:
            self._complete()
