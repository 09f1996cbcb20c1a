"""Read jobs and queues."""

from __future__ import annotations

import bisect
import itertools
from typing import Any

import msgspec

from tidemill.brokers.contract.inspection import Filter, Page, QueueStats, matches, number_of
from tidemill.brokers.memory.calls import Part
from tidemill.brokers.rules.due import come_due
from tidemill.brokers.rules.transitions import LOST, MESSAGES, TASKS, Item, Jobs, ready_list_of
from tidemill.core.clock import id_time
from tidemill.core.job import Owner, Record, State


def get(jobs: Jobs, job_id: str) -> Record | None:
    """A copy of the record, or None."""
    item = jobs.items.get(job_id)
    if item is None:
        return None
    record = item.record
    return msgspec.structs.replace(
        record,
        max_attempts=item.limit,
        attempts=list(record.attempts),
        log=list(record.log),
        token=item.token if record.state is State.RUNNING else 0,
        lease_ends=jobs.wall + item.deadline - jobs.now if item.deadline else 0.0,
    )


def _share_of(item: Item) -> tuple[str, str] | None:
    claim = item.record.envelope.limit
    return None if claim is None else (claim.name, claim.key)


class Inspection(Part):
    def get(self, job_id: str) -> Record | None:
        with self._lock:
            return get(self._jobs, job_id)

    def was_here(self, job_id: str) -> bool:
        made = id_time(job_id)
        return made is not None and self._jobs.born - 1 <= made <= self._jobs.wall + 1

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        below = number_of(cursor) if cursor else float("inf")
        with self._lock:
            records = [item.record for item in self._jobs.items.values()]
            found = [record for record in records if record.seq < below and matches(record, what)]
            found.sort(key=lambda record: -record.seq)
            shown = [get(self._jobs, record.envelope.id) for record in found[:limit]]
        page = [record.for_list() for record in shown if record is not None]
        return Page(page, str(found[limit - 1].seq) if len(found) > limit else "")

    def ahead(self, job_id: str, most: int) -> int:
        with self._lock:
            jobs, item = self._jobs, self._jobs.items.get(job_id)
            if item is None or item.ready is None:
                return 0
            entries, share = jobs.ready[ready_list_of(item.record)], _share_of(item)
            before = entries[: bisect.bisect_left(entries, item.ready)]
            same = (entry for entry in before if _share_of(jobs.items[entry[2]]) == share)
            return sum(1 for _ in itertools.islice(same, most))

    def stats(self) -> list[QueueStats]:
        oldest: dict[str, float] = {}
        with self._lock:
            for item in sorted(self._jobs.items.values(), key=lambda item: item.record.seq):
                if item.record.state is State.READY:
                    oldest.setdefault(item.record.envelope.queue, item.record.envelope.created)
            return [
                msgspec.structs.replace(row, oldest=oldest.get(name, 0.0))
                for name, row in sorted(self._jobs.stats.items())
                if isinstance(row, QueueStats)  # always true here; the test is for the type checker
            ]

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        with self._lock:
            jobs = self._jobs
            come_due(jobs)
            records = (item.record for item in jobs.items.values())
            mine = [r for r in records if r.state is state and r.envelope.queue == queue]
            if state is State.READY:
                lines = (jobs.ready.get((queue, kind), []) for kind in (TASKS, MESSAGES, LOST))
                ids = [job_id for _, _, job_id in sorted(itertools.chain.from_iterable(lines))]
            elif state is State.SCHEDULED:
                ids = [r.envelope.id for r in sorted(mine, key=lambda r: (r.due, r.seq))]
            else:
                here = {record.envelope.id for record in mine}
                ended = (job_id for _, job_id in (*jobs.finished, *jobs.linked))
                ids = [job_id for job_id in ended if job_id in here]
            return [shown.for_list() for job_id in ids[:count] if (shown := get(jobs, job_id))]

    def owners(self) -> list[Owner]:
        with self._lock:
            return list(self._owners.values())

    def info(self) -> dict[str, Any]:
        with self._lock:
            departure, count = self._jobs.departure, len(self._jobs.items)
            facts = {"broker": "memory", "url": self.url, "jobs": count, "durable": False}
            facts["made"] = self._jobs.born
            return facts | ({"moves_to": departure.where} if departure else {})
