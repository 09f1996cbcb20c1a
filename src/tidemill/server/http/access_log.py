"""The access log: one line for each request, as text or as JSON, written several at a time.

Each write to the file is a system call. Thousands of writes a second would cost as much as the
requests, so lines are collected for a moment first. A ``kill -9`` loses the lines of that moment.
"""

from __future__ import annotations

import asyncio
import time
from typing import TextIO

import msgspec

from tidemill.server.http.exchange import Exchange

__all__ = ["AccessLog"]

INTERVAL = 0.2
"""Seconds between two writes."""


class AccessLog:
    """Writes the lines of requests to a stream."""

    def __init__(self, stream: TextIO, *, as_json: bool = False) -> None:
        self._stream = stream
        self._json = as_json
        self._lines: list[str] = []
        self._second, self._stamp = 0, ""

    def add(self, exchange: Exchange, seconds: float) -> None:
        """Log a request that took so many seconds."""
        if not self._lines:
            asyncio.get_running_loop().call_later(INTERVAL, self.flush)
        line = self._as_json if self._json else self._as_text
        self._lines.append(line(exchange, seconds))

    def _as_text(self, exchange: Exchange, seconds: float) -> str:
        token = f" {exchange.name}" if exchange.name else ""
        return (
            f"{self._time()} {exchange.address}{token} {exchange.scope['method']} "
            f"{_printable(_path(exchange))} {exchange.status} {seconds * 1000:.1f}ms "
            f"{exchange.id}\n"
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
        """Write the collected lines."""
        lines, self._lines = self._lines, []
        try:
            self._stream.write("".join(lines))
            self._stream.flush()
        except (OSError, ValueError):  # the reader of the log has gone; the server serves on
            pass


def _path(exchange: Exchange) -> str:
    """The path without its query, which may contain secrets."""
    raw: bytes = exchange.scope.get("raw_path") or b""
    return raw.decode("latin-1")


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]
