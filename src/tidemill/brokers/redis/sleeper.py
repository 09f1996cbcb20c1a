"""A place to sleep: a subscription to a channel of one's own, on a connection of its own.

Whatever comes in is a hint, so nothing is parsed. A subscription that broke may have missed one: to
make it again counts as a hint.
"""

from __future__ import annotations

import select
import ssl
import time
from collections.abc import Sequence
from typing import Any

from redis.connection import AbstractConnection

from tidemill.brokers.redis.lines import CONNECT_TIMEOUT, Server
from tidemill.brokers.redis.trouble import Away, translate
from tidemill.errors import BrokerUnavailable

__all__ = ["Sleeper"]

PING_EVERY = 10.0
"""Seconds. Networks forget lines on which nothing moves, and say so to nobody."""

_PING = b"*1\r\n$4\r\nPING\r\n"
_PONG = b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"


class Sleeper:
    """Sleeps until a hint comes on its channel."""

    def __init__(self, server: Server, channel: bytes) -> None:
        self._server = server
        self._channel = channel
        self._connection: AbstractConnection | None = None
        self._pinged = self._heard = 0.0

    def ready(self) -> bool:
        """Subscribe, if it is not done. True when it was done before: nothing was missed."""
        if self._connection is not None:
            return True
        connection = self._server.connect(CONNECT_TIMEOUT)
        try:
            connection.send_command("SUBSCRIBE", self._channel, check_health=False)
            connection.read_response()
        except BrokerUnavailable:
            raise
        except Exception as error:
            connection.disconnect()
            raise translate(error, self._server.where) from error
        _socket(connection).setblocking(False)
        self._connection = connection
        self._pinged = self._heard = time.monotonic()
        return False

    def wait(
        self, timeout: float, fds: Sequence[int] = (), watched: Sequence[int] = ()
    ) -> list[int]:
        """Until a hint, a readable descriptor, the end of a watched one, or the timeout.

        Returns those that are readable, or have ended.

        Raises:
            BrokerUnavailable: the line is broken; the next call makes it anew.
        """
        until = time.monotonic() + max(0.0, timeout)
        if not self.ready():
            return []
        while True:
            assert self._connection is not None
            sock = _socket(self._connection)
            now = time.monotonic()
            if now - self._pinged >= PING_EVERY:
                self._ping(sock, now)
            left = min(until, self._pinged + PING_EVERY) - now
            ready = _poll([sock.fileno(), *fds], watched, max(0.0, left))
            if sock.fileno() in ready:
                ready.remove(sock.fileno())
                if self._drain(sock):
                    return ready
            if ready or time.monotonic() >= until:
                return ready

    def _ping(self, sock: Any, now: float) -> None:
        silent = self._heard < self._pinged  # since the last one
        self._pinged = now
        try:
            if silent:
                raise TimeoutError("it does not answer")
            sock.send(_PING)
        except OSError as error:
            raise self._broken(error) from error

    def _drain(self, sock: Any) -> bool:
        """Read all there is; True when that was more than the answer to a ping."""
        data = b""
        try:
            while part := sock.recv(65536):
                data += part
        except (BlockingIOError, ssl.SSLWantReadError):
            self._heard = time.monotonic()
            return data not in (b"", _PONG)
        except OSError as error:
            raise self._broken(error) from error
        raise self._broken(ConnectionResetError("the line was closed"))

    def _broken(self, error: OSError) -> Away:
        self.close()
        return Away(f"cannot reach redis at {self._server.where}: {error}")

    def close(self) -> None:
        """Hang up; the next wait begins anew."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()


def _poll(fds: Sequence[int], watched: Sequence[int], seconds: float) -> list[int]:
    """The readable ones, or broken ones; unlike ``select`` with descriptors of any number."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    for fd in watched:
        poll.register(fd, 0)  # it hangs up
    return [fd for fd, _ in poll.poll(seconds * 1000)]


def _socket(connection: AbstractConnection) -> Any:
    return connection._sock
