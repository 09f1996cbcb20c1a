"""Lease a job by its id, and list the first jobs of a queue."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.memory.calls import Part
from tidemill.brokers.memory.inspect import get
from tidemill.brokers.rules.admin import retry
from tidemill.brokers.rules.claim import start_lease
from tidemill.brokers.rules.due import come_due
from tidemill.brokers.rules.transitions import LOST, MESSAGES, TASKS, Jobs
from tidemill.core.job import Lease, Owner, Record, State


def lease_named(jobs: Jobs, owner: Owner, job_id: str) -> Lease | None:
    """Lease a job that is ready, or that a retry makes ready."""
    item = jobs.items.get(job_id)
    if item is None or item.record.envelope.limit is not None:
        return None
    again = item.record.state in (State.SCHEDULED, State.FAILED)
    if again and not retry(jobs, job_id, asked=False):
        return None
    if item.record.state is not State.READY:
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
    return [shown.for_list() for job_id in ids[:count] if (shown := get(jobs, job_id))]


def _in_state(jobs: Jobs, queue: str, state: State) -> list[Record]:
    records = (item.record for item in jobs.items.values())
    return [r for r in records if r.state is state and r.envelope.queue == queue]


class JobNumbers(Part):
    def numbers(self, count: int) -> int:
        with self._lock:
            self._jobs.numbered += count
            return self._jobs.numbered - count + 1

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        with self._lock:
            come_due(self._jobs)
            return head(self._jobs, queue, state, count)

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        with self._lock:
            self._jobs.check_here()
            come_due(self._jobs)
            owner = self._owners.get(owner_id)
            if owner is None:
                return [None] * len(job_ids)
            return [lease_named(self._jobs, owner, job_id) for job_id in job_ids]
