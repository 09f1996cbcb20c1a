"""Jobs of unknown tasks: set aside in an index by task, brought back, and shown.

Keys of the table ``said``::

    j·task·line·rank·seq → id      the jobs; the task is a digest of its name
    t·task → number                the tasks that have jobs here
    u·number → name                the same, in the order in which they came
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import lmdb

from tidemill.brokers.base import Reply, Want
from tidemill.brokers.lmdb.layout import DUE_JOB, DUE_KEY, DUE_UNKNOWN, NUMBER
from tidemill.brokers.lmdb.record import (
    READY,
    SCHEDULED,
    Flag,
    Stored,
    Tail,
    envelope_of,
    task_of,
)
from tidemill.brokers.lmdb.wake import ALL, TASKS, UNKNOWN
from tidemill.brokers.unknown import COUNTED_MOST, TOLD_MOST, UnknownTask

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.leases import Leasing
    from tidemill.brokers.lmdb.moves import Moves
    from tidemill.brokers.lmdb.store import Store

__all__ = [
    "ASIDE",
    "Back",
    "bring_back",
    "jobs_aside",
    "lend",
    "put_aside",
    "show",
    "tell",
    "undo",
    "unschedule",
]

_JOB = struct.Struct(">c16sIIQ")  # j, task, line, rank, sequence
_LINE = struct.Struct(">c16sI")
_TASK = struct.Struct(">c16s")
_NAME = struct.Struct(">cQ")  # u, number
_J, _T, _U = b"j", b"t", b"u"

ASIDE = _J
"""What the keys of jobs set aside begin with; their ids are the values."""

Back = tuple[bytes, int]
"""A job that was brought back: its id, and the store time at which it would have failed."""


def _digest(task: str) -> bytes:
    return hashlib.blake2b(task.encode(), digest_size=16).digest()


def _key(stored: Stored, task: bytes) -> bytes:
    head = stored.head
    return _JOB.pack(_J, task, head.line, head.rank, head.seq)


# -- in and out ----------------------------------------------------------------------------------


def put_aside(moves: Moves, stored: Stored, tail: Tail, until: int) -> None:
    """Set aside a job that is nowhere, and wake those that may know its task.

    The job fails at the store time ``until``, unless that is 0.
    """
    new = _enter(moves, stored, tail, until)
    bells = moves.store.bells
    if bells.anyone():
        bells.ring(TASKS | UNKNOWN if new else UNKNOWN, ALL)


def _enter(moves: Moves, stored: Stored, tail: Tail | None, until: int) -> bool:
    """Write a job into the index; True when it is the first of its task."""
    head, name = stored.head, task_of(stored)
    task = _digest(name)
    head.state, head.due = SCHEDULED, until
    head.flags = head.flags & ~Flag.WALL | Flag.UNKNOWN
    if until:
        moves.txn.put(DUE_KEY.pack(0, until, DUE_UNKNOWN, head.seq), stored.id, db=moves.t.due)
        moves.untimed = True
    moves.txn.put(_key(stored, task), stored.id, db=moves.t.said)
    moves.count(moves.row_of(head.line), SCHEDULED, +1)
    moves.save(stored, tail)
    if moves.txn.get(_TASK.pack(_T, task), db=moves.t.said) is not None:
        return False
    number = moves.next_number()
    moves.txn.put(_TASK.pack(_T, task), NUMBER.pack(number), db=moves.t.said)
    moves.txn.put(_NAME.pack(_U, number), name.encode(), db=moves.t.said)
    return True


def unschedule(moves: Moves, stored: Stored) -> None:
    """Take a scheduled job, or one that is set aside, out of where it stands."""
    head = stored.head
    if not head.flags & Flag.UNKNOWN:
        clock = 1 if head.flags & Flag.WALL else 0
        moves.txn.delete(DUE_KEY.pack(clock, head.due, DUE_JOB, head.seq), db=moves.t.due)
        return
    task = _digest(task_of(stored))
    moves.txn.delete(_key(stored, task), db=moves.t.said)
    if head.due:
        moves.txn.delete(DUE_KEY.pack(0, head.due, DUE_UNKNOWN, head.seq), db=moves.t.due)
    head.flags, head.due = head.flags & ~Flag.UNKNOWN, 0
    cursor, prefix = moves.txn.cursor(moves.t.said), _TASK.pack(_J, task)
    if not (cursor.set_range(prefix) and cursor.key().startswith(prefix)):  # it was the last
        number = moves.txn.pop(_TASK.pack(_T, task), db=moves.t.said)
        assert number is not None
        moves.txn.delete(_U + number, db=moves.t.said)


# -- for a worker that knows ---------------------------------------------------------------------


def bring_back(moves: Moves, want: Want, room: int) -> list[Back]:
    """Make the first jobs ready that a want knows: of each queue as many as there is room for."""
    lines: dict[int, list[tuple[int, int, bytes]]] = {}
    for name in dict.fromkeys(want.knows):
        for line, rank, seq, job_id in _first_of(moves, _digest(name), want, room):
            lines.setdefault(line, []).append((rank, seq, job_id))
    back: list[Back] = []
    for line, entries in lines.items():
        row = moves.row_of(line)
        for _, _, job_id in () if row.paused else heapq.nsmallest(room, entries):
            stored = moves.load(job_id)
            assert stored is not None
            until = stored.head.due
            moves.unplace(stored)
            moves.place(stored, 0, 0)
            if not stored.head.flags & Flag.LIMITED:
                moves.ring(row, 0, -1)  # it is taken, or set aside again
            back.append((job_id, until))
    return back


def _first_of(
    moves: Moves, task: bytes, want: Want, room: int
) -> Iterator[tuple[int, int, int, bytes]]:
    """(line, rank, sequence, id) of the first jobs of a task in each wanted queue."""
    rows = [moves.existing_row(name) for name in want.queues]
    lines = [row.lines[0] for row in rows if row] if rows else _lines_of(moves, task)
    cursor = moves.txn.cursor(moves.t.said)
    for line in lines:
        prefix = _LINE.pack(_J, task, line)
        found = cursor.set_range(prefix)
        for _ in range(room):
            if not found or not cursor.key().startswith(prefix):
                break
            _, _, _, rank, seq = _JOB.unpack(cursor.key())
            yield line, rank, seq, cursor.value()
            found = cursor.next()


def _lines_of(moves: Moves, task: bytes) -> list[int]:
    """The lines that have jobs of a task set aside."""
    cursor, prefix, lines = moves.txn.cursor(moves.t.said), _TASK.pack(_J, task), list[int]()
    found = cursor.set_range(prefix)
    while found and cursor.key().startswith(prefix):
        lines.append(_JOB.unpack(cursor.key())[2])
        found = cursor.set_range(_LINE.pack(_J, task, lines[-1] + 1))
    return lines


def lend(moves: Moves, leasing: Leasing, back: list[Back], count: int) -> None:
    """Lease jobs that were brought back, for an owner that takes no others.

    Suspects, and jobs under a limit, are left to those that take what is ready.
    """
    for job_id, _ in back:
        stored = moves.load(job_id)
        if len(leasing.leases) >= count or stored is None:
            return
        head, row = stored.head, moves.row_of(stored.head.line)
        if head.losses or row.gated or head.flags & Flag.LIMITED:
            continue
        moves.txn.delete(head.ready_key, db=moves.t.ready)
        row.ready -= 1
        leasing.lend(row, head.ready_key, job_id, stored.packed())


def undo(moves: Moves, want: Want, back: list[Back]) -> None:
    """Set aside again what was not leased; jobs under a limit stay in their line."""
    for job_id, until in back:
        stored = moves.load(job_id)
        if stored is None or stored.head.state != READY:
            continue
        head, row = stored.head, moves.row_of(stored.head.line)
        if head.flags & Flag.LIMITED or row.gated or (head.losses and not want.tasks):
            continue
        if moves.txn.delete(head.ready_key, db=moves.t.ready):
            moves.count(row, READY, -1)
            _enter(moves, stored, None, until)


def tell(moves: Moves, want: Want, reply: Reply) -> None:
    """Name the tasks with jobs set aside that are new to an owner that asks."""
    if want.told < 0:
        return
    cursor, reply.told = moves.txn.cursor(moves.t.said), want.told
    found = cursor.set_range(_NAME.pack(_U, want.told + 1))
    while found and cursor.key()[:1] == _U:
        if len(reply.unknown) == TOLD_MOST:
            reply.next_due = 0.0
            return
        reply.told = _NAME.unpack(cursor.key())[1]
        reply.unknown.append(cursor.value().decode())
        found = cursor.next()


# -- looking -------------------------------------------------------------------------------------


def jobs_aside(
    txn: lmdb.Transaction[bytes], said: lmdb._Database, prefix: bytes = _J
) -> Iterator[tuple[int, int, bytes]]:
    """(line, sequence, id) of all jobs that are set aside."""
    cursor = txn.cursor(said)
    found = cursor.set_range(prefix)
    while found and cursor.key().startswith(prefix):
        _, _, line, _, seq = _JOB.unpack(cursor.key())
        yield line, seq, cursor.value()
        found = cursor.next()


def show(store: Store, txn: lmdb.Transaction[bytes]) -> list[UnknownTask]:
    """Return the jobs set aside, by task."""
    cursor, names = txn.cursor(store.tables.said), list[str]()
    found = cursor.set_range(_U)
    while found and cursor.key()[:1] == _U:
        names.append(cursor.value().decode())
        found = cursor.next()
    return [_shown(store, txn, name) for name in sorted(names)]


def _shown(store: Store, txn: lmdb.Transaction[bytes], name: str) -> UnknownTask:
    lines, oldest, count = set[int](), (1 << 64, b""), 0
    for line, seq, job_id in jobs_aside(txn, store.tables.said, _TASK.pack(_J, _digest(name))):
        lines.add(line)
        oldest = min(oldest, (seq, job_id))
        count += 1
        if count >= COUNTED_MOST:
            break
    data = txn.get(oldest[1], db=store.tables.job) if oldest[1] else None
    created = envelope_of(Stored(oldest[1], data)).created if data else 0.0
    found = [txn.get(store.key(f"n/{line >> 1}")) for line in lines]
    return UnknownTask(name, sorted(row.decode() for row in found if row), count, created)
