"""The index of jobs of unknown tasks, by task.

Keys of the table ``said``::

    j·task·line·rank·seq → id      the jobs; the task is a digest of its name
    t·task → number                the tasks that have jobs here
    u·number → name                the names of these tasks, in the order in which they came
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

import lmdb

from tidemill.brokers.lmdb.commit_state import CommitState
from tidemill.brokers.lmdb.layout import DUE_JOB, DUE_KEY, DUE_UNKNOWN, NUMBER
from tidemill.brokers.lmdb.record import SCHEDULED, Flag, Stored, Tail, task_of

JOB = struct.Struct(">c16sIIQ")  # j, task, line, rank, sequence
LINE = struct.Struct(">c16sI")
TASK = struct.Struct(">c16s")
NAME = struct.Struct(">cQ")  # u, number
JOB_PREFIX, _TASK_PREFIX, NAME_PREFIX = b"j", b"t", b"u"

ASIDE = JOB_PREFIX
"""The prefix of the keys of jobs set aside; their ids are the values."""


def task_digest(task: str) -> bytes:
    return hashlib.blake2b(task.encode(), digest_size=16).digest()


def _key(stored: Stored, task: bytes) -> bytes:
    head = stored.head
    return JOB.pack(JOB_PREFIX, task, head.line, head.rank, head.seq)


def enter(commit: CommitState, stored: Stored, tail: Tail | None, until: int) -> bool:
    """Write a job into the index; True when no other job of its task is in the index."""
    head, name = stored.head, task_of(stored)
    task = task_digest(name)
    head.state, head.due = SCHEDULED, until
    head.flags = head.flags & ~Flag.WALL | Flag.UNKNOWN
    if until:
        commit.txn.put(DUE_KEY.pack(0, until, DUE_UNKNOWN, head.seq), stored.id, db=commit.t.due)
        commit.untimed = True
    commit.txn.put(_key(stored, task), stored.id, db=commit.t.said)
    commit.count(commit.row_of(head.line), SCHEDULED, +1)
    commit.save(stored, tail)
    if commit.txn.get(TASK.pack(_TASK_PREFIX, task), db=commit.t.said) is not None:
        return False
    number = commit.next_number()
    commit.txn.put(TASK.pack(_TASK_PREFIX, task), NUMBER.pack(number), db=commit.t.said)
    commit.txn.put(NAME.pack(NAME_PREFIX, number), name.encode(), db=commit.t.said)
    return True


def unschedule(commit: CommitState, stored: Stored) -> None:
    """Take a scheduled job, or a job that is set aside, out of its table."""
    head = stored.head
    if not head.flags & Flag.UNKNOWN:
        clock = 1 if head.flags & Flag.WALL else 0
        commit.txn.delete(DUE_KEY.pack(clock, head.due, DUE_JOB, head.seq), db=commit.t.due)
        return
    task = task_digest(task_of(stored))
    commit.txn.delete(_key(stored, task), db=commit.t.said)
    if head.due:
        commit.txn.delete(DUE_KEY.pack(0, head.due, DUE_UNKNOWN, head.seq), db=commit.t.due)
    head.flags, head.due = head.flags & ~Flag.UNKNOWN, 0
    cursor, prefix = commit.txn.cursor(commit.t.said), TASK.pack(JOB_PREFIX, task)
    if not (cursor.set_range(prefix) and cursor.key().startswith(prefix)):
        # No further job of the task is set aside.
        number = commit.txn.pop(TASK.pack(_TASK_PREFIX, task), db=commit.t.said)
        assert number is not None
        commit.txn.delete(NAME_PREFIX + number, db=commit.t.said)


def jobs_aside(
    txn: lmdb.Transaction[bytes], said: lmdb._Database, prefix: bytes = JOB_PREFIX
) -> Iterator[tuple[int, int, bytes]]:
    """(line, sequence, id) of all jobs that are set aside."""
    cursor = txn.cursor(said)
    found = cursor.set_range(prefix)
    while found and cursor.key().startswith(prefix):
        _, _, line, _, seq = JOB.unpack(cursor.key())
        yield line, seq, cursor.value()
        found = cursor.next()
