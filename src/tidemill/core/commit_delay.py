"""Wait a moment before a commit, so that callers just answered can join with their next request.

Without this wait, threads that put jobs in a loop split into two halves: one half is answered while
the other half is written, and each commit holds only half of the requests. Waiting costs about 20
µs for each thread, and more for clients with connections of their own; the saved commit costs
several hundred. (PostgreSQL calls this ``commit_delay`` and ``commit_siblings``.) When the callers
do not come back, the following waits are skipped, more each time.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sized

__all__ = ["EACH_CLIENT", "EACH_THREAD", "CommitDelay"]

EACH_THREAD, EACH_CLIENT = 40e-6, 1e-3
"""Seconds that a thread, or a client of a server, has for its next request."""

_MANY = 25  # the wait grows with the callers up to this number
_LONGEST = 5e-3  # seconds
_SKIPPED = 15  # most waits skipped after waits in vain: 1, 3, 7, then this


class CommitDelay:
    """The delay of one group of committers. All call ``arrived``; the leader calls the rest."""

    def __init__(self, each: float = EACH_THREAD, *, least: int = 2) -> None:
        """``least``: the fewest requests at a time that are worth a wait."""
        self._each, self._most, self._least = each, min(_MANY * each, _LONGEST), least
        self._expected = 0  # requests expected at a time
        self._until = 0.0
        self._skip = self._vain = 0
        self._waiting: collections.deque[threading.Lock] = collections.deque()  # of the leader

    def expect(self, answered: int, pending: int, took: float = float("inf")) -> None:
        """Expect ``answered`` callers to come back, besides ``pending`` requests.

        The wait is at most as long as the commit ``took``: a wait in vain costs one commit.
        """
        self._expected = answered + pending
        if self._expected >= self._least:
            self._until = time.monotonic() + min(self._most, answered * self._each, took)
        else:
            self._expected = 0

    def arrived(self, pending: int) -> None:
        """Note one more request; the last expected one ends the wait of the leader."""
        if self._waiting and pending >= self._expected:
            try:
                self._waiting.pop().release()
            except IndexError:  # another thread was as fast
                pass

    def wait(self, pending: Sized) -> None:
        """Wait, as the next leader, until all expected requests are there or the time is over.

        A second wait follows only after more callers were answered.
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
