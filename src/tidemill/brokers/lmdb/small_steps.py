"""Small steps: while a store takes no puts, its owners settle and lease few jobs at a time.

A commit writes each changed page to a free page. Only the commit after the next one can use the old
page. If a commit took nearly all free pages, too few would be left for the next commit, and no
further commit would fit. So each step may take about a third of the free pages. A lease takes up
room until its job ends, so the number of leases is bounded, too.
"""

from __future__ import annotations

import msgspec

from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.lmdb.layout import LEASE_KEY
from tidemill.brokers.lmdb.owners import LocalOwner
from tidemill.brokers.lmdb.store import Store
from tidemill.core.errors import StoreFull

HELD_MOST = 4
"""An owner may hold the leases of this many small steps, or as many leases as it has slots."""


def split(store: Store, step: Step) -> tuple[list[Step], Step]:
    """The first parts of a step, and the rest; no parts unless the store needs small steps.

    Each verdict is settled as a whole. When a later part fails, the verdicts of an earlier part
    stay settled. The owner hands these verdicts in again, and the answer says that their leases are
    gone. A step with a serial is never split, since the store remembers its answer as a whole. If
    such a step is too large, it is refused.

    Raises:
        StoreFull: a step with a serial has too many verdicts; its owner must send smaller steps.
    """
    if not step.verdicts or not store.room.is_short:
        return [], step
    most = store.room.jobs_in_a_step()
    if len(step.verdicts) <= most:
        return [], step
    if step.serial:
        raise StoreFull(
            f"the store in {store.folder} is nearly full and settles {most} jobs at a time; finish "
            "or delete jobs, or make room"
        )
    *starts, last = range(0, len(step.verdicts), most)
    parts = [Step(step.owner, step.verdicts[start : start + most]) for start in starts]
    return parts, msgspec.structs.replace(step, verdicts=step.verdicts[last:])


def fit(store: Store, local_owner: LocalOwner, step: Step) -> Step:
    """The step, with fewer leases if the store takes no puts now."""
    if step.want is None or not step.want.count or not store.room.is_short:
        return step
    most = store.room.jobs_in_a_step()
    held = _count_leases(store, local_owner.number) - len(step.verdicts)
    room = max(HELD_MOST * most, local_owner.owner.concurrency) - max(0, held)
    count = min(step.want.count, most - len(step.verdicts), room)
    return msgspec.structs.replace(
        step, want=msgspec.structs.replace(step.want, count=max(0, count))
    )


def _count_leases(store: Store, owner: int) -> int:
    count, beginning = 0, LEASE_KEY.pack(owner, 0)
    with store.reading_txn() as txn, txn.cursor(store.tables.lease) as cursor:
        found = cursor.set_range(beginning)
        while found and LEASE_KEY.unpack(cursor.key())[0] == owner:
            count += 1
            found = cursor.next()
    return count
