"""Sleeping until something holds in the store: for those who wait without being owners."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from tidemill.brokers.lmdb.calls import Commit
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.timers import come_due
from tidemill.brokers.lmdb.wake import Sleeper

__all__ = ["Waits"]

_LONGEST = 30.0  # seconds; a hint lost with a process that died costs no more


class Waits:
    """Places to sleep in one store, kept for the next who waits."""

    def __init__(self, store: Store, commit: Commit) -> None:
        self._store = store
        self._commit = commit
        self._spare: list[Sleeper] = []

    def until(self, over: Callable[[Moves], bool], kind: int, bits: int, timeout: float) -> bool:
        """Sleep until ``over`` holds, looking again at hints of a kind; False when time is up."""
        deadline = time.monotonic() + timeout
        sleeper: Sleeper | None = None
        next_due = 0.0

        def look(moves: Moves) -> bool:
            nonlocal sleeper, next_due
            come_due(moves)
            if over(moves):
                return True
            next_due = max(0.0, moves.next_due())
            if sleeper is None:  # a replay finds it taken
                sleeper = self._spare.pop() if self._spare else self._store.bells.take()
            self._store.bells.mark(sleeper, kind, bits)
            return False

        try:
            while not self._commit(look):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                assert sleeper is not None
                sleeper.wait(min(left, next_due, _LONGEST))
            return True
        finally:
            if sleeper is not None:
                sleeper.drain()
                self._spare.append(sleeper)

    def close(self) -> None:
        """Give up the places."""
        spare, self._spare = self._spare, []
        if spare:

            def free(_: Moves) -> None:
                for sleeper in spare:
                    self._store.bells.give_up(sleeper)

            self._commit(free)

    def after_fork_child(self) -> None:
        """In a forked child: the places are the parent's; close our copies."""
        for sleeper in self._spare:
            os.close(sleeper.fd)
        self._spare = []
