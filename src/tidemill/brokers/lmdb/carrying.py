"""Leases are handed over to the carrier, taken from it and called back. See :mod:`.carried`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tidemill.brokers.base import DEFAULT_TTR
from tidemill.brokers.lmdb.carried import carried_in
from tidemill.brokers.lmdb.layout import CARRIED_VALUE, LEASE_KEY, LEASE_VALUE, MICRO, READY_KEY
from tidemill.brokers.lmdb.leases import put_deadline
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.moving import departure_of
from tidemill.brokers.lmdb.record import EXPIRED, HEADER, READY, TOO_LATE, Flag, Stored

__all__ = ["carry", "recall", "take"]


def carry(moves: Moves, lease: bytes, token: int) -> bool:
    """A lease that is gone is the carrier's. False: it is better given back."""
    job_id = lease[LEASE_VALUE.size :]
    data = moves.txn.get(job_id, db=moves.t.job)
    assert data is not None
    (_, flags, _, _, _, _, line, _, _, expires, _, _, _, _, _) = HEADER.unpack_from(data)
    if flags & Flag.CANCELLING or 0 < expires <= moves.now or departure_of(moves) is not None:
        return False
    key, row = lease[: READY_KEY.size], moves.row_of(line)
    leased = LEASE_VALUE.unpack_from(lease)[3]
    charged = moves.now - moves.wall + leased
    if row.gated:
        moves.gates.hold(row, charged)
    if flags & Flag.LIMITED:  # it stood where the turn of its lane was
        stored = Stored(job_id, data)
        moves.lanes.hold(stored, token, charged)
        key = stored.head.ready_key
    row.carried += 1
    row.dirty = True
    value = CARRIED_VALUE.pack(token, leased) + job_id
    moves.txn.put(key, value, db=moves.t.carried)
    return True


def take(
    moves: Moves, owner: int, leases: Sequence[tuple[int, str]], *, deadlines: bool
) -> list[bool]:
    """The carrier's leases, named by token and id, become the owner's. False: it has none such."""
    departs = bool(leases) and departure_of(moves) is not None
    return [_take_one(moves, owner, *lease, deadlines, departs) for lease in leases]


def _take_one(
    moves: Moves, owner: int, token: int, job_id: str, deadlines: bool, departs: bool
) -> bool:
    stored = moves.load(job_id.encode()) if job_id else None
    if stored is None or stored.head.state != READY:
        return False
    head, row = stored.head, moves.row_of(stored.head.line)
    key = head.ready_key
    value = moves.txn.get(key, db=moves.t.carried) if row.carried else None
    if value is None or CARRIED_VALUE.unpack_from(value)[0] != token:
        return False
    if 0 < head.expires <= moves.now:
        moves.unplace(stored)
        moves.end(stored, EXPIRED, stored.tail, TOO_LATE)
        return False
    if departs or row.paused:
        _give_back(moves, stored)
        return False
    moves.txn.delete(key, db=moves.t.carried)
    row.carried -= 1
    row.dirty = True
    if row.gated:
        moves.gates.let_go(row, starts=True)
    if head.flags & Flag.LIMITED:
        moves.lanes.let_go(stored, starts=True)
    deadline = 0
    if deadlines:
        deadline = moves.now + int((head.ttr if head.ttr > 0 else DEFAULT_TTR) * MICRO)
        put_deadline(moves, deadline, owner, token)
    lease = LEASE_VALUE.pack(*READY_KEY.unpack(key), moves.wall, deadline) + stored.id
    moves.txn.put(LEASE_KEY.pack(owner, token), lease, db=moves.t.lease)
    return True


def recall(moves: Moves, most: int) -> int:
    """Give back up to ``most`` of them; how many that were."""
    ids = list(itertools.islice(carried_in(moves.txn, moves.t), most))
    for job_id in ids:
        stored = moves.load(job_id)
        assert stored is not None
        _give_back(moves, stored)
    return len(ids)


def _give_back(moves: Moves, stored: Stored) -> None:
    moves.unplace(stored)
    moves.place(stored, 0, 0)
