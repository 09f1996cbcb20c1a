"""How many jobs a worker process leases ahead, by the duration of earlier jobs."""

from __future__ import annotations

from tidemill.core.job import Outcome, Verdict
from tidemill.worker.prefetch import Prefetch


def test_short_jobs_raise_the_prefetch_and_long_jobs_lower_it() -> None:
    prefetch = Prefetch(4)
    prefetch.measure([Verdict(1, Outcome.SUCCESS, started=100.0, ended=100.001)] * 8)
    assert prefetch.ahead > 4
    prefetch.measure([Verdict(1, Outcome.SUCCESS, started=100.0, ended=105.0)])
    assert prefetch.ahead == 0


def test_verdicts_without_times_leave_the_prefetch_as_it_is() -> None:
    # given long jobs that snooze or go back
    prefetch = Prefetch(4)
    snoozed = Verdict(1, Outcome.SNOOZE, delay=5.0)
    released = Verdict(2, Outcome.RELEASE, started=100.0)
    # when only they are measured, and when a long job is measured among them
    prefetch.measure([snoozed, released])
    assert prefetch.ahead == 4
    prefetch.measure([snoozed, Verdict(3, Outcome.SUCCESS, started=100.0, ended=105.0), released])
    # then
    assert prefetch.ahead == 0
