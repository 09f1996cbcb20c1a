"""The connections to the server, and calls over connections that may break at any moment.

The free connections are a stack, up to ``pool``. This module does not use psycopg_pool, whose
threads do not survive a fork. psycopg_pool also reconnects at its own times, but a call must report
at once that the server is away. A :class:`ServerConnection` outlives its TCP connection. It numbers
its calls, and the server keeps its last answer. So a call whose reply was lost can be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psycopg

from tidemill.brokers.postgres.errors import (
    Refused,
    Stalled,
    is_lost,
    is_worth_repeating,
    translated,
)
from tidemill.brokers.postgres.settings import OVER, Address
from tidemill.brokers.postgres.timed_connection import Connection, connect, leave_to_parent
from tidemill.core.clock import new_id
from tidemill.core.locks import Condition
from tidemill.core.signals import (
    InterruptibleWait,
    defer_signals,
    lower_shield,
    raise_shield,
    resume_signals,
)
from tidemill.errors import BrokerUnavailable

T = TypeVar("T")
_PAUSE, _PAUSE_MOST = 0.05, 2.0
_AGAIN_MOST = 20


class ServerConnection:
    """A client of the server, over one TCP connection at a time. The client numbers its calls."""

    __slots__ = ("conn", "id", "serial")

    def __init__(self) -> None:
        self.id = new_id()
        self.serial = 0
        self.conn: Connection | None = None

    def drop(self) -> None:
        conn, self.conn = self.conn, None
        if conn is not None:
            conn.close()


class Connections:
    """The connections of one broker in one process."""

    def __init__(
        self, address: Address, greet: Callable[[Connection], None] = lambda conn: None
    ) -> None:
        self._address = address
        self._greet = greet  # called with each new connection
        self._free: list[ServerConnection] = []
        self._count = 0
        self._main = 0  # running calls of the main thread; a signal handler may add a call
        self._changed = Condition()
        self._pause = 0.0
        self._not_before = 0.0
        self._took = 0.0  # seconds that the last failed try to connect took
        self._why: BrokerUnavailable | None = None
        self.pooled: bool | None = None  # True behind PgBouncer, None before the first look
        self._closed = False
        self._heard_at = time.monotonic()
        self.silent_until = 0.0  # the end of the last silence of the server, see ``owners.py``

    def run(self, work: Callable[[ServerConnection, Connection], T], *, patience: float = 0.0) -> T:
        """Do ``work`` over a connection; if the connection breaks, repeat it over a new connection.

        If the server is away, retry once immediately, then until ``patience`` is over. So the
        server may do ``work`` twice. All tries end after the time limit of the URL.

        Raises:
            BrokerUnavailable: the server is away or silent; the work may have been done.
        """
        start = time.monotonic()
        deadline, until = start + patience, start + self._address.limit
        deferred = defer_signals()
        try:
            connection = self._take(until, deferred)
            try:
                raise_shield()
                try:
                    return self._run_on(connection, work, deadline, until + OVER)
                finally:
                    if connection.conn is not None and connection.conn.pgconn.transaction_status:
                        connection.drop()  # drop a connection whose transaction was interrupted
                    lower_shield()
            finally:
                self._give_back(connection, deferred)
        finally:
            if deferred:
                resume_signals()

    def _run_on(
        self,
        connection: ServerConnection,
        work: Callable[[ServerConnection, Connection], T],
        deadline: float,
        until: float,
    ) -> T:
        broken = repeated = 0
        while True:
            try:
                if connection.conn is None:
                    connection.conn = self._connect(until)
                connection.conn.until = until
                result = work(connection, connection.conn)
            except Stalled as error:
                connection.drop()
                self._drop_free()  # the free connections lead to the same server
                raise translated(error, self._address.where) from error
            except psycopg.Error as error:
                if is_worth_repeating(error) and repeated < _AGAIN_MOST:
                    repeated += 1
                    continue
                failure = translated(error, self._address.where)
                if not is_lost(error, connection.conn):
                    raise failure from error
                connection.drop()
                self._drop_free()  # the free connections are most likely broken, too
                if not broken or time.monotonic() < min(deadline, until):
                    broken += 1
                    continue
                raise failure from error
            except Refused:
                raise
            except BrokerUnavailable:
                # Do not begin a try that would end long after the deadline.
                if time.monotonic() + max(0.0, self._took - 1) >= deadline:
                    raise
                with InterruptibleWait():
                    time.sleep(max(0.01, min(self._not_before, deadline) - time.monotonic()))
                continue
            now = time.monotonic()
            if now - self._heard_at > self._address.owner_lease / 2:
                self.silent_until = now
            self._heard_at = now
            return result

    def _connect(self, until: float) -> Connection:
        """Make a new connection, unless a try failed a moment ago."""
        with self._changed:
            if self._why is not None and time.monotonic() < self._not_before:
                raise type(self._why)(str(self._why)) from self._why.__cause__
        address = self._address
        begun = time.monotonic()
        try:
            conn = connect(address, until=until)
            self.pooled = conn.pooled
            self._greet(conn)
        except BrokerUnavailable as error:
            with self._changed:
                self._took = time.monotonic() - begun
                self._pause = min(max(_PAUSE, 2 * self._pause), _PAUSE_MOST)
                self._not_before = time.monotonic() + self._pause
                self._why = error
            raise
        with self._changed:
            self._pause, self._why = 0.0, None
        return conn

    def _take(self, until: float, main: bool) -> ServerConnection:
        with self._changed:
            while not self._free and self._count >= self._address.pool:
                if main and self._main:
                    break  # a signal handler cannot wait for the call that it interrupted
                left = until - time.monotonic()
                if left <= 0:
                    raise BrokerUnavailable(
                        f"all {self._count} connections to PostgreSQL at {self._address.where} "
                        f"were busy for {self._address.limit:g} s; raise pool= in the url"
                    )
                self._changed.wait(left)
            self._main += main
            if self._free:
                return self._free.pop()
            self._count += 1
            return ServerConnection()

    def _give_back(self, connection: ServerConnection, main: bool) -> None:
        with self._changed:
            self._main -= main
            if self._closed or self._count > self._address.pool:
                connection.drop()
            if self._count > self._address.pool:
                self._count -= 1
                return
            self._free.append(connection)
            self._changed.notify()

    def _drop_free(self) -> None:
        with self._changed:
            for connection in self._free:
                connection.drop()

    def close(self) -> None:
        """Close all connections that are not in use."""
        self._closed = True
        self._drop_free()

    def after_fork_child(self) -> None:
        """Leave the connections to the parent, in a forked child, without ending their sessions."""
        for connection in self._free:
            if connection.conn is not None:
                leave_to_parent(connection.conn)
        self._free = []
