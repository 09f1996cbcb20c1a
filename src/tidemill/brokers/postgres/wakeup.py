"""The listening connection.

A thread sleeps on this connection and passes on notifications, since the server keeps all
notifications that nobody has read. When the connection breaks, the thread makes a new connection.
Then the thread wakes all sleepers, since notifications were lost.
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
from tidemill.brokers.shared.wake_pipe import WakePipe, readable
from tidemill.core.locks import LongLock
from tidemill.errors import BrokerUnavailable

_LOG = logging.getLogger("tidemill.postgres")
_PAUSE, _PAUSE_MOST = 0.05, 1.0


class WakeUps:
    """The listening connection of one broker in one process, and its thread."""

    def __init__(
        self, address: Address, table: int, heard: Callable[[str], None], back: Callable[[], None]
    ) -> None:
        self._address = address
        self._table = table  # the oid of table "owner": all processes of the store listen to it
        self._heard = heard
        self._back = back
        self.channel = f"tidemill_{table}_{secrets.token_hex(6)}"
        self._conn: Connection | None = None
        self._lock = LongLock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pipe = WakePipe()
        self.since = 0.0  # monotonic time of the last connect; 0 while disconnected

    def start(self) -> None:
        """Listen from now on. Idempotent."""
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
        conn = connect(self._address, direct=True, application_name="tidemill")
        try:
            conn.execute(f'LISTEN "tidemill_{self._table}"; LISTEN "{self.channel}"'.encode())
        except psycopg.Error as error:
            conn.close()
            where = self._address.where
            raise BrokerUnavailable(f"PostgreSQL at {where} went away: {error}") from error
        conn.until = None
        self._conn = conn
        self.since = time.monotonic()

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
                readable([conn.fileno(), self._pipe.fd])  # the pipe ends the wait at the close
                with self._lock:
                    if not self._closed:
                        conn.pgconn.consume_input()
                        while notify := conn.pgconn.notifies():
                            self._heard(notify.extra.decode())
            except (psycopg.Error, OSError, ValueError) as error:
                if self._closed:
                    return
                _LOG.warning("lost the connection that listens (%s); connecting again", error)
                with self._lock:
                    conn.close()
                    self._conn, self.since = None, 0.0
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
