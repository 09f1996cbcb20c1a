"""The access log: one line for each request, as text or as JSON, written several at a time.

Each write to the file is a system call, and would cost as much as a request. A ``kill -9`` loses
the lines of a moment. A remote worker makes several steps a second, whose lines would hide all
others. So the log leaves out steps that succeed, unless the server's log level is debug.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from os import getpid
from typing import TextIO

import msgspec

from tidemill.brokers.contract.rpc import PATH
from tidemill.core.clock import clock
from tidemill.server.http.exchange import Exchange

INTERVAL = 0.2  # seconds between two writes


_STEPS = {PATH + name for name in ("exchange", "wait", "present", "tick")}


class AccessLog:
    """Writes a line for each request; ``steps`` adds the successful steps of workers."""

    def __init__(self, stream: TextIO, *, as_json: bool = False, steps: bool = False) -> None:
        self._stream = stream
        self._steps = steps
        self._json = as_json
        self._lines: list[str] = []
        self._second, self._stamp = 0, ""

    def add(self, exchange: Exchange, seconds: float) -> None:
        if not self._steps and exchange.status < 400 and _path(exchange) in _STEPS:
            return
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
        method, path = exchange.scope["method"], _path(exchange)
        line = {
            "time": self._time(),
            "level": "INFO",
            "logger": "tidemill.access",
            "message": f"{method} {path} {exchange.status}",
            "pid": getpid(),
            "client": exchange.address,
            "token": exchange.name or None,
            "method": method,
            "path": path,
            "status": exchange.status,
            "seconds": round(seconds, 6),
            "request_id": exchange.id,
        }
        return msgspec.json.encode(line).decode() + "\n"

    def _time(self) -> str:
        now = clock.wall()
        if int(now) != self._second:
            self._second = int(now)
            self._stamp = dt.datetime.fromtimestamp(self._second).astimezone().isoformat()
        return self._stamp

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        try:
            self._stream.write("".join(lines))
            self._stream.flush()
        except (OSError, ValueError):  # the reader of the log has gone; the server continues
            pass


def _path(exchange: Exchange) -> str:
    """The path without its query, which may contain secrets."""
    raw: bytes = exchange.scope.get("raw_path") or b""
    return raw.decode("latin-1")


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]
