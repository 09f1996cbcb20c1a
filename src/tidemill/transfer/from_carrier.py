"""Move all jobs of a message broker into a store, or into another message broker.

A message broker cannot be closed, so its queues may change during the move. Each piece is stored in
the target, and then deleted from the source. After a kill in between, the next call reads these
jobs again, and skips them because the target has them. A message broker as the target cannot look
up jobs, so the target then has these jobs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tidemill.brokers.contract.carried_jobs import carried_jobs
from tidemill.brokers.contract.features import Feature, need
from tidemill.brokers.contract.store import Store
from tidemill.brokers.contract.transfer import Departure
from tidemill.core.clock import new_id
from tidemill.core.crash_points import point
from tidemill.core.job import Record
from tidemill.transfer.progress import Moved

_ROOM = 1000
"""Sequence numbers to reserve in the target, beyond the number of jobs at the start."""


def empty_carrier(
    source: Store,
    target: Store,
    progress: Moved,
    tell: Callable[[Moved], None],
    queues: Collection[str] = (),
) -> None:
    """Move all jobs of the source to the target; ``queues`` may name queues unknown to the source.

    Raises:
        FeatureMissing: the target would lose the jobs when this process ends.
    """
    scheme = source.url.split("://", 1)[0]
    need(target, Feature.DURABLE, f"a move from {scheme}://")
    contents = carried_jobs(source, queues)
    progress.total = contents.remains().jobs
    tell(progress)
    arrival = _Arrival(target, progress.total + _ROOM)
    strange = dict[str, None]()
    for taken in contents.take():
        taken.stored = arrival.store(taken.records, progress)
        strange |= dict.fromkeys(taken.strange)
        progress.total = max(progress.total, progress.done)
        if taken.remains is not None:
            progress.remaining, progress.consumers = taken.remains.jobs, taken.remains.consumers
            progress.unanswered = taken.remains.unanswered
        tell(progress)
    progress.total = progress.done
    progress.strange = list(strange)


class _Arrival:
    """Jobs that arrive at the target, one after the other."""

    def __init__(self, target: Store, room: int) -> None:
        self._target = target
        self._room = room
        self._new = 0
        self._stays: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._departure = Departure(new_id(), self._target.url, self._room)
        self._number = 0

    def store(self, records: Sequence[Record], progress: Moved) -> list[bool]:
        """Store the records that are missing; for each record, True when the target has it now."""
        if not records:
            return []
        first: dict[str, Record] = {}
        for record in records:
            first.setdefault(record.envelope.id, record)
        self._count(first.values())
        point("move.adopting")
        taken = self._target.adopt(self._departure, list(first.values()), "")
        point("move.adopted")
        new = {job_id for job_id, here in zip(first, taken, strict=True) if here}
        here = self._is_here([job_id for job_id in first if job_id not in new]) | {
            job_id: first[job_id] for job_id in new
        }
        stored = [_is_same(here.get(record.envelope.id), record) for record in records]
        self._new += len(new)
        self._stays |= {r.envelope.id for r, done in zip(records, stored, strict=True) if not done}
        progress.stayed = sorted(self._stays)
        progress.done = self._new + len(self._stays)
        progress.repeated += sum(stored) - len(new)
        return stored

    def _count(self, records: Collection[Record]) -> None:
        if self._number + len(records) > self._room:
            self._begin()
        for record in records:
            self._number += 1
            record.seq = self._number

    def _is_here(self, ids: Sequence[str]) -> dict[str, Record]:
        found = self._target.wait_for(ids, 0) if ids else []
        return {record.envelope.id: record for record in found if record is not None}


def _is_same(one: Record | None, other: Record) -> bool:
    """True when two records of one id are the same job."""
    if one is None:
        return False
    a, b = one.envelope, other.envelope
    return (a.queue, a.task, a.body) == (b.queue, b.task, b.body)
