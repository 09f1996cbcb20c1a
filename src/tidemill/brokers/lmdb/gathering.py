"""The moment a leader waits for those who have just been answered to come with their next request.

Threads that put one job after the other fall into two halves else: one is answered while the other
is written, and each commit has but half of them in it. Waiting for them costs some 20 µs for each;
the commit that is saved costs several hundred. (PostgreSQL has this as ``commit_delay`` and
``commit_siblings``.) Where they do not come back, the waits are left out for a while.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sized

__all__ = ["Gathering"]

_EACH = 40e-6  # seconds one has to come back, and make its next request
_MOST = 1e-3
_SKIPPED = 15  # commits not waited for, after a wait that was in vain


class Gathering:
    """What one group of committers waits by; ``arrived`` is called by all, the rest by a leader."""

    def __init__(self) -> None:
        self._hoped = 0  # for so many requests at a time
        self._until = 0.0
        self._skip = 0
        self._gates: collections.deque[threading.Lock] = collections.deque()  # of the one who waits

    def expect(self, answered: int, pending: int) -> None:
        """So many have been answered just now, and so many have a request already."""
        self._hoped = answered + pending
        if self._hoped > 1:
            self._until = time.monotonic() + min(_MOST, answered * _EACH)

    def arrived(self, pending: int) -> None:
        """There is a request more: if it was the last that was waited for, the leader goes on."""
        if self._gates and pending >= self._hoped:
            try:
                self._gates.pop().release()
            except IndexError:  # another was as quick
                pass

    def wait(self, pending: Sized) -> None:
        """As the next leader: until all are there who can be hoped for, or the moment is over."""
        if len(pending) >= self._hoped:
            return
        if self._skip:
            self._skip -= 1
            return
        left = self._until - time.monotonic()
        if left <= 0:
            return
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        if len(pending) < self._hoped and not gate.acquire(timeout=left):
            came = len(pending)
            self._skip = _SKIPPED if came * 2 < self._hoped else 0
        self._gates.clear()
