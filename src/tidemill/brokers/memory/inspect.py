"""Read jobs and queues."""

from __future__ import annotations

import bisect
import itertools
from typing import Any

import msgspec

from tidemill.brokers.contract.inspection import Filter, Page, QueueStats, matches, number_of
from tidemill.brokers.memory.calls import Part
from tidemill.brokers.rules.transitions import Item, Jobs, ready_list_of
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


def find(jobs: Jobs, what: Filter, limit: int, cursor: str) -> Page:
    """Records that match, newest first. The cursor is the sequence number of the last record."""
    below = number_of(cursor) if cursor else float("inf")
    records = [item.record for item in jobs.items.values()]
    found = [record for record in records if record.seq < below and matches(record, what)]
    found.sort(key=lambda record: -record.seq)
    shown = [get(jobs, record.envelope.id) for record in found[:limit]]
    page = [record.for_list() for record in shown if record is not None]
    return Page(page, str(found[limit - 1].seq) if len(found) > limit else "")


def ahead(jobs: Jobs, job_id: str, most: int) -> int:
    """The number of ready jobs before a ready job, under the same limit and key or under none."""
    item = jobs.items.get(job_id)
    if item is None or item.ready is None:
        return 0
    entries, share = jobs.ready[ready_list_of(item.record)], _share_of(item)
    before = entries[: bisect.bisect_left(entries, item.ready)]
    same = (entry for entry in before if _share_of(jobs.items[entry[2]]) == share)
    return sum(1 for _ in itertools.islice(same, most))


def _share_of(item: Item) -> tuple[str, str] | None:
    claim = item.record.envelope.limit
    return None if claim is None else (claim.name, claim.key)


def stats(jobs: Jobs) -> list[QueueStats]:
    oldest: dict[str, float] = {}
    for item in sorted(jobs.items.values(), key=lambda item: item.record.seq):
        if item.record.state is State.READY:
            oldest.setdefault(item.record.envelope.queue, item.record.envelope.created)
    return [
        msgspec.structs.replace(row, oldest=oldest.get(name, 0.0))
        for name, row in sorted(jobs.stats.items())
        if isinstance(row, QueueStats)  # always true here; the test is for the type checker
    ]


class Inspection(Part):
    def get(self, job_id: str) -> Record | None:
        with self._lock:
            return get(self._jobs, job_id)

    def was_here(self, job_id: str) -> bool:
        made = id_time(job_id)
        return made is not None and self._jobs.born - 1 <= made <= self._jobs.wall + 1

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        with self._lock:
            return find(self._jobs, what, limit, cursor)

    def ahead(self, job_id: str, most: int) -> int:
        with self._lock:
            return ahead(self._jobs, job_id, most)

    def stats(self) -> list[QueueStats]:
        with self._lock:
            return stats(self._jobs)

    def owners(self) -> list[Owner]:
        with self._lock:
            return list(self._owners.values())

    def info(self) -> dict[str, Any]:
        with self._lock:
            departure, count = self._jobs.departure, len(self._jobs.items)
            facts = {"broker": "memory", "url": self.url, "jobs": count, "durable": False}
            facts["made"] = self._jobs.born
            return facts | ({"moves_to": departure.where} if departure else {})
