"""The context of one commit: what every move of a job is made of.

A :class:`Moves` reads each queue's row once, counts, numbers, places jobs and takes them away, and
writes the rows, the sequence and the hints when it finishes. Who moves what, and why, is in
:mod:`.puts`, :mod:`.leases`, :mod:`.verdicts`, :mod:`.timers` and :mod:`.acts`: they raise only
before they have written anything, or leave the transaction to be abandoned.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import lmdb

from tidemill.brokers.lmdb.calls import HandOver, Told
from tidemill.brokers.lmdb.carried import is_carried, leave_carrier
from tidemill.brokers.lmdb.gates import Gates
from tidemill.brokers.lmdb.kept import (
    KEPT,
    KEPT_LINKED,
    KEPT_OTHER,
    KEPT_RESULT,
    class_of,
    kept_counts,
)
from tidemill.brokers.lmdb.keys import give_up
from tidemill.brokers.lmdb.lanes import Lanes
from tidemill.brokers.lmdb.layout import (
    DUE_EXPIRY,
    DUE_JOB,
    DUE_KEY,
    FIN_KEY,
    LOST,
    MICRO,
    NUMBER,
    READY_KEY,
    Row,
)
from tidemill.brokers.lmdb.order import Order
from tidemill.brokers.lmdb.record import (
    READY,
    SCHEDULED,
    STATES,
    SUCCEEDED,
    WAITING,
    Flag,
    Stored,
    Tail,
    claim_of,
    result_ttl_of,
)
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.unknown import unschedule
from tidemill.brokers.lmdb.wake import MESSAGES, RESULT, SPACE, TASKS, bloom, digest
from tidemill.brokers.retention import Retention
from tidemill.gate import Claim

__all__ = ["Moves"]

_COUNTED = tuple(state.value for state in STATES)
_HANDED_MOST = 16  # beyond that many jobs a commit more is nothing beside the work of leasing them
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
        self._first_kept: list[int] = []
        self.hand_over: HandOver | None = None  # what a put has done with what it stored
        self.linked = False  # a put has stored jobs that come before or after others
        self.untimed = False  # a due time was added, or a sleeper left, since one last saw to it
        self._told: list[tuple[Told, int]] = []
        self._rings: dict[tuple[str, int], int] = {}
        self._finished: list[bytes] = []
        self.fallen = 0  # jobs counted down behind those
        self.ended: list[tuple[Stored, int]] = []  # those behind which are still to be counted down
        self._shrunk: set[str] = set()
        self.gates = Gates(self)
        self.lanes = Lanes(self)
        self.order = Order(self)

    # -- numbers and rows -----------------------------------------------------------------------

    def _read_number(self, name: str) -> int:
        data = self.txn.get(self.store.key(name))
        return NUMBER.unpack(data)[0] if data else 0

    def next_number(self) -> int:
        """The next of the store's sequence: jobs and tokens are numbered from the same one."""
        self._seq += 1
        return self._seq

    @property
    def last_number(self) -> int:
        """The highest of the sequence so far."""
        return self._seq

    def skip_numbers(self, count: int) -> None:
        """Leave the next numbers of the sequence to jobs that bring their own."""
        self._seq += count

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
            if row.gated:
                self.gates.load(row)
        return row

    def row_of(self, line: int) -> Row:
        """The row of the queue a line belongs to."""
        number = (line & ~LOST) >> 1
        row = self._lines.get(number)
        if row is None:
            name = self.txn.get(self.store.key(f"n/{number}"))
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
        self.order.forget(stored.head.seq, stored.id)
        self.forget_more(stored.id, stored.head.flags)

    def forget_more(self, job_id: bytes, flags: int) -> None:
        """Remove what a job may have said, and waited for."""
        if flags & Flag.NOTED:
            self.txn.delete(job_id, db=self.t.note)
        if flags & Flag.LINKED:
            self.txn.delete(job_id, db=self.t.wait)

    def is_running(self, stored: Stored) -> bool:
        """True when the header says ready and the ready entry is gone: a lease stands for it."""
        head = stored.head
        if head.state != READY:
            return False
        if head.flags & Flag.LIMITED:
            stands = self.lanes.is_parked(stored)
        else:
            stands = self.txn.get(head.ready_key, db=self.t.ready) is not None
        return not stands and not is_carried(self, stored)

    def left(self, due: int, wall: int) -> int:
        """Microseconds until a due time; 0 or less when it has come."""
        return due - (self.wall if wall else self.now) if due else 0

    # -- placing --------------------------------------------------------------------------------

    def enter_ready(
        self, row: Row, line: int, key: bytes, job_id: bytes, limit: Claim | None = None
    ) -> None:
        """Add a job to what can be leased, under its ready key, or to its lane; and count it."""
        row.ready += 1
        row.dirty = True
        if limit is not None:
            self.lanes.enter(limit, key, job_id)
            return
        self.txn.put(key, job_id, db=self.t.ready)
        ring = row.name, line & 1
        self._rings[ring] = self._rings.get(ring, 0) + 1

    def ring(self, row: Row, kind: int, count: int) -> None:
        """Hint as many sleepers more, of those who want this kind of the queue's jobs."""
        ring = row.name, kind
        self._rings[ring] = self._rings.get(ring, 0) + count

    def enter_scheduled(self, row: Row, due: int, wall: int, seq: int, job_id: bytes) -> None:
        """Add a job to what is not due yet, and count it."""
        self.txn.put(DUE_KEY.pack(1 if wall else 0, due, DUE_JOB, seq), job_id, db=self.t.due)
        row.scheduled += 1
        row.dirty = True
        self.untimed = True

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
            limit = claim_of(stored.envelope) if head.flags & Flag.LIMITED else None
            self.enter_ready(row, head.line, head.ready_key, stored.id, limit)
        self.save(stored, tail)

    def unplace(self, stored: Stored) -> None:
        """Take a job that does not run out of ready, due and its count."""
        head, row = stored.head, self.row_of(stored.head.line)
        if head.state == READY and row.carried and leave_carrier(self, stored, row):
            return
        if head.state == READY and head.flags & Flag.LIMITED:
            self.lanes.leave(stored)
        elif head.state == READY:
            self.txn.delete(head.ready_key, db=self.t.ready)
        elif head.state == SCHEDULED:
            unschedule(self, stored)
        self.count(row, head.state, -1)

    def ready_lines(self, first: int = 0) -> Iterator[int]:
        """Hop over the ready table from line to line; those of lost tasks, from LOST on, last."""
        cursor = self.txn.cursor(self.t.ready)
        found = cursor.set_range(READY_KEY.pack(first, 0, 0))
        while found:
            line = READY_KEY.unpack(cursor.key())[0]
            yield line
            found = cursor.set_range(READY_KEY.pack(line + 1, 0, 0))

    def sync(self) -> None:
        """Have what limits allow now stand where leases, sleepers and clocks look for it."""
        self.lanes.sync()
        self.gates.sync()

    def next_due(self) -> float:
        """Seconds until something comes due, 0 or less when it has; infinity when nothing will."""
        self.sync()
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
        self._leave(stored, row, state, promote=promote)
        self.count(row, state, +1)
        if state == SUCCEEDED and head.flags & Flag.MESSAGE:
            self.forget(stored)
            return
        head.state = state
        head.finished = self.wall
        tail.error = error
        self.keep(stored, tail)

    def keep(self, stored: Stored, tail: Tail, *, parted: bool = False) -> None:
        """Save a finished job, and have it pruned in its time.

        A job of a flow has a class of its own, until it is ``parted``: no job behind it needs it.
        """
        head = stored.head
        if head.flags & Flag.LINKED and not parted:
            head.prune = self.now + int(self.retention.protect * MICRO)
            kept, ended = KEPT_LINKED, self.now
        else:
            kept, ended = self._class_for(stored, tail)
            self.kept[kept] += 1
        self.save(stored, tail)
        key = FIN_KEY.pack(kept, head.prune, head.seq)
        self.txn.put(key, NUMBER.pack(ended) + stored.id, db=self.t.fin)

    def _class_for(self, stored: Stored, tail: Tail) -> tuple[int, int]:
        """The class of a finished job, and when it ended; it is to be pruned as its class is."""
        head = stored.head
        kept = class_of(head.state, tail)
        ended = self.now - max(0, self.wall - head.finished)
        head.prune = ended + int(self._keep_for(stored, kept) * MICRO)
        return kept, ended

    def vanish(self, stored: Stored) -> None:
        """Delete an unfinished job that is nowhere."""
        self._leave(stored, self.row_of(stored.head.line))
        self.forget(stored)

    def _leave(
        self, stored: Stored, row: Row, state: int = WAITING, *, promote: bool = True
    ) -> None:
        """It is no longer among the unfinished: give up expiry and key, and tell who waits."""
        head = stored.head
        if head.flags & Flag.LINKED:
            self.ended.append((stored, state))
        if head.expires:
            self.txn.delete(DUE_KEY.pack(0, head.expires, DUE_EXPIRY, head.seq), db=self.t.due)
        if head.flags & Flag.KEYED and promote:
            give_up(self, stored, state)
        self._finished.append(stored.id)
        if row.max_size:
            self._shrunk.add(row.name)

    def _keep_for(self, stored: Stored, kept: int) -> float:
        if kept == KEPT_OTHER:
            return self.retention.failed
        ttl = result_ttl_of(stored) if stored.head.state == SUCCEEDED else -1.0
        return self.retention.of_success(ttl, kept == KEPT_RESULT)

    @property
    def kept(self) -> list[int]:
        """How many finished jobs there are of each class."""
        if self._kept is None:
            self._kept = kept_counts(self.store, self.txn)
            self._first_kept = self._kept.copy()
        return self._kept

    def unfinish(self, stored: Stored) -> None:
        """Take a finished job off the list of what is to be pruned."""
        head = stored.head
        if head.flags & Flag.LINKED:
            key = FIN_KEY.pack(KEPT_LINKED, head.prune, head.seq)
            if self.txn.delete(key, db=self.t.fin):
                return
        kept = class_of(head.state, stored.tail)
        if self.txn.delete(FIN_KEY.pack(kept, head.prune, head.seq), db=self.t.fin):
            self.kept[kept] -= 1

    # -- the end of the commit ------------------------------------------------------------------

    def finish(self) -> None:
        """Hint whoever sleeps, and write what was counted. Called before the commit.

        What changed nothing writes nothing here: such a transaction costs no disk.
        """
        self.sync()
        if self.store.bells.anyone():
            self._ring()
            self.sync()
        self.lanes.write()
        self.gates.write()
        self.order.write()
        put, key = self.txn.put, self.store.key
        for row in self._rows.values():
            if row.dirty:
                put(key("q/" + row.name), row.pack())
        if self._seq != self._first_seq:
            put(key("seq"), NUMBER.pack(self._seq))
        if self._kept is not None and self._kept != self._first_kept:
            put(key("kept"), KEPT.pack(*self._kept))

    def tells(self, owner: Told) -> None:
        """An owner is being told of all the leases it has by now."""
        self._told.append((owner, self._seq))

    def committed(self) -> None:
        """Called after the commit, before the next one can begin."""
        for owner, number in self._told:
            owner.told = number
        self.store.remember_lent(self.lanes.lent)

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

    def _stands(self, row: Row, kind: int) -> bool:
        """False when all that is ready of a queue waits for limits."""
        if not self.lanes.any:
            return True
        cursor = self.txn.cursor(self.t.ready)
        for line in (row.lines[kind], row.lost_line)[: 2 - kind]:
            prefix = READY_KEY.pack(line, 0, 0)[:4]
            if cursor.set_range(prefix) and cursor.key()[:4] == prefix:
                return True
        return False

    def _ring(self) -> None:
        bells = self.store.bells
        give = None
        if self.hand_over and sum(self._rings.values()) <= _HANDED_MOST:
            lines = [self._rows[name].lines[kind] for name, kind in self._rings]
            give = functools.partial(self.hand_over, self, lines)
        while self._rings:  # handing over may make more ready
            (name, kind), count = self._rings.popitem()
            row = self._rows[name]
            if row.gated:
                count = self.gates.room(row, count)
            if row.ready and count and self._stands(row, kind):  # else all are handed over by now
                bells.ring(MESSAGES if kind else TASKS, bloom([name]), count, digest(name), give)
                self.sync()
        if self._finished:
            bells.ring(RESULT, bloom([job_id.decode() for job_id in self._finished]))
        if self._shrunk:
            bells.ring(SPACE, bloom(list(self._shrunk)))
        seconds = self.next_due() if self.untimed else _NEVER
        if seconds < _NEVER:
            bells.keep_time(self.now + max(0, int(seconds * MICRO)))
