"""Numbers for jobs, and leases of jobs by id."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.lmdb.admin import kick
from tidemill.brokers.lmdb.claim import Leasing
from tidemill.brokers.lmdb.due import come_due
from tidemill.brokers.lmdb.layout import NUMBER
from tidemill.brokers.lmdb.owner_table import is_listed
from tidemill.brokers.lmdb.partition_claim import PartitionClaims
from tidemill.brokers.lmdb.record import FAILED, READY, SCHEDULED, Flag
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.job import Lease


def numbers(commit: Transitions, count: int) -> int:
    """Reserve ``count`` numbers for one caller; return the first of them."""
    key = commit.store.key("numbers")
    data = commit.txn.get(key)
    last = NUMBER.unpack(data)[0] if data else 0
    commit.txn.put(key, NUMBER.pack(last + count))
    return int(last) + 1


def lease_named(commit: Transitions, owner: int, job_ids: Sequence[str]) -> list[Lease | None]:
    """Lease jobs that are ready, or can be made ready."""
    if not is_listed(commit, owner):
        return [None] * len(job_ids)
    come_due(commit)
    return [_lease_one(commit, owner, job_id) for job_id in job_ids]


def _lease_one(commit: Transitions, owner: int, job_id: str) -> Lease | None:
    stored = commit.load(job_id.encode()) if job_id else None
    if stored is None or stored.head.flags & Flag.LIMITED:
        return None
    if stored.head.state in (SCHEDULED, FAILED):
        kick(commit, [job_id])
        stored = commit.load(stored.id)
        assert stored is not None
    head, row = stored.head, commit.row_of(stored.head.line)
    if head.state != READY or not commit.txn.delete(head.ready_key, db=commit.t.ready):
        return None  # the job runs or has ended
    row.ready -= 1
    row.dirty = True
    leasing = Leasing(commit, owner, deadlines=True)
    claims = PartitionClaims(commit, head.line)
    if not leasing.lend(row, head.ready_key, stored.id, stored.packed(), claims):
        return None  # the job had expired
    if row.has_limit:
        commit.limiters.take(row, 1)
    return leasing.leases[0]
