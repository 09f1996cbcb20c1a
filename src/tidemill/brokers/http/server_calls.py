"""The base of the broker's parts: one call of the server for each call of the contract."""

from __future__ import annotations

from typing import Any

from tidemill.brokers.http.connections import ServerConnections
from tidemill.core.errors import TidemillError


class ServerCalls:
    """Makes calls of the server while the broker is open."""

    url: str
    _closed: bool
    _connections: ServerConnections

    def _call(self, call: str, /, **arguments: Any) -> Any:
        self._check_open()
        return self._connections.call(call, **arguments)

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")
