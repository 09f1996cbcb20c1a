"""The rules of jobs that come before and after others, the same on every broker."""

from __future__ import annotations

from tidemill.core.errors import InvalidOption, JobNotFound
from tidemill.core.job import Envelope, Record, RunOn, State

__all__ = ["check_links", "not_waiting", "was_dropped"]


def check_links(job: Envelope) -> None:
    """Refuse a job of a flow that has a key: two rules would decide when it may run.

    Raises:
        InvalidOption: it has one.
    """
    if job.links is not None and job.key:
        raise InvalidOption(f"job {job.id} is part of a flow and has the key {job.key!r}: drop one")


def not_waiting(job_id: str) -> JobNotFound:
    """The error for a put whose next job does not exist or no longer waits."""
    return JobNotFound(f"job {job_id} is to come after others, and does not wait (any more)")


def was_dropped(record: Record) -> bool:
    """True when a job of a flow ended because of the ends of the jobs before it."""
    links = record.envelope.links
    if links is None or not record.failures:
        return False
    ends = {RunOn.SUCCESS: State.CANCELLED, RunOn.BARRIER: State.FAILED}
    return not record.attempts and links.waits in ends and ends[RunOn(links.waits)] is record.state
