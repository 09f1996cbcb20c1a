"""Deleting a queue: its jobs if that is asked for, then its counters and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.brokers.base import Feature, Filter, QueueStats
from tidemill.errors import TidemillError
from tidemill.job import FINISHED

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["QueueHasJobs", "delete_queue"]

_PAGE = 500


class QueueHasJobs(TidemillError):
    """A queue that has jobs is not deleted."""


def delete_queue(mill: Tidemill, name: str, *, force: bool) -> int:
    """Delete a queue; how many jobs went with it.

    Killed in the middle, some jobs are gone and the queue is still there: the same call goes on.

    Raises:
        QueueHasJobs: it has jobs that must not be deleted. TidemillError: there is no such queue.
    """
    mill.features.need(Feature.INSPECT, "deleting a queue")
    broker, row = mill.broker, _row(mill, name)
    if row.running:
        raise QueueHasJobs(
            f"queue {name!r} has {row.running:,} running jobs; cancel them or wait, then delete it"
        )
    if not force:
        _refuse_jobs(mill, row)
    deleted = broker.purge(name) if force else 0
    finished = Filter(states=FINISHED, queue=name)
    while force and (records := broker.find(finished, _PAGE).records):
        deleted += sum(broker.delete([record.envelope.id for record in records]))
    if not broker.forget_queue(name):
        raise QueueHasJobs(f"queue {name!r} got a job meanwhile and is not deleted; try again")
    return deleted


def _row(mill: Tidemill, name: str) -> QueueStats:
    rows = {row.name: row for row in mill.broker.stats()}
    if name not in rows:
        known = ", ".join(rows) or "none"
        raise TidemillError(f"no queue has the name {name!r} here; known are: {known}")
    return rows[name]


def _refuse_jobs(mill: Tidemill, row: QueueStats) -> None:
    if row.size:
        raise QueueHasJobs(
            f"queue {row.name!r} has {row.size:,} unfinished jobs; purge it first, or delete it "
            "with force: that deletes its jobs, too"
        )
    if mill.broker.find(Filter(queue=row.name), 1).records:
        raise QueueHasJobs(
            f"queue {row.name!r} keeps finished jobs; delete it with force: that deletes them, too"
        )
