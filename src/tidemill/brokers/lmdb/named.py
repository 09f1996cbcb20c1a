"""Jobs by name: numbers for them, and leasing one."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.lmdb.acts import kick
from tidemill.brokers.lmdb.layout import NUMBER
from tidemill.brokers.lmdb.leases import Leasing
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.record import FAILED, READY, SCHEDULED, Flag
from tidemill.brokers.lmdb.roster import is_listed
from tidemill.brokers.lmdb.timers import come_due
from tidemill.job import Lease

__all__ = ["lease_named", "numbers"]


def numbers(moves: Moves, count: int) -> int:
    """The first of so many numbers that are nobody else's."""
    key = moves.store.key("numbers")
    data = moves.txn.get(key)
    last = NUMBER.unpack(data)[0] if data else 0
    moves.txn.put(key, NUMBER.pack(last + count))
    return int(last) + 1


def lease_named(moves: Moves, owner: int, job_ids: Sequence[str]) -> list[Lease | None]:
    """Lease jobs that are ready, or can be made so."""
    if not is_listed(moves, owner):
        return [None] * len(job_ids)
    come_due(moves)
    return [_lease_one(moves, owner, job_id) for job_id in job_ids]


def _lease_one(moves: Moves, owner: int, job_id: str) -> Lease | None:
    stored = moves.load(job_id.encode()) if job_id else None
    if stored is None or stored.head.flags & Flag.LIMITED:
        return None
    if stored.head.state in (SCHEDULED, FAILED):
        kick(moves, [job_id])
        stored = moves.load(stored.id)
        assert stored is not None
    head, row = stored.head, moves.row_of(stored.head.line)
    if head.state != READY or not moves.txn.delete(head.ready_key, db=moves.t.ready):
        return None  # it runs, has ended, or lies with the carrier
    row.ready -= 1
    row.dirty = True
    leasing = Leasing(moves, owner, deadlines=True)
    if not leasing.lend(row, head.ready_key, stored.id, stored.packed()):
        return None  # it had expired
    if row.gated:
        moves.gates.take(row, 1)
    return leasing.leases[0]
