"""Waits of callers that lease no jobs: for jobs to end, and for room in a queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tidemill.brokers.rules.due import come_due
from tidemill.brokers.rules.transitions import Jobs
from tidemill.brokers.shared.job_watch import Alarm
from tidemill.core.locks import Condition


class Waits:
    """The waits of a broker; every change notifies ``lock``."""

    def __init__(self, lock: Condition, jobs: Jobs) -> None:
        self._lock = lock
        self._jobs = jobs

    def until(self, over: Callable[[], bool], timeout: float, alarm: Alarm | None = None) -> bool:
        """Sleep until ``over`` is true; False when the time is over or the alarm rings."""
        deadline = time.monotonic() + timeout
        with self._lock:
            while True:
                come_due(self._jobs)
                if over():
                    return True
                left = deadline - time.monotonic()
                if left <= 0 or (alarm is not None and alarm.rings):
                    return False
                self._lock.wait(min(left, self._jobs.next_due()))

    def ended(self, ids: Sequence[str], timeout: float, alarm: Alarm) -> list[bool]:
        """See :class:`~tidemill.brokers.shared.job_watch.Ends`."""
        items = self._jobs.items
        found: list[bool] = []

        def over() -> bool:
            found[:] = [i not in items or items[i].record.state.finished for i in ids]
            return any(found)

        alarm.tell = self._notify
        self.until(over, timeout, alarm)
        return found

    def _notify(self) -> None:
        with self._lock:
            self._lock.notify_all()
