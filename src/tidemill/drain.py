"""All that a broker carries into a store, or to another carrier.

Nothing can be closed there, so nothing is sealed: piece by piece is stored, and then forgotten
where it was. Killed in between, the next call meets such jobs again, and finds them stored. A
carrier cannot look what it has, so there they are a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tidemill.brokers.base import Broker, Departure, Feature, need
from tidemill.brokers.draining import draining
from tidemill.clock import new_id
from tidemill.crash import point
from tidemill.job import Record
from tidemill.moved import Moved

__all__ = ["drain"]

_ROOM = 1000
"""Numbers that are reserved in the store beside those of the jobs that are there at first."""


def drain(
    source: Broker,
    target: Broker,
    progress: Moved,
    tell: Callable[[Moved], None],
    queues: Collection[str] = (),
) -> None:
    """Have the target store all that the source carries, also in queues it has not heard of.

    Raises:
        FeatureMissing: the target ends with this process, and all it would have with it.
    """
    scheme = source.url.split("://", 1)[0]
    need(target, Feature.DURABLE, f"a move from {scheme}://")
    contents = draining(source, queues)
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
    """Jobs that come to the target, one behind the other."""

    def __init__(self, target: Broker, room: int) -> None:
        self._target = target
        self._room = room
        self._new = 0
        self._stays: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._departure = Departure(new_id(), self._target.url, self._room)
        self._number = 0

    def store(self, records: Sequence[Record], progress: Moved) -> list[bool]:
        """Store what is not there yet: of each record, whether it is there now."""
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
    """Whether two records of one id are of one job."""
    if one is None:
        return False
    a, b = one.envelope, other.envelope
    return (a.queue, a.task, a.body) == (b.queue, b.task, b.body)
