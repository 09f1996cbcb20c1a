"""Find the job whose end made another job end: the failed step before it, or the failed member."""

from __future__ import annotations

from tidemill.brokers.contract.inspection import Filter
from tidemill.client.inline_jobs import JobStore
from tidemill.core.dependencies import was_dropped
from tidemill.core.job import GROUP, Record, RunOn, State

__all__ = ["cause_of", "cause_text", "jobs_before", "parents_of"]

MOST_LOOKED_AT = 5
"""The most parents of a job, or members of a group, that a search for the cause reads."""

_FLOW_JOBS = 500
"""The most jobs of a flow that :func:`jobs_before` reads."""


def cause_of(store: JobStore, record: Record) -> Record | None:
    """The job whose end made this job end, directly or through jobs in between.

    None when the job ended by itself, or when the store no longer has the other job.
    """
    found = None
    while was_dropped(record):
        ended = _members_of(store, record) + [r for r in parents_of(store, record) if _failed(r)]
        if not ended:
            break
        found = record = ended[0]
    return found


def cause_text(cause: Record) -> str:
    """A sentence that names the cause, how it ended, and its error."""
    how = "was cancelled" if cause.state is State.CANCELLED else str(cause.state)
    return f"it began with job {cause.envelope.id}, which {how}: {cause.error}"


def parents_of(store: JobStore, record: Record) -> list[Record]:
    """Up to :data:`MOST_LOOKED_AT` jobs that a job waited for, and that the store still has."""
    links = record.envelope.links
    if links is None:
        return []
    ids = links.inputs[:MOST_LOOKED_AT]
    found = [found for found in store.wait_for(ids, 0) if found is not None] if ids else []
    return [*found, *jobs_before(store, record)][:MOST_LOOKED_AT]


def jobs_before(store: JobStore, record: Record) -> list[Record]:
    """The jobs that a job of a flow waits for by ``after=``, in the order of acceptance.

    The job names only the jobs whose results it gets; these jobs are left out. The other jobs name
    the job as their next job. The search reads a bounded number of the flow's jobs.
    """
    job_id, links = record.envelope.id, record.envelope.links
    whole = job_id.rpartition(".")[0]
    if links is None or links.waits in ("", RunOn.BARRIER):
        return []
    while whole:
        near = Filter(id_prefix=f"{whole}.", look=_FLOW_JOBS)
        records = store.find(near, limit=_FLOW_JOBS).records
        found = [r for r in records if r.envelope.links and job_id in r.envelope.links.next]
        if found:
            return [r for r in reversed(found) if r.envelope.id not in links.inputs]
        whole = whole.rpartition(".")[0]
    return []


def _members_of(store: JobStore, record: Record) -> list[Record]:
    """Failed members of a group, if the record stands for a group."""
    if record.envelope.task != GROUP:
        return []
    failed = Filter(states=frozenset([State.FAILED]), id_prefix=f"{record.envelope.id}.")
    found = store.find(failed, limit=MOST_LOOKED_AT).records
    return sorted(found, key=was_dropped)


def _failed(record: Record) -> bool:
    return record.state.finished and record.state is not State.SUCCEEDED
