"""Purges that keep their jobs as cancelled jobs, and the restoring of these jobs.

Each piece of a purge is one commit. The error of each purged job has the mark of the purge. After a
kill in the middle of a purge, some jobs are purged and the others are still in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tidemill.brokers.contract.admin import KeptPurge
from tidemill.brokers.lmdb.layout import DUE_EXPIRY, DUE_KEY
from tidemill.brokers.lmdb.purge import ready_ids, still_unready, unready_ids
from tidemill.brokers.lmdb.record import CANCELLED, WAITING, Flag, Stored, key_of
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.brokers.lmdb.unique import Key, find_key, put_key
from tidemill.brokers.lmdb.workflows import (
    finish_falls,
    flow,
    has_parents,
    may_wait_anew,
    revive,
    wait_anew,
)
from tidemill.core.crash_points import point
from tidemill.core.errors import StoreFull
from tidemill.core.purge_mark import check_purge_id, had_waited, is_of_purge, purged

_MOST, _MOST_BYTES = 1000, 4 << 20
"""The most jobs purged in one commit, and the most bytes. A single job may be larger."""

_ROOM = 400
"""Bytes that a purge may add to each job: its error, and its entry in the table of pruning."""

_Act = Callable[[Callable[[Transitions], int]], int]


def purge_kept(commit: _Act, store: Store, queue: str, purge_id: str) -> KeptPurge:
    """Cancel the jobs of a queue that do not run, in several commits, while there is room."""
    check_purge_id(purge_id)
    number = 0
    for some in _pieces(unready_ids(store, queue)):
        piece = partial(_keep_some, queue=queue, purge_id=purge_id, unready=some)
        batch = 1
        while batch:
            try:
                batch = commit(piece)
            except StoreFull:
                return KeptPurge(number, is_whole=False)
            point("purge.piece")
            number += batch
    return KeptPurge(number)


def _pieces(unready: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Lists of unready jobs, and then an empty list, which stands for the ready jobs.

    Unready jobs go first. Otherwise the purge of a job would end the jobs that wait for it.
    """
    for first in range(0, len(unready), _MOST):
        yield unready[first : first + _MOST]
    yield ()


def _keep_some(commit: Transitions, queue: str, purge_id: str, unready: Sequence[bytes]) -> int:
    """Cancel some of the given unready jobs of a queue, or some ready jobs; return how many.

    Raises:
        StoreFull: the disk has no room for the cancelled jobs.
    """
    row = commit.existing_row(queue)
    if row is None:
        return 0
    commit.sync()
    ids = still_unready(commit, row, unready) if unready else ready_ids(commit, row, _MOST)
    ids = _that_fit(commit, ids)
    # Read each job as late as possible: the end of an earlier job may change it.
    jobs = (commit.load(job_id) for job_id in ids)
    number = 0
    for stored in jobs:
        if stored is None:
            continue
        number += 1
        waited = stored.head.state == WAITING and has_parents(commit, stored)
        commit.unplace(stored)
        commit.end(stored, CANCELLED, stored.tail, purged(purge_id, waited=waited))
    row.cancelled -= number
    row.purged += number
    row.dirty = True
    return number


def _that_fit(commit: Transitions, ids: Sequence[bytes]) -> list[bytes]:
    """The first jobs, as many as one commit takes: the commit writes each whole job again.

    Raises:
        StoreFull: the disk has no room for the cancelled jobs.
    """
    first, size = list[bytes](), 0
    for job_id in ids:
        more = len(commit.txn.get(job_id, db=commit.t.job) or b"") + _ROOM
        if first and size + more > _MOST_BYTES:
            break
        first.append(job_id)
        size += more
    commit.store.room.check(size)
    return first


def restore(commit: Transitions, ids: Sequence[str], purge_id: str) -> list[bool]:
    """Return jobs of a purge to their former states; False for a job that cannot return."""
    finish_falls(commit)
    done = []
    for job_id in ids:
        stored = commit.load(job_id.encode()) if job_id else None
        done.append(stored is not None and _restore(commit, stored, purge_id))
        flow(commit)
    return done


def _restore(commit: Transitions, stored: Stored, purge_id: str) -> bool:
    head, tail = stored.head, stored.tail
    if head.state != CANCELLED or not is_of_purge(tail.error, purge_id):
        return False
    waits = had_waited(tail.error)
    if not _may_take_key(commit, stored):
        return False
    if waits and not may_wait_anew(commit, stored):
        return False
    if head.flags & Flag.KEYED:
        put_key(commit, key_of(stored), Key(stored.id))
    revive(commit, stored)
    if head.expires:
        key = DUE_KEY.pack(0, head.expires, DUE_EXPIRY, head.seq)
        commit.txn.put(key, stored.id, db=commit.t.due)
        commit.untimed = True
    if waits:
        wait_anew(commit, stored)
    else:
        commit.unfinish(stored)
        head.finished, head.prune, tail.error = 0, 0, ""
        commit.place(stored, head.due, head.flags & Flag.WALL, tail)
    return True


def _may_take_key(commit: Transitions, stored: Stored) -> bool:
    """False when another job, unfinished or succeeded, has the key of this job."""
    return not stored.head.flags & Flag.KEYED or find_key(commit, key_of(stored)) is None
