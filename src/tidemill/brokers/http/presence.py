"""The presence of this process's consumers: tells the server that they live.

One thread keeps one request open for all consumers. When the process dies, the kernel closes the
connection, and the server gives up the consumers. The thread is needed because a consumer sends
nothing while it works on a message.
"""

from __future__ import annotations

import threading
import time

from tidemill.brokers.contract.rpc import CALLS, LONGEST
from tidemill.brokers.http.connections import STEP_TIMEOUT, Server, ServerConnection
from tidemill.brokers.http.response import Response
from tidemill.brokers.shared.wake_pipe import WakePipe, readable
from tidemill.core.locks import Lock
from tidemill.errors import TidemillError

_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds until the next try, at first and at most
_LATE = 2.0  # seconds that an answer may be late before its connection counts as broken


class Presence:
    """The consumers of one broker in this process. The thread runs while there are any."""

    def __init__(self, server: Server) -> None:
        self._lock = Lock()
        self._owner_ids: tuple[str, ...] = ()
        self._pipe = WakePipe()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._connection = ServerConnection(server, STEP_TIMEOUT)

    def add(self, owner_id: str) -> None:
        with self._lock:
            self._owner_ids = (*self._owner_ids, owner_id)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="tidemill-presence", daemon=True
                )
                self._thread.start()
        self._pipe.wake()

    def remove(self, owner_id: str) -> None:
        with self._lock:
            self._owner_ids = tuple(known for known in self._owner_ids if known != owner_id)
        self._pipe.wake()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        self._pipe.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(STEP_TIMEOUT)
        self._connection.end()
        self._pipe.close()

    def _run(self) -> None:
        try:
            self._call_until_closed()
        except ValueError:  # ``close`` did not wait longer for this thread, and closed the pipe
            if not self._closed:
                raise

    def _call_until_closed(self) -> None:
        pause = _PAUSE
        while not self._closed:
            try:
                self._call_once(self._connection)
                pause = _PAUSE
            except TidemillError:
                self._connection.close()
                self._sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _call_once(self, connection: ServerConnection) -> None:
        """Keep a request open until it is answered, or until the consumers change."""
        owner_ids = self._owner_ids
        if not owner_ids:
            self._sleep(LONGEST)
            return
        arguments = {"owner_ids": list(owner_ids), "timeout": LONGEST}
        connection.send("present", CALLS["present"].write(arguments))
        response = Response()
        late_at = time.monotonic() + LONGEST + _LATE
        while time.monotonic() < late_at:
            ready = readable([connection.fileno(), self._pipe.fd], late_at - time.monotonic())
            if self._pipe.fd in ready:
                self._pipe.drain()
                if self._closed or self._owner_ids != owner_ids:
                    break
            if connection.fileno() in ready and connection.read_some(response):
                connection.take("present", response)
                return
        connection.close()

    def _sleep(self, seconds: float) -> None:
        if readable([self._pipe.fd], seconds):
            self._pipe.drain()
