"""Keys of jobs. An unfinished job, which may have a successor, or a succeeded job holds a key.

``until`` and ``since`` belong to the successor if there is a successor, else to the holder. A
succeeded job holds its key until the time ``until``. No timer deletes an old key. Readers ignore
it, and a later sweep deletes it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import lmdb

from tidemill.brokers.lmdb.layout import DUE_HELD, DUE_KEY, HELD, MICRO, Tables
from tidemill.brokers.lmdb.record import SUCCEEDED, Stored, key_of
from tidemill.core.envelope import Envelope

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.transitions import Transitions

_TIMES = struct.Struct(">QQ")  # until, since


class Key(NamedTuple):
    """A key as stored; times are the store's, microseconds."""

    holder: bytes  # an unfinished job; empty when only a succeeded job holds the key
    successor: bytes = b""
    until: int = 0  # a succeeded job holds the key until this time
    since: int = 0  # see ``with_last``
    over: bytes = b""  # the job that has succeeded and holds the key

    @classmethod
    def of(cls, data: bytes) -> Key:
        holder, _, rest = data.partition(b"\0")
        if not holder:
            return cls(b"", until=_TIMES.unpack_from(rest)[0], over=rest[_TIMES.size :])
        successor, _, times = rest.partition(b"\0")
        until, since = _TIMES.unpack(times) if times else (0, 0)
        return cls(holder, successor, until, since)

    @property
    def packed(self) -> bytes:
        times = _TIMES.pack(self.until, self.since)
        if not self.holder:
            return b"\0" + times + self.over
        plain = self.holder + b"\0" + self.successor
        return plain + b"\0" + times if self.until or self.since else plain

    def with_last(self, commit: Transitions, job: Envelope, running: bool) -> Key:
        """The key after a put of this job: as the successor of a running job, or as the holder."""
        # A job that replaces another job takes over ``since``, the time of the first put. So
        # ``since`` bounds the wait of a key whose job is replaced again and again
        # (``Unique.max_wait``).
        new, unique = job.id.encode(), job.unique
        key = Key(self.holder, new) if running else Key(new)
        if unique is None:
            return key
        until = commit.now + int(unique.period * MICRO) if unique.period else 0
        since = 0
        if unique.max_wait:
            replaces = self.successor or not running
            since = (self.since if replaces else 0) or commit.now
        return key._replace(until=until, since=since)


NOBODY = Key(b"")


def find_key(commit: Transitions, name: bytes) -> Key | None:
    """The state of a key; None when the key is free."""
    data = commit.txn.get(name, db=commit.t.key)
    if data is None:
        return None
    key = Key.of(data)
    return key if key.holder or key.until > commit.now else None


def put_key(commit: Transitions, name: bytes, key: Key) -> None:
    commit.txn.put(name, key.packed, db=commit.t.key)


def give_up(commit: Transitions, stored: Stored, state: int) -> bytes:
    """Free the key of a job that has ended or was deleted."""
    # Returns the id of the successor that may start now, or nothing.
    name = key_of(stored)
    key = find_key(commit, name)
    if key is None:
        return b""
    if stored.id == key.successor:
        put_key(commit, name, Key(key.holder))
    elif stored.id != key.holder:
        return b""
    elif key.successor:
        put_key(commit, name, Key(key.successor, until=key.until, since=key.since))
        return key.successor
    elif state == SUCCEEDED and key.until > commit.now:
        hold(commit, name, stored, key.until)
    else:
        commit.txn.delete(name, db=commit.t.key)
    return b""


def hold(commit: Transitions, name: bytes, stored: Stored, until: int) -> None:
    """Let a succeeded job keep its key until the time ``until``."""
    put_key(commit, name, Key(b"", until=until, over=stored.id))
    commit.txn.put(DUE_KEY.pack(HELD, until, DUE_HELD, stored.head.seq), name, db=commit.t.due)


def forget_held(commit: Transitions, stored: Stored) -> None:
    """Free the key of a finished job that is deleted, if the job holds the key."""
    name = key_of(stored)
    key = find_key(commit, name)
    if key is not None and key.over == stored.id:
        commit.txn.delete(name, db=commit.t.key)


def sweep_keys(commit: Transitions, most: int) -> int:
    """Forget up to ``most`` keys whose time is over; return how many."""
    if commit.is_sealed:
        return 0
    cursor = commit.txn.cursor(commit.t.due)
    swept = 0
    while swept < most and cursor.set_range(DUE_KEY.pack(HELD, 0, 0, 0)):
        _, until, _, _ = DUE_KEY.unpack(cursor.key())
        if until > commit.now:
            break
        name = cursor.value()
        cursor.delete()
        data = commit.txn.get(name, db=commit.t.key)
        if data is not None:
            key = Key.of(data)
            # Delete the key unless another job has it now.
            if not key.holder and key.until <= commit.now:
                commit.txn.delete(name, db=commit.t.key)
        swept += 1
    return swept


def successors(txn: lmdb.Transaction[bytes], tables: Tables) -> list[bytes]:
    """Ids of all successors: jobs that wait for the running job with their key."""
    keys = (Key.of(data) for _, data in txn.cursor(tables.key))
    return [key.successor for key in keys if key.successor]
