"""The moment one waits, before a commit, for those who were just answered to come once more.

Threads that put one job after the other fall into two halves else: one is answered while the other
is written, and each commit has but half of them in it. Waiting for them costs some 20 µs for each,
and some more where they are clients on lines of their own; the commit that is saved costs several
hundred. (PostgreSQL has this as ``commit_delay`` and ``commit_siblings``.) Where they do not come
back, the waits are left out for a while, and longer each time.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sized

__all__ = ["EACH_CLIENT", "EACH_THREAD", "Gathering"]

EACH_THREAD, EACH_CLIENT = 40e-6, 1e-3
"""Seconds that a thread, or a client of a server, has to come back with its next request."""

_MANY = 25  # no more than these are waited for by their time, however many there are
_LONGEST = 5e-3  # seconds
_SKIPPED = 15  # commits at most that are not waited for after waits in vain: 1, 3, 7, then this


class Gathering:
    """What one group of committers waits by; ``arrived`` is called by all, the rest by a leader."""

    def __init__(self, each: float = EACH_THREAD, *, least: int = 2) -> None:
        """``least``: fewer than so many requests at a time are not waited for."""
        self._each, self._most, self._least = each, min(_MANY * each, _LONGEST), least
        self._hoped = 0  # for so many requests at a time
        self._until = 0.0
        self._skip = self._vain = 0
        self._gates: collections.deque[threading.Lock] = collections.deque()  # of the one who waits

    def expect(self, answered: int, pending: int, took: float = float("inf")) -> None:
        """So many have been answered just now, and so many have a request already.

        No longer than the commit ``took`` is waited: to wait in vain costs no more than one.
        """
        self._hoped = answered + pending
        if self._hoped >= self._least:
            self._until = time.monotonic() + min(self._most, answered * self._each, took)
        else:
            self._hoped = 0

    def arrived(self, pending: int) -> None:
        """There is a request more: if it was the last that was waited for, the leader goes on."""
        if self._gates and pending >= self._hoped:
            try:
                self._gates.pop().release()
            except IndexError:  # another was as quick
                pass

    def wait(self, pending: Sized) -> None:
        """As the next leader: until all are there who can be hoped for, or the moment is over.

        Who has waited need not wait once more, unless others are answered meanwhile.
        """
        if len(pending) >= self._hoped:
            return
        left = self._until - time.monotonic()
        if self._skip:
            self._skip -= 1
            left = 0.0
        if left <= 0:
            self._hoped = 0
            return
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        if len(pending) < self._hoped and not gate.acquire(timeout=left):
            came = len(pending)
            self._vain = min(2 * self._vain + 1, _SKIPPED) if came * 2 < self._hoped else 0
            self._skip = self._vain
        else:
            self._vain = 0
        self._gates.clear()
        self._hoped = 0
