"""A pipe by which one thread ends the sleep of another thread."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable

from tidemill.brokers.shared.waits import Until, ready_of
from tidemill.core.locks import Lock


def readable(fds: Iterable[int], seconds: float | None = None) -> list[int]:
    """Sleep until a descriptor is readable or hangs up, or the time is over; return those."""
    return ready_of(Until(math.inf if seconds is None else seconds, [*fds]))


class WakePipe:
    """A pipe that is readable at ``fd`` after a call of :meth:`wake`.

    A closed pipe neither writes to its descriptors nor closes them again, because the system may
    have given their numbers to another file.
    """

    def __init__(self) -> None:
        self.fd, self._end = os.pipe()
        for fd in (self.fd, self._end):
            os.set_blocking(fd, False)
        self._lock = Lock()

    def wake(self) -> None:
        with self._lock:
            if self._end >= 0:
                with contextlib.suppress(BlockingIOError):  # the pipe is full
                    os.write(self._end, b"x")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Close both ends. Idempotent."""
        with self._lock:
            fds, self.fd, self._end = (self.fd, self._end), -1, -1
            for fd in fds:
                if fd >= 0:
                    os.close(fd)

    def after_fork_child(self) -> None:
        """Close the copies in a forked child. Another thread may have held the lock at the fork."""
        self._lock = Lock()
        self.close()
