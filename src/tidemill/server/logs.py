"""The access log: one line for each request, for people or as JSON, written in gulps.

A line is a write to a file, and thousands a second would cost as much as the requests; so they are
gathered for a moment. Those of the last moment are lost with a ``kill -9``.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TextIO

import msgspec

if TYPE_CHECKING:
    from tidemill.server.edge import Exchange

__all__ = ["AccessLog"]

EVERY = 0.2
"""Seconds for which lines are gathered."""


class AccessLog:
    """Lines to a stream."""

    def __init__(self, stream: TextIO, *, as_json: bool = False) -> None:
        self._stream = stream
        self._json = as_json
        self._lines: list[str] = []
        self._second, self._stamp = 0, ""

    def add(self, exchange: Exchange, seconds: float) -> None:
        """Note a request that was answered in so many seconds."""
        if not self._lines:
            asyncio.get_running_loop().call_later(EVERY, self.flush)
        line = self._as_json if self._json else self._as_text
        self._lines.append(line(exchange, seconds))

    def _as_text(self, exchange: Exchange, seconds: float) -> str:
        who = f" {exchange.name}" if exchange.name else ""
        return (
            f"{self._time()} {exchange.address}{who} {exchange.scope['method']} "
            f"{_clean(_path(exchange))} {exchange.status} {seconds * 1000:.1f}ms {exchange.id}\n"
        )

    def _as_json(self, exchange: Exchange, seconds: float) -> str:
        line = {
            "time": self._time(),
            "client": exchange.address,
            "token": exchange.name or None,
            "method": exchange.scope["method"],
            "path": _path(exchange),
            "status": exchange.status,
            "seconds": round(seconds, 6),
            "request_id": exchange.id,
        }
        return msgspec.json.encode(line).decode() + "\n"

    def _time(self) -> str:
        now = time.time()
        if int(now) != self._second:
            self._second = int(now)
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self._second))
        return self._stamp

    def flush(self) -> None:
        """Write what was gathered."""
        lines, self._lines = self._lines, []
        try:
            self._stream.write("".join(lines))
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads it any more: no reason not to serve
            pass


def _path(exchange: Exchange) -> str:
    """Without the query, which may hold what is nobody's business."""
    raw: bytes = exchange.scope.get("raw_path") or b""
    return raw.decode("latin-1")


def _clean(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]
