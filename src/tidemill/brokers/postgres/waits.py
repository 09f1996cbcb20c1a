"""Waits until jobs end or a queue has space, for callers that lease no jobs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from tidemill.brokers.postgres.encoding import texts
from tidemill.brokers.postgres.statements import Session
from tidemill.brokers.shared.job_watch import Alarm
from tidemill.core.locks import Condition

_RENEW = 30.0  # seconds; the server forgets a waiter after a minute
_KNOWN = 1000  # the most ids in one question


class Waits:
    """The waiters of this process."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._news = Condition()
        self._count = 0  # number of notifications
        self._numbers = itertools.count(1)
        schema = session.address.schema
        self._look = (
            f'CALL "{schema}".look_out(%s::text[], %s::text, %s::text, %s::text, '
            f'%s::"{schema}".prefs, NULL, NULL)'
        )
        self._going_on = (
            f'SELECT id FROM "{schema}".job WHERE id = ANY (%s) '
            f'AND NOT EXISTS (SELECT FROM "{schema}".done WHERE done.seq = job.seq)'
        )

    def heard(self) -> None:
        """Wake all waiters: a job may have ended."""
        with self._news:
            self._count += 1
            self._news.notify_all()

    def for_jobs(self, ids: Sequence[str], timeout: float) -> None:
        """Wait until all jobs have finished, or the time is over. Wait for the last ids first."""
        deadline = time.monotonic() + timeout
        left = [job_id for job_id in ids if "\0" not in job_id]
        while left and self._until([texts(left[-_KNOWN:]), None], deadline):
            del left[-_KNOWN:]

    def for_first(self, ids: Sequence[str], timeout: float) -> None:
        """Wait until one job has finished or is missing, or the time is over."""
        known = [job_id for job_id in ids if "\0" not in job_id]
        if known and len(known) == len(ids):
            self._until([texts(known), None], time.monotonic() + timeout, len(ids))

    def ended(self, ids: Sequence[str], timeout: float, alarm: Alarm) -> list[bool]:
        """See :class:`~tidemill.brokers.shared.job_watch.Ends`."""
        known = [job_id for job_id in ids if "\0" not in job_id]
        alarm.tell = self.heard
        if len(known) == len(ids):
            self._until([texts(known), None], time.monotonic() + timeout, len(ids), alarm)
        going_on = {job_id for (job_id,) in self._session.query(self._going_on, [texts(known)])}
        return [job_id not in going_on for job_id in ids]

    def for_space(self, queue: str, timeout: float) -> bool:
        """Wait until the queue is below its bound; False when the time is over."""
        return self._until([texts([]), queue], time.monotonic() + timeout)

    def _until(
        self, what: list[Any], deadline: float, enough: int = 1, alarm: Alarm | None = None
    ) -> bool:
        """Sleep until fewer than ``enough`` jobs are unfinished; a full queue counts as one."""
        # Return False when the time is over, or the alarm rings.
        session = self._session
        channel: str | None = None
        if time.monotonic() < deadline:
            channel = session.listen() or None
        number = f"{next(self._numbers)}" if alarm is None else f"a{alarm.number}"
        me = f"{channel}-{number}"
        while True:
            seen = self._count
            [(refs, due)] = session.query(self._look, [*what, me, channel, session.prefs()])
            if len(refs) < enough:
                if refs:  # this wait no longer needs the other jobs
                    session.query(self._look, [texts([]), None, me, channel, session.prefs()])
                return True
            left = deadline - time.monotonic()
            if left <= 0 or (alarm is not None and alarm.rings):
                return False  # the server will forget this wait
            longest = min(left, _RENEW, session.longest_sleep())
            with self._news:
                if self._count == seen:
                    self._news.wait(longest if due is None else max(0.0, min(longest, due)))

    def after_fork_child(self) -> None:
        """Forget the waiters, in a forked child, where nobody waits."""
        self._news = Condition()
