"""Rules of jobs that come before and after others, the same on every broker."""

from __future__ import annotations

from tidemill.errors import InvalidOption, JobNotFound
from tidemill.job import Envelope, Record, State, Waits

__all__ = ["check_links", "not_waiting", "was_dropped"]


def check_links(job: Envelope) -> None:
    """Refuse a job of a flow that has a key: two rules would say when it may run.

    Raises:
        InvalidOption: it has one.
    """
    if job.links is not None and job.key:
        raise InvalidOption(f"job {job.id} is part of a flow and has the key {job.key!r}: drop one")


def not_waiting(job_id: str) -> JobNotFound:
    """What a put is told that names a job behind it which waits for nothing more."""
    return JobNotFound(f"job {job_id} is to come after others, and does not wait (any more)")


def was_dropped(record: Record) -> bool:
    """True when a job of a flow ended for how those before it had ended."""
    links = record.envelope.links
    if links is None or not record.failures:
        return False
    ends = {Waits.SUCCESS: State.CANCELLED, Waits.BARRIER: State.FAILED}
    return not record.attempts and links.waits in ends and ends[Waits(links.waits)] is record.state
