"""The listening connection, with the locks that show that this process's owners live.

A thread sleeps on this connection and passes on notifications, since the server keeps all
notifications that nobody has read. When the connection breaks, the thread makes a new connection
and takes the locks again. Then the thread wakes all sleepers, since notifications were lost.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable

import psycopg

from tidemill.brokers.postgres.settings import Address
from tidemill.brokers.postgres.timed_connection import Connection, connect, leave_to_parent
from tidemill.core.errors import BrokerUnavailable
from tidemill.core.locks import LongLock
from tidemill.core.wake_pipe import WakePipe, readable

_LOG = logging.getLogger("tidemill.postgres")
_PAUSE, _PAUSE_MOST = 0.05, 1.0


class WakeUps:
    """The listening connection of one broker in one process, and its thread."""

    def __init__(
        self,
        address: Address,
        table: int,
        heard: Callable[[str], None],
        back: Callable[[], None],
    ) -> None:
        self._address = address
        self._table = table  # the oid of table "owner": the first key of each lock
        # Seconds within which the server must notice that a connection is dead.
        self._lease = int(address.owner_lease)
        self._heard = heard
        self._back = back
        self.channel = f"tidemill_{table}_{secrets.token_hex(6)}"
        self._conn: Connection | None = None
        self._held: set[int] = set()
        self._missing: set[int] = set()  # held owners whose lock could not be taken yet
        self._lock = LongLock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pipe = WakePipe()
        self.since = 0.0  # monotonic time of the last connect; 0 while disconnected
        self.broken = 0  # how often the connection was lost

    def start(self) -> None:
        """Listen from now on. Idempotent.

        Raises:
            BrokerUnavailable: the server is away.
        """
        with self._lock:
            if self._thread is not None:
                return
            self._connect()
            self._thread = threading.Thread(
                target=self._listen, name="tidemill-postgres", daemon=True
            )
            try:
                self._thread.start()
            except BaseException:
                self._thread = None  # no thread could start: the next call tries again
                raise

    def _connect(self) -> None:
        # The server must notice that a machine has vanished, and free its locks. An idle connection
        # needs keepalives for this, a busy connection needs tcp_user_timeout.
        conn = connect(
            self._address,
            direct=True,
            tcp_keepalives_idle=max(1, self._lease // 3),
            tcp_keepalives_interval=max(1, self._lease // 10),
            tcp_keepalives_count=3,
            tcp_user_timeout=self._lease * 1000 * 2 // 3,
            application_name="tidemill",
        )
        try:
            conn.execute(f'LISTEN "tidemill_{self._table}"; LISTEN "{self.channel}"'.encode())
            for number in list(self._held):  # a copy, since the set may grow during the loop
                self._take_lock(conn, number)
        except psycopg.Error as error:
            conn.close()
            where = self._address.where
            raise BrokerUnavailable(f"PostgreSQL at {where} went away: {error}") from error
        conn.until = None
        self._conn = conn
        self.since = time.monotonic()

    def _take_lock(self, conn: Connection, number: int) -> None:
        # The old session holds the lock until the server notices its end. Meanwhile the lease shows
        # that the owner lives, and each renewal tries the lock again.
        query = "SELECT pg_try_advisory_lock(%s, %s)"
        row = conn.execute(query, [self._table, number]).fetchone()
        if row and row[0]:
            self._missing.discard(number)
        else:
            self._missing.add(number)

    # -- locks ----------------------------------------------------------------------------------

    def hold(self, number: int) -> None:
        """Hold the lock of an owner as long as this process lives."""
        self._held.add(number)
        self._missing.add(number)
        self.renew(number)

    def renew(self, number: int) -> None:
        """Take the lock of an owner, if this connection does not have it."""
        if number in self._missing:
            self._do(lambda conn: self._take_lock(conn, number))

    def let_go(self, number: int) -> None:
        """Release the lock of an owner."""
        self._held.discard(number)
        self._missing.discard(number)
        query = "SELECT pg_advisory_unlock(%s, %s)"
        self._do(lambda conn: conn.execute(query, [self._table, number]))

    def _do(self, work: Callable[[Connection], object]) -> None:
        with self._lock:
            if self._conn is None:
                return
            conn = self._conn
            conn.until = time.monotonic() + self._address.limit
            try:
                work(conn)
            except psycopg.Error:
                pass  # the thread connects again and takes the held locks
            conn.until = None
            self._pipe.wake()  # psycopg may have read notifications from the socket

    # -- listening ------------------------------------------------------------------------------

    def _listen(self) -> None:
        pause = 0.0
        while not self._closed:
            conn = self._conn
            if conn is None:
                time.sleep(pause)
                pause = min(max(_PAUSE, 2 * pause), _PAUSE_MOST)
                self._come_back()
                continue
            pause = 0.0
            try:
                if self._pipe.fd in readable([conn.fileno(), self._pipe.fd]):
                    self._pipe.drain()
                with self._lock:
                    if not self._closed:
                        for notify in conn.notifies(timeout=0):
                            self._heard(notify.payload)
            except (psycopg.Error, OSError, ValueError) as error:
                if self._closed:
                    return
                _LOG.warning("lost the connection that listens (%s); connecting again", error)
                with self._lock:
                    conn.close()
                    self._conn, self.since = None, 0.0
                    self.broken += 1
                self._back()

    def _come_back(self) -> None:
        try:
            with self._lock:
                if not self._closed:
                    self._connect()
        except BrokerUnavailable as error:
            _LOG.debug("%s", error)
            return
        _LOG.info("the connection that listens is back")
        self._back()

    def close(self) -> None:
        """Stop listening, and release every lock."""
        self._closed = True
        thread = self._thread
        if thread is not None:
            self._pipe.wake()
            if thread is not threading.current_thread():
                thread.join(5.0)
        with self._lock:
            if self._conn is not None:
                self._conn.close()
                self._conn = None
        self._pipe.close()

    def after_fork_child(self) -> None:
        """Leave the connection to the parent, in a forked child, without ending its session."""
        if self._conn is not None:
            leave_to_parent(self._conn)
            self._conn = None
        self._pipe.after_fork_child()
