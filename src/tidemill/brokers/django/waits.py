"""Waits for jobs to end and for room in a queue, by callers that lease no jobs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from tidemill.brokers.django.store import Store
from tidemill.brokers.django.wakeup import WAITERS, Bell
from tidemill.brokers.shared.job_watch import Alarm
from tidemill.brokers.shared.waits import Until, ready_of


class Waits:
    # A wait ends soon after a ring on this machine. Without a ring it ends at the next poll.

    def __init__(self, store: Store) -> None:
        self._store = store

    def for_jobs(self, ids: Sequence[str], timeout: float, *, first: bool = False) -> None:
        """Wait until all jobs, or with ``first`` one job, have ended or are missing."""
        if first and ids:
            self._until(lambda: len(self._unfinished(ids)) < len(set(ids)), timeout)
        else:
            self._until(lambda: not self._unfinished(ids), timeout)

    def ended(self, ids: Sequence[str], timeout: float, alarm: Alarm) -> list[bool]:
        """See :class:`~tidemill.brokers.shared.job_watch.Ends`."""
        found: list[bool] = []

        def over() -> bool:
            left = self._unfinished(ids)
            found[:] = [job_id not in left for job_id in ids]
            return any(found)

        self._until(over, timeout, alarm)
        return found

    def for_space(self, queue: str, timeout: float) -> bool:
        """Wait until the queue is below its bound; False when the time is over."""
        return self._until(lambda: self._has_space(queue), timeout)

    def _unfinished(self, ids: Sequence[str]) -> set[str]:
        known = [job_id for job_id in dict.fromkeys(ids) if "\0" not in job_id]
        text = "SELECT id FROM tidemill_job WHERE state <= 3 AND id IN"
        return self._store.read(lambda rows: {row[0] for row in rows.select_in(text, known)})

    def _has_space(self, queue: str) -> bool:
        text = (
            "SELECT name FROM tidemill_queue WHERE name = %s AND max_size > 0 AND max_size <= "
            "(SELECT count(*) FROM tidemill_job WHERE queue = %s AND state <= 3)"
        )
        return not self._store.read(lambda rows: rows.execute(text, [queue, queue]))

    def _until(self, over: Callable[[], bool], timeout: float, alarm: Alarm | None = None) -> bool:
        deadline = time.monotonic() + timeout
        with contextlib.closing(Bell(self._store.wakes, WAITERS)) as bell:
            while True:
                bell.drain()
                self._store.look()
                if over():
                    return True
                left = deadline - time.monotonic()
                if left <= 0 or (alarm is not None and alarm.rings):
                    return False
                fds = [*bell.fds, alarm.fd] if alarm is not None else bell.fds
                ready_of(Until(min(left, self._store.address.poll), fds))
