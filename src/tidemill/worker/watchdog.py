"""The watchdog: a thread of the supervisor that never calls the store.

A call of the store may take the supervisor's own thread a long time, for example when a disk
stalls. Timeouts, kills and signals must not wait for this call. The watchdog looks at the processes
when a look is due, when a signal arrives, and when the supervisor's thread asks for a look.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable

from tidemill.core.clock import clock

log = logging.getLogger("tidemill.worker")

AHEAD = 0.1
"""Seconds that the supervisor's own thread has to take a signal before this thread does."""

AFTER_ERROR = 1.0


class Watchdog:
    """Calls ``look`` when a look is due; ``look`` returns the machine time of the next look.

    ``signals`` is a descriptor that becomes readable with a signal.
    """

    def __init__(self, look: Callable[[], float], signals: int) -> None:
        self._look = look
        self._signals = signals
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._until = float("inf")
        self._over = False
        self._thread = threading.Thread(target=self._serve, name="tidemill-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def expect(self, at: float) -> None:
        """Look no later than this machine time. Cheap; any thread may call this."""
        if at < self._until:
            self._until = at
            self._ring()

    def close(self) -> None:
        """End the thread and wait for it."""
        self._over = True
        self._ring()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._read.close()
        self._write.close()

    def _ring(self) -> None:
        try:
            self._write.send(b"x")
        except OSError:
            pass  # the socket is full or closed: the thread is awake or gone

    def _serve(self) -> None:
        while not self._over:
            if self._sleep():
                time.sleep(AHEAD)
            if self._over:
                return
            self._until = float("inf")  # set before the look, so that a later ``expect`` rings
            try:
                at = self._look()
            except Exception:
                log.exception("a look at the worker processes failed; trying again")
                at = clock.machine() + AFTER_ERROR
            self._until = min(at, self._until)

    def _sleep(self) -> bool:
        """Sleep until the next look; True when a signal has arrived."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        poll.register(self._signals, select.POLLIN)
        seconds = self._until - clock.machine()
        ready = poll.poll(None if seconds == float("inf") else max(0.0, seconds) * 1000)
        try:
            self._read.recv(4096)
        except BlockingIOError:
            pass
        return any(fd == self._signals for fd, _ in ready)
