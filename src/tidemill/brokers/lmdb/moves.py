"""The context of one commit: what every move of a job is made of.

A :class:`Moves` reads each queue's row once, counts, numbers, places jobs and takes them away, and
writes the rows, the sequence and the hints when it finishes. Who moves what, and why, is in
:mod:`.puts`, :mod:`.leases`, :mod:`.verdicts`, :mod:`.timers` and :mod:`.acts`: they raise only
before they have written anything, or leave the transaction to be abandoned.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import lmdb

from tidemill.brokers.base import Retention
from tidemill.brokers.lmdb.layout import (
    DUE_EXPIRY,
    DUE_JOB,
    DUE_KEY,
    FIN_KEY,
    MICRO,
    NUMBER,
    READY_KEY,
    Row,
)
from tidemill.brokers.lmdb.record import (
    FAILED,
    READY,
    SCHEDULED,
    STATES,
    SUCCEEDED,
    Flag,
    Stored,
    Tail,
    key_of,
    result_ttl_of,
)
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.wake import MESSAGES, RESULT, SPACE, TASKS, bloom, digest

__all__ = ["KEPT_OTHER", "KEPT_PLAIN", "KEPT_RESULT", "Commit", "Moves"]

T = TypeVar("T")

KEPT_PLAIN, KEPT_RESULT, KEPT_OTHER = range(3)
"""Classes of finished jobs: succeeded without a result, with one, and ended any other way."""

_COUNTED = tuple(state.value for state in STATES)
_KEPT = struct.Struct(">QQQ")
_NEVER = float("inf")


class Moves:
    """One commit's context."""

    def __init__(
        self, store: Store, txn: lmdb.Transaction[bytes], now: int, wall: int, retention: Retention
    ) -> None:
        self.store = store
        self.txn = txn
        self.t = store.tables
        self.now = now  # the store's time, microseconds
        self.wall = wall  # wall time, microseconds
        self.retention = retention
        self._rows: dict[str, Row] = {}
        self._lines: dict[int, Row] = {}
        self._seq = self._first_seq = self._read_number("seq")
        self._kept: list[int] | None = None
        self._rings: dict[tuple[str, int], int] = {}
        self._finished: list[bytes] = []
        self._shrunk: set[str] = set()

    # -- numbers and rows -----------------------------------------------------------------------

    def _read_number(self, name: str) -> int:
        data = self.txn.get(self.store.key(name))
        return NUMBER.unpack(data)[0] if data else 0

    def next_number(self) -> int:
        """The next of the store's sequence: jobs and tokens are numbered from the same one."""
        self._seq += 1
        return self._seq

    def count_up(self, name: str) -> int:
        """The next of a counter that seldom moves."""
        number = self._read_number(name) + 1
        self.txn.put(self.store.key(name), NUMBER.pack(number))
        return number

    def row(self, name: str) -> Row:
        """A queue's row; a new queue gets the next number."""
        row = self._rows.get(name)
        if row is None:
            data = self.txn.get(self.store.key("q/" + name))
            number = 0
            if data is None:
                number = self.count_up("queues")
                self.txn.put(self.store.key(f"n/{number}"), name.encode())
            row = self._rows[name] = Row(name, number, data)
            self._lines[row.number] = row
        return row

    def row_of(self, line: int) -> Row:
        """The row of the queue a line belongs to."""
        row = self._lines.get(line >> 1)
        if row is None:
            name = self.txn.get(self.store.key(f"n/{line >> 1}"))
            assert name is not None
            row = self.row(name.decode())
        return row

    def existing_row(self, name: str) -> Row | None:
        """A queue's row, or None when nothing was ever put there."""
        if name in self._rows or self.txn.get(self.store.key("q/" + name)):
            return self.row(name)
        return None

    def count(self, row: Row, state: int, by: int) -> None:
        """Change how many jobs of a state the queue has, or has had when the state is an end."""
        name = _COUNTED[state]
        setattr(row, name, getattr(row, name) + by)
        row.dirty = True

    # -- one job --------------------------------------------------------------------------------

    def load(self, job_id: bytes) -> Stored | None:
        """A job for a change, or None."""
        data = self.txn.get(job_id, db=self.t.job)
        return Stored(job_id, data) if data is not None else None

    def save(self, stored: Stored, tail: Tail | None = None) -> None:
        """Write a job back, with the tail given, or the one that is there."""
        self.txn.put(stored.id, stored.packed(tail), db=self.t.job)

    def forget(self, stored: Stored) -> None:
        """Remove the record."""
        self.txn.delete(stored.id, db=self.t.job)
        if stored.head.flags & Flag.NOTED:
            self.txn.delete(stored.id, db=self.t.note)

    def is_running(self, stored: Stored) -> bool:
        """True when the header says ready and the ready entry is gone: a lease stands for it."""
        head = stored.head
        return head.state == READY and (
            self.txn.get(READY_KEY.pack(head.line, head.rank, head.seq), db=self.t.ready) is None
        )

    def left(self, due: int, wall: int) -> int:
        """Microseconds until a due time; 0 or less when it has come."""
        return due - (self.wall if wall else self.now) if due else 0

    # -- placing --------------------------------------------------------------------------------

    def enter_ready(self, row: Row, line: int, rank: int, seq: int, job_id: bytes) -> None:
        """Add a job to what can be leased, and count it."""
        self.txn.put(READY_KEY.pack(line, rank, seq), job_id, db=self.t.ready)
        row.ready += 1
        row.dirty = True
        ring = row.name, line & 1
        self._rings[ring] = self._rings.get(ring, 0) + 1

    def enter_scheduled(self, row: Row, due: int, wall: int, seq: int, job_id: bytes) -> None:
        """Add a job to what is not due yet, and count it."""
        self.txn.put(DUE_KEY.pack(1 if wall else 0, due, DUE_JOB, seq), job_id, db=self.t.due)
        row.scheduled += 1
        row.dirty = True

    def place(self, stored: Stored, due: int, wall: int, tail: Tail | None = None) -> None:
        """Put a job that is nowhere into scheduled or ready, by its due time, and save it."""
        head = stored.head
        row = self.row_of(head.line)
        head.due = due
        head.flags = head.flags & ~Flag.WALL | wall
        if self.left(due, wall) > 0:
            head.state = SCHEDULED
            self.enter_scheduled(row, due, wall, head.seq, stored.id)
        else:
            head.state = READY
            self.enter_ready(row, head.line, head.rank, head.seq, stored.id)
        self.save(stored, tail)

    def unplace(self, stored: Stored) -> None:
        """Take a job that does not run out of ready, due and its count."""
        head = stored.head
        if head.state == READY:
            self.txn.delete(READY_KEY.pack(head.line, head.rank, head.seq), db=self.t.ready)
        elif head.state == SCHEDULED:
            clock = 1 if head.flags & Flag.WALL else 0
            self.txn.delete(DUE_KEY.pack(clock, head.due, DUE_JOB, head.seq), db=self.t.due)
        self.count(self.row_of(head.line), head.state, -1)

    def ready_lines(self) -> Iterator[int]:
        """Hop over the ready table from line to line."""
        cursor = self.txn.cursor(self.t.ready)
        found = cursor.first()
        while found:
            line = READY_KEY.unpack(cursor.key())[0]
            yield line
            found = cursor.set_range(READY_KEY.pack(line + 1, 0, 0))

    def next_due(self) -> float:
        """Seconds until something comes due, 0 or less when it has; infinity when nothing will."""
        seconds = _NEVER
        cursor = self.txn.cursor(self.t.due)
        for first, now in ((0, self.now), (1, self.wall)):
            if cursor.set_range(DUE_KEY.pack(first, 0, 0, 0)):
                clock, time, _, _ = DUE_KEY.unpack(cursor.key())
                if clock == first:
                    seconds = min(seconds, (time - now) / MICRO)
        return seconds

    # -- ending ---------------------------------------------------------------------------------

    def end(
        self, stored: Stored, state: int, tail: Tail, error: str = "", *, promote: bool = True
    ) -> None:
        """Finish a job that is nowhere: kept for a while, or forgotten when an acked message."""
        head = stored.head
        row = self.row_of(head.line)
        self._leave(stored, row, promote=promote)
        self.count(row, state, +1)
        if state == SUCCEEDED and head.flags & Flag.MESSAGE:
            self.forget(stored)
            return
        head.state = state
        head.finished = self.wall
        tail.error = error
        kept = _class_of(state, tail)
        head.prune = self.now + int(self._keep_for(stored, kept) * MICRO)
        self.save(stored, tail)
        key = FIN_KEY.pack(kept, head.prune, head.seq)
        self.txn.put(key, NUMBER.pack(self.now) + stored.id, db=self.t.fin)
        self.kept[kept] += 1

    def vanish(self, stored: Stored) -> None:
        """Delete an unfinished job that is nowhere."""
        self._leave(stored, self.row_of(stored.head.line))
        self.forget(stored)

    def _leave(self, stored: Stored, row: Row, *, promote: bool = True) -> None:
        """It is no longer among the unfinished: give up expiry and key, and tell who waits."""
        head = stored.head
        if head.expires:
            self.txn.delete(DUE_KEY.pack(0, head.expires, DUE_EXPIRY, head.seq), db=self.t.due)
        if head.flags & Flag.KEYED and promote:
            self._promote_successor(stored)
        self._finished.append(stored.id)
        if row.max_size:
            self._shrunk.add(row.name)

    def _promote_successor(self, stored: Stored) -> None:
        """Give up the key; who waited for it takes it over."""
        key = key_of(stored)
        holders = self.txn.get(key, db=self.t.key)
        if holders is None:
            return
        holder, _, successor = holders.partition(b"\0")
        if stored.id == successor:
            self.txn.put(key, holder + b"\0", db=self.t.key)
        elif stored.id == holder and not successor:
            self.txn.delete(key, db=self.t.key)
        elif stored.id == holder:
            self.txn.put(key, successor + b"\0", db=self.t.key)
            waiting = self.load(successor)
            assert waiting is not None
            self.unplace(waiting)
            self.place(waiting, waiting.head.due, waiting.head.flags & Flag.WALL)

    def _keep_for(self, stored: Stored, kept: int) -> float:
        if kept == KEPT_OTHER:
            return self.retention.failed
        ttl = result_ttl_of(stored) if stored.head.state == SUCCEEDED else -1.0
        return self.retention.of_success(ttl, kept == KEPT_RESULT)

    @property
    def kept(self) -> list[int]:
        """How many finished jobs there are of each class."""
        if self._kept is None:
            data = self.txn.get(self.store.key("kept"))
            self._kept = list(_KEPT.unpack(data)) if data else [0, 0, 0]
        return self._kept

    def unfinish(self, stored: Stored) -> None:
        """Take a finished job off the list of what is to be pruned."""
        head = stored.head
        kept = _class_of(head.state, stored.tail)
        if self.txn.delete(FIN_KEY.pack(kept, head.prune, head.seq), db=self.t.fin):
            self.kept[kept] -= 1

    # -- the end of the commit ------------------------------------------------------------------

    def finish(self) -> None:
        """Write what was counted, and hint whoever sleeps for it. Called before the commit."""
        put, key = self.txn.put, self.store.key
        for row in self._rows.values():
            if row.dirty:
                put(key("q/" + row.name), row.pack())
        if self._seq != self._first_seq:
            put(key("seq"), NUMBER.pack(self._seq))
        if self._kept is not None:
            put(key("kept"), _KEPT.pack(*self._kept))
        if self.store.bells.anyone():
            self._ring()

    def ring_rest(self, names: Sequence[str] = ()) -> None:
        """Pass the baton: there may be more than was taken. Of all queues unless some are named."""
        if not self.store.bells.anyone():
            return
        if names:
            rows = [row for name in names if (row := self.existing_row(name))]
            lines = [line for row in rows if row.ready for line in row.lines]
        else:
            lines = list(self.ready_lines())
        for line in lines:
            row = self.row_of(line)
            if not row.paused:
                self._rings.setdefault((row.name, line & 1), 1)

    def _ring(self) -> None:
        bells = self.store.bells
        for (name, kind), count in self._rings.items():
            bells.ring(MESSAGES if kind else TASKS, bloom([name]), count, digest(name))
        if self._finished:
            bells.ring(RESULT, bloom([job_id.decode() for job_id in self._finished]))
        if self._shrunk:
            bells.ring(SPACE, bloom(list(self._shrunk)))
        seconds = self.next_due()
        if seconds < _NEVER:
            bells.keep_time(self.now + max(0, int(seconds * MICRO)))


class Commit(Protocol):
    """What has a function applied to the moves of one commit, and returns its result."""

    def __call__(self, apply: Callable[[Moves], T], /) -> T: ...


def _class_of(state: int, tail: Tail) -> int:
    """Failed jobs are kept for a human; of the rest, those somebody may ask for, for a while."""
    if state == FAILED:
        return KEPT_OTHER
    return KEPT_PLAIN if state == SUCCEEDED and not tail.result else KEPT_RESULT
