"""The put of one plain job, as a straight line: most puts store one task that may start at once.

This put makes no :class:`.Transitions`. The put writes the same bytes as :func:`.put.put`, and
leases to a sleeper as :func:`..claim.exchange.hand_over` does. A job under a key, a limit or a time
is not plain. When another job or a setting of the queue matters, this put returns None before it
writes anything. Then the general put goes on in the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lmdb

from tidemill.brokers.lmdb.engine.store import Store
from tidemill.brokers.lmdb.engine.wakeup import LEASED, LOOK, NOTHING, TASKS, bloom, digest
from tidemill.brokers.lmdb.layout import (
    LEASE_KEY,
    LEASE_VALUE,
    MICRO,
    NUMBER,
    READY_KEY,
    Row,
    ids_about,
)
from tidemill.brokers.lmdb.put.put import OVERHEAD, id_taken
from tidemill.brokers.lmdb.record import HEADER, READY
from tidemill.core.crash_points import point
from tidemill.core.envelope import Envelope, encode_envelope
from tidemill.core.job import Placed, Put


def is_plain(jobs: Sequence[Envelope]) -> bool:
    """True for one task that is ready at once, and that needs nothing but its place in a queue."""
    if len(jobs) != 1:
        return False
    job = jobs[0]
    timed = job.delay or job.at or job.expires or job.result_ttl >= 0
    bound = job.key or job.links is not None or job.limit is not None
    return bool(job.task) and not timed and not bound


class PutOne:
    """The put of one plain job; ``micros`` tells the store's time and wall time."""

    __slots__ = ("_job", "_leased", "_micros", "_store")

    def __init__(self, store: Store, micros: Callable[[], tuple[int, int]], job: Envelope) -> None:
        self._store = store
        self._micros = micros
        self._job = job
        self._leased = 0  # the slot of the sleeper that gets the job

    def apply(self, txn: lmdb.Transaction[bytes]) -> list[Put] | None:
        """Store the job; None, and nothing is written, when the general put must decide."""
        store, job, get, put = self._store, self._job, txn.get, txn.put
        tables, key, job_id = store.tables, store.key, job.id.encode()
        row_key, seq_key, order_key = key("q/" + job.queue), key("seq"), key("order")
        stored, last, bounds = get(row_key), get(seq_key), get(order_key)
        if not (stored and last and bounds) or get(key("departure")) is not None:
            return None
        row, (bottom, _, top) = Row.of(job.queue, stored), bounds.partition(b" ")
        _, wall = self._micros()
        in_order = top < job_id < ids_about(wall // MICRO)[1]
        if not in_order or row.paused or row.max_size or row.has_limit:
            return None
        store.room.check(OVERHEAD + len(job.body))
        owner = self._wake_sleeper(row, txn) if store.wakeups.anyone() else 0
        if owner is None:
            return None
        number, line, rank = NUMBER.unpack(last)[0] + 1, row.number * 2, job.rank
        envelope = encode_envelope(job)
        most, size = job.retries.limit + 1, len(envelope)
        times = 0, 0, 0, 0, job.ttr, job.timeout
        header = HEADER.pack(READY, 0, 0, 0, most, rank, line, number, *times, size)
        if not put(job_id, header + envelope, overwrite=False, db=tables.job):
            raise id_taken(job)
        row.accepted += 1
        if owner:
            row.running += 1
            lease = LEASE_VALUE.pack(line, rank, number, wall, 0) + job_id
            number += 1  # the token
            put(LEASE_KEY.pack(owner, number), lease, db=tables.lease)
            point("store.handed")
        else:
            row.ready += 1
            put(READY_KEY.pack(line, rank, number), job_id, db=tables.ready)
        put(order_key, bottom + b" " + job_id)
        put(row_key, row.pack())
        put(seq_key, NUMBER.pack(number))
        return [Put(job.id, Placed.CREATED)]

    def _wake_sleeper(self, row: Row, txn: lmdb.Transaction[bytes]) -> int | None:
        """Wake the first sleeper that wants a task of the queue."""
        # Returns the sleeper's owner if the owner gets the job, and else 0. None leaves the job to
        # the general put: other jobs of the queue may come first, the sleeper may want other queues
        # only, or this process cannot hint the sleeper.
        wakeups, name = self._store.wakeups, row.name
        found = next(wakeups.matching(TASKS, bloom([name]), digest(name)), None)
        if found is None:
            return 0
        slot, certain, waits, owner = found
        room, _, queues = wakeups.want_of(slot) if waits else NOTHING
        wants = room > 0 and (queues is None or row.number in queues)
        takes = wants and txn.get(NUMBER.pack(owner), db=self._store.tables.owner) is not None
        if not certain or (takes and row.ready):
            return None
        if not wakeups.wake(slot, LEASED if takes else LOOK):
            return None
        self._leased = slot if takes else 0
        return owner if takes else 0

    def committed(self) -> None:
        """Tell the sleeper that it has the lease."""
        if self._leased:
            self._store.wakeups.confirm(self._leased)
