"""Delete a queue: with ``force`` its jobs, then its counters and settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter, QueueStats, check_users
from tidemill.brokers.generic.purges import forget_purges
from tidemill.brokers.generic.topics import unbind_all
from tidemill.core.errors import TidemillError
from tidemill.core.job import State
from tidemill.core.suggest import hint

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

_PAGE = 500


class QueueHasJobs(TidemillError):
    """The queue has jobs, so it is not deleted."""


def delete_queue(mill: Runtime, name: str, *, force: bool) -> int:
    """Delete a queue and return the number of deleted jobs.

    A call that is killed may leave the queue with some of its jobs. The same call again completes
    the deletion.

    Raises:
        QueueHasJobs: the queue has jobs that must not be deleted.
        TidemillError: there is no such queue.
    """
    check_users(name)
    mill.features.need(Feature.INSPECT, "deleting a queue")
    broker, row = mill.broker, _row(mill, name)
    if row.running:
        raise QueueHasJobs(
            f"queue {name!r} has {row.running:,} running jobs; cancel them or wait, then delete it"
        )
    if not force:
        _refuse_jobs(mill, row)
    deleted, idle = 0, Filter(states=frozenset(State) - {State.RUNNING}, queue=name)
    while force and (records := broker.find(idle, _PAGE).records):
        deleted += sum(broker.delete([record.envelope.id for record in records]))
    if force:
        forget_purges(broker, name)
    if not broker.forget_queue(name):
        raise QueueHasJobs(f"queue {name!r} got a new job and is not deleted; try again")
    if Feature.TOPICS in broker.features:
        unbind_all(broker, name)
    return deleted


def no_such_queue(name: str, known: Iterable[str]) -> TidemillError:
    """The error for a name that no queue has."""
    return TidemillError(f"no queue has the name {name!r} here; {hint(name, known)}")


def _row(mill: Runtime, name: str) -> QueueStats:
    rows = {row.name: row for row in mill.broker.stats()}
    if name not in rows:
        raise no_such_queue(name, rows)
    return rows[name]


def _refuse_jobs(mill: Runtime, row: QueueStats) -> None:
    if row.size:
        raise QueueHasJobs(
            f"queue {row.name!r} has {row.size:,} unfinished jobs; purge it first, or delete it "
            "with force, which deletes its jobs, too"
        )
    if mill.broker.find(Filter(queue=row.name), 1).records:
        raise QueueHasJobs(
            f"queue {row.name!r} keeps finished jobs; delete it with force, which deletes them, too"
        )
