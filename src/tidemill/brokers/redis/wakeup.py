"""A place to sleep: a subscription to a channel, on a connection of its own.

Every message is a hint. The text of a hint may be a lease (:mod:`.handoff`). A broken subscription
may have missed a hint, so a new subscription counts as a hint.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.connection import Connection

from tidemill.brokers.redis.errors import Away, translate
from tidemill.brokers.redis.failover import CONNECT_TIMEOUT, SILENCE, Server, socket_of
from tidemill.brokers.shared.waits import Parked, Until, sleep
from tidemill.core.signals import InterruptibleWait, Unkilled, raised_by_handler
from tidemill.errors import BrokerUnavailable

PING_EVERY = 10.0  # seconds between pings: networks silently drop connections without traffic

PING_MASTER_EVERY = 3.0
"""Seconds between pings where Sentinel or a cluster may replace a server that hangs."""

_PING = b"*1\r\n$4\r\nPING\r\n"


class Wakeup:
    """Sleeps until a hint comes on its channel."""

    def __init__(self, server: Server, channel: bytes) -> None:
        self._server = server
        self._channel = channel
        self._connection: Connection | None = None
        self.texts: list[bytes] = []  # the texts of hints that have come
        self._reader = hiredis.Reader()
        self._changes = 0  # the server's count of changes when the connection was made
        self._pinged = self._heard = self._asked = 0.0

    def ready(self) -> bool:
        """Subscribe if necessary. True if a subscription existed, so that no hint was missed."""
        if self._connection is not None and self._changes == self._server.changes:
            return True
        self.close()
        self._changes = self._server.changes
        connection = self._server.connect(CONNECT_TIMEOUT)
        try:
            with Unkilled(), InterruptibleWait():
                connection.send_command("SUBSCRIBE", self._channel, check_health=False)
                connection.read_response()
        except BrokerUnavailable:
            raise
        except Exception as error:
            connection.disconnect()
            if raised_by_handler(error):
                raise
            raise translate(error, self._server.where) from error
        socket_of(connection).setblocking(False)
        self._connection, self._reader = connection, hiredis.Reader()
        self._pinged = self._heard = time.monotonic()
        return False

    def wait(self, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        """Sleep in this thread: see :meth:`parked`."""
        return sleep(self.parked(timeout, fds))

    def parked(
        self, timeout: float, fds: Sequence[int] = (), watched: Sequence[int] = ()
    ) -> Parked:
        """Sleep until a hint, a readable or watched descriptor, or the timeout ends the sleep."""
        # Returns the descriptors that are readable, or have ended.
        until = time.monotonic() + max(0.0, timeout)
        if not self.ready():
            return []
        while True:
            assert self._connection is not None
            sock = socket_of(self._connection)
            if self._heard < self._pinged and self._drain(sock):
                return []  # the hint came while nobody slept
            look_at = self._keep_alive(sock)
            if self._connection is None:
                return []
            left = min(until, look_at) - time.monotonic()
            ready = yield Until(left, [sock.fileno(), *fds], watched)
            if sock.fileno() in ready:
                ready.remove(sock.fileno())
                if self._drain(sock):
                    return ready
            if ready or time.monotonic() >= until:
                return ready

    def _keep_alive(self, sock: Any) -> float:
        """Ping in time, and close if another server is the master; return the next time to look."""
        assert self._connection is not None
        now = time.monotonic()
        has_others = self._server.has_others
        every = PING_MASTER_EVERY if has_others else PING_EVERY
        if self._changes != self._server.changes:
            self.close()
        elif self._heard >= self._pinged:
            if now - self._pinged < every:
                return self._pinged + every
            self._ping(sock, now)
        elif now - self._pinged >= PING_EVERY:
            raise self._broken(TimeoutError("it does not answer"))
        elif has_others and now - max(self._pinged, self._asked) >= SILENCE:
            self._asked = now
            if self._server.is_replaced(self._connection, now + SILENCE):
                self.close()
        return max(self._pinged, self._asked) + (SILENCE if has_others else PING_EVERY)

    def _ping(self, sock: Any, now: float) -> None:
        self._pinged = now
        try:
            with Unkilled():
                sock.send(_PING)
        except OSError as error:
            raise self._broken(error) from error

    def _drain(self, sock: Any) -> bool:
        """Read all received data; True when a hint came, not only the answer to a ping."""
        try:
            while part := sock.recv(65536):
                self._heard = time.monotonic()
                self._reader.feed(part)
        except (BlockingIOError, ssl.SSLWantReadError):
            return self._read_hints()
        except OSError as error:
            raise self._broken(error) from error
        raise self._broken(ConnectionResetError("the line was closed"))

    def _read_hints(self) -> bool:
        hinted = False
        while (message := self._reader.gets()) is not False:
            if message[0] == b"message":
                hinted = True
                self.texts += filter(None, message[2:])
        return hinted

    def _broken(self, error: OSError) -> Away:
        self.close()
        return Away(f"cannot reach redis at {self._server.where}: {error}")

    def close(self) -> None:
        """Close the connection; the next wait subscribes again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
