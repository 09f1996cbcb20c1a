"""The connections to the server, and doing something over one although it may break at any moment.

A stack of them, the last used on top; made when needed, up to ``pool``. Not psycopg_pool: its
threads do not survive a fork, and it connects again by a clock of its own, where we must say at
once that a server is away.

A :class:`Line` outlives its connection. It numbers its calls, and the server keeps the last answer
of each line, so that a call whose reply was lost can be made again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg

from tidemill.brokers.postgres import wire
from tidemill.brokers.postgres.address import Address
from tidemill.brokers.postgres.trouble import (
    Refused,
    is_lost,
    is_worth_repeating,
    translated,
)
from tidemill.clock import new_id
from tidemill.errors import BrokerUnavailable
from tidemill.shield import lower_shield, raise_shield

__all__ = ["Line", "Lines", "connect"]

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]
_LOG = logging.getLogger("tidemill.postgres")
_PAUSE, _PAUSE_MOST = 0.05, 2.0
_AGAIN_MOST = 20
_inherited: list[object] = []  # connections of a parent: never closed here, it goes on using them


def connect(conninfo: str, where: str, *, prepared: bool = True) -> Connection:
    """A connection, within about 2 seconds.

    Raises:
        BrokerUnavailable: there is none to be had.
    """
    try:
        conn = psycopg.connect(
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
    wire.prepare(conn)
    return conn


class Line:
    """One connection at a time, and the calls made over it, counted."""

    __slots__ = ("conn", "id", "serial")

    def __init__(self) -> None:
        self.id = new_id()
        self.serial = 0
        self.conn: Connection | None = None

    def drop(self) -> None:
        """Close the connection."""
        conn, self.conn = self.conn, None
        if conn is not None:
            conn.close()


class Lines:
    """The lines of one broker in one process."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._free: list[Line] = []
        self._count = 0
        self._changed = threading.Condition()
        self._pause = 0.0
        self._not_before = 0.0
        self._why: BrokerUnavailable | None = None
        self.pooled: bool | None = None  # True behind PgBouncer, None as long as nobody has looked
        self._closed = False

    def run(self, work: Callable[[Line, Connection], T], *, patience: float = 0.0) -> T:
        """Do something over a line; again, over a new connection, when it breaks.

        A server that is away is tried once more at once, then until ``patience`` is over. So what
        ``work`` does may be done twice.

        Raises:
            BrokerUnavailable: the server is away; the work may have been done.
        """
        deadline = time.monotonic() + patience
        line = self._take(deadline)
        raise_shield()
        try:
            return self._run_on(line, work, deadline)
        finally:
            if line.conn is not None and line.conn.info.transaction_status:
                line.drop()  # interrupted in the middle of something
            lower_shield()
            self._give_back(line)

    def _run_on(self, line: Line, work: Callable[[Line, Connection], T], deadline: float) -> T:
        broken = repeated = 0
        while True:
            try:
                if line.conn is None:
                    line.conn = self._connect()
                result = work(line, line.conn)
            except psycopg.Error as error:
                if is_worth_repeating(error) and repeated < _AGAIN_MOST:
                    repeated += 1
                    continue
                failure = translated(error, self._address.where)
                if not is_lost(error, line.conn):
                    raise failure from error
                line.drop()
                self._drop_free()  # they are most likely broken as well
                if not broken or time.monotonic() < deadline:
                    broken += 1
                    continue
                raise failure from error
            except Refused:
                raise
            except BrokerUnavailable:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(max(0.01, min(self._not_before, deadline) - time.monotonic()))
                continue
            return result

    def _connect(self) -> Connection:
        """A new connection, unless the last try was a moment ago and failed."""
        with self._changed:
            if self._why is not None and time.monotonic() < self._not_before:
                raise type(self._why)(str(self._why)) from self._why.__cause__
        address = self._address
        try:
            conn = connect(address.conninfo, address.where, prepared=not self.pooled)
            if not self.pooled:
                self._look_for_pooler(conn)
        except BrokerUnavailable as error:
            with self._changed:
                self._pause = min(max(_PAUSE, 2 * self._pause), _PAUSE_MOST)
                self._not_before = time.monotonic() + self._pause
                self._why = error
            raise
        with self._changed:
            self._pause, self._why = 0.0, None
        return conn

    def _look_for_pooler(self, conn: Connection) -> None:
        """Behind PgBouncer nothing of a session lasts: not what it prepared, nor its locks."""
        row = conn.execute("SELECT pg_backend_pid()").fetchone()
        self.pooled = row != (conn.info.backend_pid,)
        if self.pooled:
            conn.prepare_threshold = None
        else:  # steps look again for what others did meanwhile, whatever this database's default
            level = "read committed"
            conn.execute("SELECT set_config('default_transaction_isolation', %s, false)", [level])

    # -- the stack ------------------------------------------------------------------------------

    def _take(self, deadline: float) -> Line:
        with self._changed:
            while not self._free:
                if self._count < self._address.pool:
                    self._count += 1
                    return Line()
                # Somebody is in the middle of a call, which ends.
                self._changed.wait(max(0.0, deadline - time.monotonic()) + 30.0)
            return self._free.pop()

    def _give_back(self, line: Line) -> None:
        with self._changed:
            if self._closed:
                line.drop()
            self._free.append(line)
            self._changed.notify()

    def _drop_free(self) -> None:
        with self._changed:
            for line in self._free:
                line.drop()

    def close(self) -> None:
        """Close all that are not in use."""
        self._closed = True
        self._drop_free()

    def after_fork_child(self) -> None:
        """In a forked child: the connections are the parent's; let go of our copies, unclosed."""
        for line in self._free:
            if line.conn is not None:
                leave_to_parent(line.conn)
        self._free = []


def leave_to_parent(conn: Connection) -> None:
    """Close the descriptor, and not the session; the object stays, or it would say goodbye."""
    _inherited.append(conn)
    try:
        os.close(conn.fileno())
    except (OSError, psycopg.Error):
        pass
