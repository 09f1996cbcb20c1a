"""Wake-ups: an owner sleeps on a pipe until another thread has news for it."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

from tidemill.core.locks import Lock
from tidemill.core.signals import InterruptibleWait


class WakeUp:
    """A pipe to sleep on. While there is unseen news, a sleep ends at once."""

    def __init__(self) -> None:
        self._end, self._rope = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._news, self._asleep, self._closed = True, False, False
        self._lock = Lock()

    def looked(self) -> None:
        """Mark all news as seen."""
        with self._lock:
            self._news = False

    def tell(self) -> None:
        """Report news, and wake a sleeper."""
        with self._lock:
            self._news = True
            if self._asleep:
                self._asleep = False
                self._ring()

    def wake(self) -> None:
        """End the current sleep. If nobody sleeps, end the next sleep at once."""
        with self._lock:
            self._news = True
            self._ring()

    def arm(self) -> bool:
        """Ask for a wake-up at the next news; False when there is news already."""
        with self._lock:
            self._asleep = not self._news
            return self._asleep

    def disarm(self) -> None:
        """Ask for no more wake-ups."""
        with self._lock:
            self._asleep = False
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._end, 4096)

    def sleep(self, timeout: float, fds: Sequence[int]) -> list[int]:
        """Sleep until news, a readable descriptor or the timeout. Return readable descriptors."""
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
        """Wake the sleeper and close the pipe."""
        with self._lock:
            if not self._closed:
                self._ring()  # wake the sleeper: poll does not notice a closed descriptor
                self._closed = True
                os.close(self._end)
                os.close(self._rope)

    def after_fork_child(self) -> None:
        """In a forked child: close the copy of the parent's pipe."""
        if not self._closed:
            self._closed = True
            os.close(self._end)
            os.close(self._rope)

    def _ring(self) -> None:
        if not self._closed:
            with contextlib.suppress(BlockingIOError):  # a wake-up is already in the pipe
                os.write(self._rope, b"x")
