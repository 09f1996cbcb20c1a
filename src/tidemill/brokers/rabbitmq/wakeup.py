"""How an owner sleeps until there is news, and whoever has some wakes it."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

from tidemill.core.locks import Lock
from tidemill.core.signals import InterruptibleWait

__all__ = ["WakeUp"]


class WakeUp:
    """A pipe to sleep on. News that nobody has looked at yet lets nobody sleep."""

    def __init__(self) -> None:
        self._end, self._rope = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._news, self._asleep, self._closed = True, False, False
        self._lock = Lock()

    def looked(self) -> None:
        """All there was until now is known."""
        with self._lock:
            self._news = False

    def tell(self) -> None:
        """There is something to look at."""
        with self._lock:
            self._news = True
            if self._asleep:
                self._asleep = False
                self._ring()

    def wake(self) -> None:
        """Make the sleep end, or the next one if nobody sleeps."""
        with self._lock:
            self._news = True
            self._ring()

    @property
    def fd(self) -> int:
        """Readable when it rings."""
        return self._end

    def arm(self) -> bool:
        """Have it rung when there is news; False when there is some already."""
        with self._lock:
            self._asleep = not self._news
            return self._asleep

    def disarm(self) -> None:
        """Have it rung no more."""
        with self._lock:
            self._asleep = False
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._end, 4096)

    def sleep(self, timeout: float, fds: Sequence[int]) -> list[int]:
        """Until there is news, a readable descriptor or the timeout; the readable ones."""
        if self._closed:
            return []
        poll = select.poll()
        for fd in (self._end, *fds):
            poll.register(fd, select.POLLIN)
        until = max(0.0, timeout) if self.arm() else 0.0
        with InterruptibleWait():
            ready = [fd for fd, _ in poll.poll(min(until, 3600.0) * 1000)]
        self.disarm()
        return [fd for fd in ready if fd != self._end]

    def close(self) -> None:
        """Nobody sleeps here any more."""
        with self._lock:
            if not self._closed:
                self._ring()  # who sleeps does not hear that a descriptor is closed
                self._closed = True
                os.close(self._end)
                os.close(self._rope)

    def after_fork_child(self) -> None:
        """In a forked child: it was the parent's."""
        if not self._closed:
            self._closed = True
            os.close(self._end)
            os.close(self._rope)

    def _ring(self) -> None:
        if not self._closed:
            with contextlib.suppress(BlockingIOError):  # it rings already
                os.write(self._rope, b"x")
