"""The rules of jobs that come before and after others, the same on every broker."""

from __future__ import annotations

from tidemill.core.envelope import Envelope
from tidemill.core.job import Record, RunOn, State, is_purged
from tidemill.errors import InvalidOption, JobNotFound


def check_links(job: Envelope) -> None:
    """Raise InvalidOption for a job of a flow with a key: both would decide when it runs."""
    if job.links is not None and job.key:
        raise InvalidOption(f"job {job.id} of a flow has the key {job.key!r}; leave the key out")


def not_waiting(job_id: str) -> JobNotFound:
    """The error for a put whose next job does not exist or no longer waits."""
    return JobNotFound(f"job {job_id} no longer waits for other jobs, or does not exist")


def was_dropped(record: Record) -> bool:
    """True when a job of a flow ended without a run, because an earlier job did not succeed."""
    links = record.envelope.links
    if links is None or not record.failures or is_purged(record.error):
        return False
    ends = {RunOn.SUCCESS: State.CANCELLED, RunOn.BARRIER: State.FAILED}
    return not record.attempts and links.waits in ends and ends[RunOn(links.waits)] is record.state
