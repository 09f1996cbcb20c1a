"""Wait a moment before a commit, so that the callers of the last commit can join this commit.

The *leader* is the thread that makes the commit for all callers. Only the leader waits.

Without this wait, threads that put jobs in a loop split into two halves. While one half is
answered, the other half is written, so each commit holds only half of the requests. Waiting costs
about 20 µs for each thread, and more for clients with their own connections. The saved commit costs
several hundred µs. (PostgreSQL calls this ``commit_delay`` and ``commit_siblings``.) After each
wait in vain, the leader skips more of the next waits.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sized

EACH_THREAD, EACH_CLIENT = 40e-6, 1e-3  # seconds that each has for its next request
_MANY = 25  # the wait grows with the callers up to this number
_LONGEST = 5e-3  # seconds
_SKIPPED = 15  # after waits in vain in a row, the leader skips 1, 3, 7, then 15 waits


class CommitDelay:
    """The delay of a group of threads. All threads call ``arrived``; the leader also waits."""

    def __init__(self, each: float = EACH_THREAD, *, least: int = 2) -> None:
        """Wait only when ``least`` or more requests are expected."""
        self._each, self._most, self._least = each, min(_MANY * each, _LONGEST), least
        self._expected = 0  # requests expected at a time
        self._until = 0.0
        self._skip = self._vain = 0
        # Holds the lock of the leader while the leader waits.
        self._waiting: collections.deque[threading.Lock] = collections.deque()

    def expect(self, answered: int, pending: int, took: float = float("inf")) -> None:
        """Expect new requests of ``answered`` callers, besides the ``pending`` requests."""
        # The wait takes at most as long as the last commit ``took``.
        self._expected = answered + pending
        if self._expected >= self._least:
            self._until = time.monotonic() + min(self._most, answered * self._each, took)
        else:
            self._expected = 0

    @property
    def expects(self) -> bool:
        """True when the next leader may have to wait."""
        return self._expected > 0

    def arrived(self, pending: int) -> None:
        """Count one more request; the last expected request ends the leader's wait."""
        if self._waiting and pending >= self._expected:
            try:
                self._waiting.pop().release()
            except IndexError:  # another thread has already ended the wait
                pass

    def wait(self, pending: Sized) -> None:
        """Wait, as the next leader, until all expected requests have arrived or the time is over.

        Then a further call returns at once, until :meth:`expect` is called again.
        """
        if len(pending) >= self._expected:
            return
        left = self._until - time.monotonic()
        if self._skip:
            self._skip -= 1
            left = 0.0
        if left <= 0:
            self._expected = 0
            return
        lock = threading.Lock()
        lock.acquire()
        self._waiting.append(lock)
        if len(pending) < self._expected and not lock.acquire(timeout=left):
            arrived = len(pending)
            self._vain = min(2 * self._vain + 1, _SKIPPED) if arrived * 2 < self._expected else 0
            self._skip = self._vain
        else:
            self._vain = 0
        self._waiting.clear()
        self._expected = 0
