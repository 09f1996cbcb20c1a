"""One connection to the server, and the time in which the server must answer.

The limit is kept here, by the client, since nothing else reaches as far: the server's own limits
end no wait of a server that is stopped, and last for one transaction behind PgBouncer, which
refuses them as start-up parameters too. When the time is over the server is asked to cancel, and
the connection is closed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import Any

import psycopg
from psycopg import capabilities, waiting

from tidemill.brokers.postgres import encoding
from tidemill.brokers.postgres.errors import Stalled, translated
from tidemill.brokers.postgres.settings import CANCEL
from tidemill.core.signals import InterruptibleWait, raised_by_handler

__all__ = ["Connection", "connect", "leave_to_parent"]

_TICK = 0.1
"""Seconds after which psycopg looks for a signal. With 0 it would not sleep at all."""

_inherited: list[object] = []  # connections of a parent: never closed here, it goes on using them


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that a signal handler may interrupt while the server works.

    Attributes:
        until: monotonic time by which the server must have answered; None means without end.
    """

    until: float | None = None

    def wait(self, gen: Any, interval: float = _TICK, timeout: float | None = None) -> Any:
        if self.until is not None:
            gen = _bounded(gen, self.until)
        more = () if timeout is None else (timeout,)  # older drivers have no such argument
        try:
            with InterruptibleWait():
                return waiting.wait(gen, self.pgconn.socket, interval, *more)
        except BaseException as error:
            if isinstance(error, Stalled):
                self._give_up()
            elif raised_by_handler(error) or not isinstance(error, Exception):
                self.pgconn.finish()  # a reply may still be on its way: nobody may read it
            raise

    def _give_up(self) -> None:
        """Have the server end what it does for us, if it can still be told, and hang up."""
        try:
            if capabilities.has_cancel_safe():  # else the request might wait for ever itself
                with InterruptibleWait():
                    self.cancel_safe(timeout=CANCEL)
        except psycopg.Error:
            pass  # it does not take that either
        finally:
            self.pgconn.finish()


def _bounded(gen: Any, until: float) -> Generator[Any, Any, Any]:
    """The same conversation; it ends when nothing has come by then."""
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and time.monotonic() >= until:
                raise Stalled("no answer in time")
            state = gen.send(ready)
    except StopIteration as end:
        return end.value


def connect(conninfo: str, where: str, *, prepared: bool = True) -> Connection:
    """A connection, within about 2 seconds.

    Raises:
        BrokerUnavailable: there is none to be had.
    """
    try:
        with InterruptibleWait():
            conn = Connection.connect(
                conninfo,
                autocommit=True,
                prepare_threshold=3 if prepared else None,
                connect_timeout=2,
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=3,
                tcp_user_timeout=10_000,
            )
    except psycopg.Error as error:
        raise translated(error, where) from error
    encoding.prepare(conn)
    return conn


def leave_to_parent(conn: Connection) -> None:
    """Close the descriptor, and not the session; the object stays, or it would say goodbye."""
    _inherited.append(conn)
    try:
        os.close(conn.fileno())
    except (OSError, psycopg.Error):
        pass
