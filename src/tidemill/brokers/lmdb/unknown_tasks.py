"""Jobs of unknown tasks: set aside in an index by task, brought back, and shown."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import lmdb

from tidemill.brokers.contract.exchange import Reply, Want
from tidemill.brokers.contract.unknown_tasks import MOST_COUNTED, MOST_NAMED, UnknownTask
from tidemill.brokers.lmdb.claim import Leasing
from tidemill.brokers.lmdb.record import READY, Flag, Stored, Tail, envelope_of
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.brokers.lmdb.unknown_task_index import (
    JOB,
    JOB_PREFIX,
    LINE,
    NAME,
    NAME_PREFIX,
    TASK,
    enter,
    jobs_aside,
    task_digest,
)
from tidemill.brokers.lmdb.wakeup import ALL, TASKS, UNKNOWN

Back = tuple[bytes, int]
"""A job that was brought back: its id, and the store time at which it would have failed."""


def put_aside(commit: Transitions, stored: Stored, tail: Tail, until: int) -> None:
    """Set aside a job that is in no table, and wake owners that may know its task.

    The job fails at the store time ``until``, unless ``until`` is 0.
    """
    new = enter(commit, stored, tail, until)
    wakeups = commit.store.wakeups
    if wakeups.anyone():
        wakeups.ring(TASKS | UNKNOWN if new else UNKNOWN, ALL)


# -- for a worker that knows the task ------------------------------------------------------------


def bring_back(commit: Transitions, want: Want, room: int) -> list[Back]:
    """Make the first jobs of known tasks ready: up to ``room`` jobs in each queue."""
    lines: dict[int, list[tuple[int, int, bytes]]] = {}
    for name in dict.fromkeys(want.knows):
        for line, rank, seq, job_id in _first_of(commit, task_digest(name), want, room):
            lines.setdefault(line, []).append((rank, seq, job_id))
    back: list[Back] = []
    for line, entries in lines.items():
        row = commit.row_of(line)
        for _, _, job_id in () if row.paused else heapq.nsmallest(room, entries):
            stored = commit.load(job_id)
            assert stored is not None
            until = stored.head.due
            commit.unplace(stored)
            commit.place(stored, 0, 0)
            if not stored.head.flags & Flag.LIMITED:
                # No hint is needed: this step leases the job or sets it aside again.
                commit.ring(row, 0, -1)
            back.append((job_id, until))
    return back


def _first_of(
    commit: Transitions, task: bytes, want: Want, room: int
) -> Iterator[tuple[int, int, int, bytes]]:
    """(line, rank, sequence, id) of the first jobs of a task in each wanted queue."""
    rows = [commit.existing_row(name) for name in want.queues]
    lines = [row.lines[0] for row in rows if row] if rows else _lines_of(commit, task)
    cursor = commit.txn.cursor(commit.t.said)
    for line in lines:
        prefix = LINE.pack(JOB_PREFIX, task, line)
        found = cursor.set_range(prefix)
        for _ in range(room):
            if not found or not cursor.key().startswith(prefix):
                break
            _, _, _, rank, seq = JOB.unpack(cursor.key())
            yield line, rank, seq, cursor.value()
            found = cursor.next()


def _lines_of(commit: Transitions, task: bytes) -> list[int]:
    """The lines that have jobs of a task set aside."""
    cursor, prefix, lines = (
        commit.txn.cursor(commit.t.said),
        TASK.pack(JOB_PREFIX, task),
        list[int](),
    )
    found = cursor.set_range(prefix)
    while found and cursor.key().startswith(prefix):
        lines.append(JOB.unpack(cursor.key())[2])
        found = cursor.set_range(LINE.pack(JOB_PREFIX, task, lines[-1] + 1))
    return lines


def lend(commit: Transitions, leasing: Leasing, back: list[Back], count: int) -> None:
    """Lease jobs that were brought back, for an owner that takes no other jobs.

    Lost tasks, and jobs under a limit, are left to owners that take ready jobs.
    """
    for job_id, _ in back:
        stored = commit.load(job_id)
        if len(leasing.leases) >= count or stored is None:
            return
        head, row = stored.head, commit.row_of(stored.head.line)
        if head.losses or row.has_limit or head.flags & Flag.LIMITED:
            continue
        commit.txn.delete(head.ready_key, db=commit.t.ready)
        row.ready -= 1
        leasing.lend(row, head.ready_key, job_id, stored.packed())


def undo(commit: Transitions, want: Want, back: list[Back]) -> None:
    """Set aside again the jobs that were not leased; jobs under a limit stay in their line."""
    for job_id, until in back:
        stored = commit.load(job_id)
        if stored is None or stored.head.state != READY:
            continue
        head, row = stored.head, commit.row_of(stored.head.line)
        if head.flags & Flag.LIMITED or row.has_limit or (head.losses and not want.tasks):
            continue
        if commit.txn.delete(head.ready_key, db=commit.t.ready):
            commit.count(row, READY, -1)
            enter(commit, stored, None, until)


def tell(commit: Transitions, want: Want, reply: Reply) -> None:
    """Name the tasks that have jobs set aside, except tasks that earlier replies have named."""
    if want.told < 0:
        return
    cursor, reply.told = commit.txn.cursor(commit.t.said), want.told
    found = cursor.set_range(NAME.pack(NAME_PREFIX, want.told + 1))
    while found and cursor.key()[:1] == NAME_PREFIX:
        if len(reply.unknown) == MOST_NAMED:
            reply.next_due = 0.0
            return
        reply.told = NAME.unpack(cursor.key())[1]
        reply.unknown.append(cursor.value().decode())
        found = cursor.next()


# -- looking -------------------------------------------------------------------------------------


def show(store: Store, txn: lmdb.Transaction[bytes]) -> list[UnknownTask]:
    """Return the jobs set aside, by task."""
    cursor, names = txn.cursor(store.tables.said), list[str]()
    found = cursor.set_range(NAME_PREFIX)
    while found and cursor.key()[:1] == NAME_PREFIX:
        names.append(cursor.value().decode())
        found = cursor.next()
    return [_shown(store, txn, name) for name in sorted(names)]


def _shown(store: Store, txn: lmdb.Transaction[bytes], name: str) -> UnknownTask:
    lines, oldest, count = set[int](), (1 << 64, b""), 0
    for line, seq, job_id in jobs_aside(
        txn, store.tables.said, TASK.pack(JOB_PREFIX, task_digest(name))
    ):
        lines.add(line)
        oldest = min(oldest, (seq, job_id))
        count += 1
        if count >= MOST_COUNTED:
            break
    data = txn.get(oldest[1], db=store.tables.job) if oldest[1] else None
    created = envelope_of(Stored(oldest[1], data)).created if data else 0.0
    found = [txn.get(store.key(f"n/{line >> 1}")) for line in lines]
    return UnknownTask(name, sorted(row.decode() for row in found if row), count, created)
