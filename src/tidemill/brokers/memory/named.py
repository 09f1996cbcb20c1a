"""Jobs by name and by place: leasing one, and showing the first."""

from __future__ import annotations

from tidemill.brokers.memory.acts import kick
from tidemill.brokers.memory.inspect import get
from tidemill.brokers.memory.jobs import LOST, MESSAGES, TASKS, Jobs
from tidemill.brokers.memory.leases import start_lease
from tidemill.job import Lease, Owner, Record, State

__all__ = ["head", "lease_named"]


def lease_named(jobs: Jobs, owner: Owner, job_id: str) -> Lease | None:
    """Lease a job that is ready, or can be made so."""
    item = jobs.items.get(job_id)
    if item is None or item.record.envelope.limit is not None:
        return None
    if item.record.state in (State.SCHEDULED, State.FAILED) and not kick(jobs, job_id):
        return None
    if item.record.state is not State.READY or item.is_carried:
        return None
    return start_lease(jobs, item, owner)


def head(jobs: Jobs, queue: str, state: State, count: int) -> list[Record]:
    """The first jobs of a state, in order."""
    if state is State.READY:
        lines = (jobs.ready.get((queue, kind), []) for kind in (TASKS, MESSAGES, LOST))
        ids = [job_id for _, _, job_id in sorted(entry for line in lines for entry in line)]
    elif state is State.SCHEDULED:
        ids = [
            record.envelope.id
            for record in sorted(_in_state(jobs, queue, state), key=lambda r: (r.due, r.seq))
        ]
    else:
        mine = {record.envelope.id for record in _in_state(jobs, queue, state)}
        order = [job_id for _, job_id in (*jobs.finished, *jobs.linked)]
        ids = [job_id for job_id in order if job_id in mine]
    return [shown for job_id in ids[:count] if (shown := get(jobs, job_id))]


def _in_state(jobs: Jobs, queue: str, state: State) -> list[Record]:
    records = (item.record for item in jobs.items.values())
    return [r for r in records if r.state is state and not r.unknown and r.envelope.queue == queue]
