"""Waits for a condition in the store, for callers that lease no jobs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence

from tidemill.brokers.lmdb.claim.due import come_due
from tidemill.brokers.lmdb.engine.group_commit import BRISK, PATIENCE
from tidemill.brokers.lmdb.engine.store import Store
from tidemill.brokers.lmdb.engine.wakeup import RESULT, SPACE, Sleeper, bloom
from tidemill.brokers.lmdb.put.workflows import is_unfinished
from tidemill.brokers.lmdb.transitions import Commit, Transitions
from tidemill.brokers.shared.job_watch import Alarm
from tidemill.errors import BrokerUnavailable

# Seconds. A hint may be lost with a process that dies, so no sleep is longer.
_LONGEST = 30.0


class Waits:
    """Places to sleep in one store, kept for the next waits."""

    def __init__(self, store: Store, commit: Commit) -> None:
        self._store = store
        self._commit = commit
        self._spare: list[Sleeper] = []

    def ended(self, ids: Sequence[str], timeout: float, alarm: Alarm) -> list[bool]:
        """See :class:`~tidemill.brokers.shared.job_watch.Ends`."""
        keys = [job_id.encode() for job_id in ids]
        found = [False] * len(keys)

        def over(commit: Transitions) -> bool:
            found[:] = [not is_unfinished(commit, key) for key in keys]
            return any(found)

        self.until(over, RESULT, bloom(ids), timeout, alarm)
        return found

    def for_space(self, queue: str, timeout: float) -> bool:
        """Wait until the queue has fewer jobs than its bound; False when the time is over."""

        def over(commit: Transitions) -> bool:
            row = commit.existing_row(queue)
            return row is None or not row.max_size or row.size < row.max_size

        return self.until(over, SPACE, bloom([queue]), timeout)

    def until(
        self,
        over: Callable[[Transitions], bool],
        kind: int,
        bits: int,
        timeout: float,
        alarm: Alarm | None = None,
    ) -> bool:
        """Sleep until ``over`` is true; check again at each hint of this kind."""
        # False when the time is over, or the alarm rings.
        fds = [] if alarm is None else [alarm.fd]
        deadline = time.monotonic() + timeout
        sleeper: Sleeper | None = None
        next_due = 0.0

        def look(commit: Transitions) -> bool:
            nonlocal sleeper, next_due
            come_due(commit)
            if over(commit):
                return True
            next_due = max(0.0, commit.next_due())
            if sleeper is None:  # later looks, and replayed requests, have a place
                sleeper = self._spare.pop() if self._spare else self._store.wakeups.take()
            self._store.wakeups.mark(sleeper, kind, bits)
            return False

        try:
            while not self._look(look, deadline):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                assert sleeper is not None
                if sleeper.wait(min(left, next_due, _LONGEST), fds):
                    return False
                self._store.room.check_place()
            return True
        finally:
            if sleeper is not None:
                sleeper.drain()
                self._spare.append(sleeper)

    def _look(self, look: Callable[[Transitions], bool], deadline: float) -> bool:
        """Check once; also False when another writer keeps the lock until the time is up."""
        left = max(BRISK, deadline - time.monotonic())
        try:
            return self._commit(look, patience=left if left < PATIENCE else None)
        except BrokerUnavailable:
            if time.monotonic() < deadline:
                raise
            return False

    def close(self) -> None:
        spare, self._spare = self._spare, []
        if spare:

            def free(_: Transitions) -> None:
                for sleeper in spare:
                    self._store.wakeups.give_up(sleeper)

            try:
                # If this fails, other processes notice that the place has no reader.
                with contextlib.suppress(BrokerUnavailable):
                    self._commit(free, patience=BRISK)
            finally:
                for sleeper in spare:
                    self._store.wakeups.close_sleeper(sleeper)

    def after_fork_child(self) -> None:
        """Drop the parent's places in a forked child, and close the copied descriptors."""
        for sleeper in self._spare:
            os.close(sleeper.fd)
        self._spare = []
