"""Wake-ups: an owner sleeps on a pipe until another thread has news for it."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.shared.wake_pipe import WakePipe, readable
from tidemill.core.locks import Lock


class WakeUp:
    """A pipe to sleep on. While there is unseen news, a sleep ends at once."""

    def __init__(self) -> None:
        self._pipe = WakePipe()
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
                self._pipe.wake()

    def wake(self) -> None:
        """End the current sleep. If nobody sleeps, end the next sleep at once."""
        with self._lock:
            self._news = True
            self._pipe.wake()

    def sleep(self, timeout: float, fds: Sequence[int]) -> list[int]:
        """Sleep until news, a readable descriptor or the timeout. Return readable descriptors."""
        with self._lock:
            if self._closed:
                return []
            self._asleep = not self._news
            fd, seconds = self._pipe.fd, timeout if self._asleep else 0.0
        ready = readable((fd, *fds), min(seconds, 3600.0))
        with self._lock:
            self._asleep = False
            if not self._closed:
                self._pipe.drain()
        return [one for one in ready if one != fd]

    def close(self) -> None:
        with self._lock:
            self._pipe.wake()  # poll does not notice a closed descriptor
            self._closed = True
            self._pipe.close()

    def after_fork_child(self) -> None:
        self._closed = True
        self._pipe.after_fork_child()
