"""The table of leases that lie with the carrier.

The table has the same keys as the ready table. So the key of a lease follows from the header of its
job, and the leases of a line are one range. The row of a queue counts carried jobs among the
running jobs, as limits do, and has a separate count of carried jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import lmdb

from tidemill.brokers.lmdb.commit_state import CommitState
from tidemill.brokers.lmdb.layout import CARRIED_VALUE, READY_KEY, Row, Tables
from tidemill.brokers.lmdb.partitions import Partitions
from tidemill.brokers.lmdb.record import RUNNING, Flag, Stored


def is_carried(state: CommitState, stored: Stored) -> bool:
    """True when the carrier has the lease of a ready job; such a job is in no line."""
    head = stored.head
    if not state.row_of(head.line).carried:
        return False
    return state.txn.get(head.ready_key, db=state.t.carried) is not None


def leave_carrier(partitions: Partitions, stored: Stored, row: Row) -> bool:
    """Take a job from the carrier, as if never leased; False if the carrier has no such job."""
    state = partitions.state
    value = state.txn.pop(stored.head.ready_key, db=state.t.carried)
    if value is None:
        return False
    row.carried -= 1
    state.count(row, RUNNING, -1)
    if row.has_limit:
        partitions.limiters.let_go(row, starts=False)
    if stored.head.flags & Flag.LIMITED:
        partitions.let_go(stored, starts=False)
    return True


def carried_in(
    txn: lmdb.Transaction[bytes], tables: Tables, lines: Sequence[int] | None = None
) -> Iterator[bytes]:
    """Ids of carried jobs, of all lines or of some lines."""
    for prefix in [b""] if lines is None else [READY_KEY.pack(n, 0, 0)[:4] for n in lines]:
        cursor = txn.cursor(tables.carried)
        found = cursor.set_range(prefix) if prefix else cursor.first()
        while found and cursor.key().startswith(prefix):
            yield cursor.value()[CARRIED_VALUE.size :]
            found = cursor.next()
