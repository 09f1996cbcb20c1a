"""Give leases to the carrier (a message broker), and take them back: see :mod:`.carrier_table`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tidemill.brokers.lmdb.carrier_table import carried_in
from tidemill.brokers.lmdb.claim import put_deadline
from tidemill.brokers.lmdb.layout import CARRIED_VALUE, LEASE_KEY, LEASE_VALUE, MICRO, READY_KEY
from tidemill.brokers.lmdb.record import EXPIRED, HEADER, READY, TOO_LATE, Flag, Stored
from tidemill.brokers.lmdb.transfer import departure_of
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.job import DEFAULT_TTR


def carry(commit: Transitions, lease: bytes, token: int) -> bool:
    """Give the carrier a lease that the caller has removed.

    Returns False when the job must go back to its queue.
    """
    job_id = lease[LEASE_VALUE.size :]
    data = commit.txn.get(job_id, db=commit.t.job)
    assert data is not None
    (_, flags, _, _, _, _, line, _, _, expires, _, _, _, _, _) = HEADER.unpack_from(data)
    if flags & Flag.CANCELLING or 0 < expires <= commit.now or departure_of(commit) is not None:
        return False
    key, row = lease[: READY_KEY.size], commit.row_of(line)
    leased = LEASE_VALUE.unpack_from(lease)[3]
    charged = commit.now - commit.wall + leased
    if row.has_limit:
        commit.limiters.hold(row, charged)
    # The key of this lease may end with the turn of the partition. The table of the carrier has the
    # sequence number of the job instead.
    if flags & Flag.LIMITED:
        stored = Stored(job_id, data)
        commit.partitions.hold(stored, token, charged)
        key = stored.head.ready_key
    row.carried += 1
    row.dirty = True
    value = CARRIED_VALUE.pack(token, leased) + job_id
    commit.txn.put(key, value, db=commit.t.carried)
    return True


def take(
    commit: Transitions, owner: int, leases: Sequence[tuple[int, str]], *, deadlines: bool
) -> list[bool]:
    """Move leases, named by token and id, from the carrier to the owner.

    The answer for a lease is False when the carrier has no such lease.
    """
    departs = bool(leases) and departure_of(commit) is not None
    return [_take_one(commit, owner, *lease, deadlines, departs) for lease in leases]


def _take_one(
    commit: Transitions, owner: int, token: int, job_id: str, deadlines: bool, departs: bool
) -> bool:
    stored = commit.load(job_id.encode()) if job_id else None
    if stored is None or stored.head.state != READY:
        return False
    head, row = stored.head, commit.row_of(stored.head.line)
    key = head.ready_key
    value = commit.txn.get(key, db=commit.t.carried) if row.carried else None
    if value is None or CARRIED_VALUE.unpack_from(value)[0] != token:
        return False
    if 0 < head.expires <= commit.now:
        commit.unplace(stored)
        commit.end(stored, EXPIRED, stored.tail, TOO_LATE)
        return False
    if departs or row.paused:
        _give_back(commit, stored)
        return False
    commit.txn.delete(key, db=commit.t.carried)
    row.carried -= 1
    row.dirty = True
    if row.has_limit:
        commit.limiters.let_go(row, starts=True)
    if head.flags & Flag.LIMITED:
        commit.partitions.let_go(stored, starts=True)
    deadline = 0
    if deadlines:
        deadline = commit.now + int((head.ttr if head.ttr > 0 else DEFAULT_TTR) * MICRO)
        put_deadline(commit, deadline, owner, token)
    lease = LEASE_VALUE.pack(*READY_KEY.unpack(key), commit.wall, deadline) + stored.id
    commit.txn.put(LEASE_KEY.pack(owner, token), lease, db=commit.t.lease)
    return True


def recall(commit: Transitions, most: int) -> int:
    """Give back up to ``most`` carried jobs; return how many."""
    ids = list(itertools.islice(carried_in(commit.txn, commit.t), most))
    for job_id in ids:
        stored = commit.load(job_id)
        assert stored is not None
        _give_back(commit, stored)
    return len(ids)


def _give_back(commit: Transitions, stored: Stored) -> None:
    commit.unplace(stored)
    commit.place(stored, 0, 0)
