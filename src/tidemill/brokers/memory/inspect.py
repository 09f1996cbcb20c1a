"""Looking at jobs."""

from __future__ import annotations

import msgspec

from tidemill.brokers.base import Filter, Page, QueueStats, matches, number_of
from tidemill.brokers.memory.jobs import Jobs
from tidemill.job import Record, State

__all__ = ["find", "get", "stats"]


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
    )


def find(jobs: Jobs, what: Filter, limit: int, cursor: str) -> Page:
    """Newest first. The cursor is the number of the record to go on below."""
    below = number_of(cursor) if cursor else float("inf")
    records = [item.record for item in jobs.items.values()]
    found = [record for record in records if record.seq < below and matches(record, what)]
    found.sort(key=lambda record: -record.seq)
    page = [shown for record in found[:limit] if (shown := get(jobs, record.envelope.id))]
    return Page(page, str(found[limit - 1].seq) if len(found) > limit else "")


def stats(jobs: Jobs) -> list[QueueStats]:
    """Every queue, by name."""
    oldest: dict[str, float] = {}
    for item in sorted(jobs.items.values(), key=lambda item: item.record.seq):
        if item.record.state is State.READY:
            oldest.setdefault(item.record.envelope.queue, item.record.envelope.created)
    return [
        msgspec.structs.replace(row, oldest=oldest.get(name, 0.0))
        for name, row in sorted(jobs.stats.items())
    ]
