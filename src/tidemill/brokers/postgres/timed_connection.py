"""A connection to the server, and the time in which the server must answer.

The client checks the time, since the server's own timeouts are not enough. A stopped server does
not apply its timeouts. Behind PgBouncer, timeouts last for one transaction, and PgBouncer refuses
timeouts as start-up parameters. When the time is over, the client asks the server to cancel the
call, and closes the connection.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import Any

import psycopg
from psycopg import capabilities, waiting

from tidemill.brokers.network.postgres_session import settings_of
from tidemill.brokers.postgres import encoding
from tidemill.brokers.postgres.errors import Stalled, translated
from tidemill.brokers.postgres.settings import CANCEL, Address
from tidemill.core.signals import InterruptibleWait, raised_by_handler

_TICK = 0.1  # seconds after which psycopg looks for a signal; with 0, it would not sleep at all
_LONGEST = 2**31 - 1  # milliseconds: the longest timeout that the server accepts
_inherited: list[object] = []  # connections that the parent still uses: never closed here


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that a signal handler may interrupt while the server works."""

    until: float | None = None  # monotonic time by which the server must have answered
    pooled = False  # True behind PgBouncer
    _kept: psycopg.Cursor[tuple[Any, ...]] | None = None

    @property
    def kept(self) -> psycopg.Cursor[tuple[Any, ...]]:
        """A cursor that packs arguments faster when it repeats its statement. It keeps them."""
        if self._kept is None:
            self._kept = self.cursor(binary=True)
        return self._kept

    def wait(self, gen: Any, interval: float = _TICK, timeout: float | None = None) -> Any:
        if self.until is not None:
            gen = _bounded(gen, self.until)
        more = () if timeout is None else (timeout,)  # older drivers lack this argument
        try:
            with InterruptibleWait():
                return waiting.wait(gen, self.pgconn.socket, interval, *more)
        except BaseException as error:
            if isinstance(error, Stalled):
                self._give_up()
            elif raised_by_handler(error) or not isinstance(error, Exception):
                self.pgconn.finish()  # hang up, so that nobody reads a late reply
            raise

    def _give_up(self) -> None:
        """Ask the server to cancel the call, if it still takes requests, and hang up."""
        try:
            if capabilities.has_cancel_safe():  # the older request to cancel might never return
                with InterruptibleWait():
                    self.cancel_safe(timeout=CANCEL)
        except psycopg.Error:
            pass  # the server does not take the request to cancel, either
        finally:
            self.pgconn.finish()


def _bounded(gen: Any, until: float) -> Generator[Any, Any, Any]:
    """Run ``gen``; end it when no answer has come by ``until``."""
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and time.monotonic() >= until:
                raise Stalled("no answer in time")
            state = gen.send(ready)
    except StopIteration as end:
        return end.value


def connect(
    address: Address, *, direct: bool = False, until: float | None = None, **more: object
) -> Connection:
    """Connect within about 2 seconds, and make the settings of the session."""
    # ``direct`` goes past a pooler. ``more`` are settings of this session alone.
    try:
        with InterruptibleWait():
            conn = Connection.connect(
                address.direct if direct and address.direct else address.conninfo,
                autocommit=True,
                prepare_threshold=3,
                client_encoding="utf8",
                connect_timeout=2,
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=3,
                tcp_user_timeout=10_000,
            )
    except psycopg.Error as error:
        raise translated(error, address.where) from error
    encoding.prepare(conn)
    conn.until = time.monotonic() + address.limit if until is None else until
    own = conn.info.backend_pid
    lock_timeout = min(int(address.limit * 1000), _LONGEST)
    try:
        row = conn.execute(settings_of(own, lock_timeout=lock_timeout, **more).encode()).fetchone()
    except psycopg.Error as error:
        conn.close()
        raise translated(error, address.where) from error
    conn.pooled = row is None or row[0] != own
    if conn.pooled:
        conn.prepare_threshold = None
    return conn


def leave_to_parent(conn: Connection) -> None:
    """Close the descriptor but not the session. Keep the object: its end would end the session."""
    _inherited.append(conn)
    try:
        os.close(conn.fileno())
    except (OSError, psycopg.Error):
        pass
