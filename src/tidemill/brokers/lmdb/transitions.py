"""The context of one commit: the elementary changes of a job.

A :class:`Transitions` places jobs and takes them away, and writes rows, numbers and hints when it
finishes. The rooms :mod:`.put` and :mod:`.claim`, and :mod:`.settle` and :mod:`.admin`, decide
which jobs change. They raise errors before they write anything. If an error comes later, the whole
transaction is dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import lmdb
import msgspec

from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.brokers.contract.retention import Retention
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.lmdb.claim.limits import Limiters, Partitions
from tidemill.brokers.lmdb.engine.store import Store
from tidemill.brokers.lmdb.engine.wakeup import (
    MESSAGES,
    RESULT,
    SPACE,
    TASKS,
    SleeperWant,
    bloom,
    digest,
)
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
from tidemill.brokers.lmdb.look.history import write_history
from tidemill.brokers.lmdb.look.search import Order
from tidemill.brokers.lmdb.put.unique import give_up
from tidemill.brokers.lmdb.record import (
    KEPT,
    KEPT_LINKED,
    KEPT_OTHER,
    KEPT_RESULT,
    READY,
    SCHEDULED,
    STATES,
    SUCCEEDED,
    WAITING,
    Flag,
    Stored,
    Tail,
    class_of,
    job_limit_of,
    kept_counts,
    result_ttl_of,
)
from tidemill.brokers.shared.lost_jobs import LostJob
from tidemill.core.envelope import JobLimit

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.owners import LocalOwner

T = TypeVar("T")

_COUNTED = tuple(state.value for state in STATES)

# The most jobs that a put hands over. For more jobs, the time of a second commit matters little.
_HANDED_MOST = 16
_NEVER = float("inf")


_DEPARTURE = msgspec.msgpack.Decoder(Departure)


def departure_in(store: Store, txn: lmdb.Transaction[bytes]) -> Departure | None:
    data = txn.get(store.key("departure"))
    return _DEPARTURE.decode(data) if data is not None else None


class Transitions:
    """The context of one commit: its rows of queues, its numbers, and its hints to sleepers."""

    # Each row is read once, and written when the commit ends.

    def __init__(
        self, store: Store, txn: lmdb.Transaction[bytes], now: int, wall: int, retention: Retention
    ) -> None:
        self.store = store
        self.txn = txn
        self.t = store.tables
        self.now = now  # the store's time, microseconds
        self.wall = wall  # wall time, microseconds
        self.retention = retention
        # True when this commit must ensure that a sleeper wakes at the next due time: a due time
        # was added, or a sleeper left.
        self.untimed = False
        self._rows: dict[str, Row] = {}
        self._rows_by_number: dict[int, Row] = {}
        self._seq = self._first_seq = self._read_number("seq")
        self._rings: dict[tuple[str, int], int] = {}
        # The sums that this commit adds to rows of history, by key.
        self.history: dict[bytes, HistoryRow] = {}
        self._kept: list[int] | None = None
        self._first_kept: list[int] = []
        self.hand_over: HandOver | None = None  # leases the jobs of a put to sleepers
        self.linked = False  # True when a put has stored jobs with parents or children
        self._told: list[tuple[LocalOwner, int]] = []
        self.finished: list[bytes] = []  # ids of the jobs that this commit ends or deletes
        self.fallen = 0  # the number of children that were counted down
        self.ended: list[tuple[Stored, int]] = []  # jobs whose children are yet to be counted down
        self.lost: list[LostJob] = []  # jobs that failed because they were lost with their workers
        self._shrunk: set[str] = set()
        self._has_limits = False  # True when this commit uses ``limiters``, as few commits do

    @functools.cached_property
    def limiters(self) -> Limiters:
        self._has_limits = True
        return Limiters(self)

    @functools.cached_property
    def partitions(self) -> Partitions:
        return Partitions(self)

    @functools.cached_property
    def order(self) -> Order:
        return Order(self)

    @functools.cached_property
    def departure(self) -> Departure | None:
        """The departure (move to another store) that has begun; None without a departure."""
        return departure_in(self.store, self.txn)

    @property
    def is_sealed(self) -> bool:
        """True when all jobs have moved to another store, and nothing changes here any more."""
        return self.departure is not None and self.departure.sealed

    # -- numbers and rows -----------------------------------------------------------------------

    def _read_number(self, name: str) -> int:
        data = self.txn.get(self.store.key(name))
        return NUMBER.unpack(data)[0] if data else 0

    def next_number(self) -> int:
        """The next number of the store's sequence, which numbers both jobs and tokens."""
        self._seq += 1
        return self._seq

    @property
    def last_number(self) -> int:
        """The highest number of the sequence so far."""
        return self._seq

    def skip_numbers(self, count: int) -> None:
        """Skip numbers of the sequence, for jobs that keep the order of another store."""
        self._seq += count

    def count_up(self, name: str) -> int:
        """The next number of a counter that seldom changes."""
        number = self._read_number(name) + 1
        self.txn.put(self.store.key(name), NUMBER.pack(number))
        return number

    def row(self, name: str) -> Row:
        """A queue's row; a new queue gets the next number."""
        row = self._rows.get(name)
        if row is None:
            data = self.txn.get(self.store.key("q/" + name))
            if data is not None:
                row = Row.of(name, data)
            else:
                row = Row(name, self.count_up("queues"), dirty=True)
                self.txn.put(self.store.key(f"n/{row.number}"), name.encode())
            self._rows[name] = row
            self._rows_by_number[row.number] = row
            if row.has_limit:
                self.limiters.load(row)
        return row

    def row_of(self, line: int) -> Row:
        """The row of the queue to which a line belongs."""
        number = (line & ~LOST) >> 1
        row = self._rows_by_number.get(number)
        if row is None:
            name = self.txn.get(self.store.key(f"n/{number}"))
            assert name is not None
            row = self.row(name.decode())
        return row

    def existing_row(self, name: str) -> Row | None:
        """A queue's row, or None when the store does not know the queue."""
        if name in self._rows or self.txn.get(self.store.key("q/" + name)):
            return self.row(name)
        return None

    def count(self, row: Row, state: int, by: int) -> None:
        """Change the queue's count of a state. The count of an end state is a total."""
        name = _COUNTED[state]
        setattr(row, name, getattr(row, name) + by)
        row.dirty = True

    # -- one job --------------------------------------------------------------------------------

    def load(self, job_id: bytes) -> Stored | None:
        """Read a job to change it; None when there is no such job."""
        data = self.txn.get(job_id, db=self.t.job)
        return Stored(job_id, data) if data is not None else None

    def save(self, stored: Stored, tail: Tail | None = None) -> None:
        """Write a job, with the given tail or, without one, with its present tail."""
        self.txn.put(stored.id, stored.packed(tail), db=self.t.job)

    def forget_more(self, job_id: bytes, flags: int, seq: int) -> None:
        """Remove what a deleted job has beside its record."""
        if flags & Flag.APART:
            self.order.forget(seq)
        if flags & Flag.NOTED:
            self.txn.delete(job_id, db=self.t.note)
        if flags & Flag.LINKED:
            self.txn.delete(job_id, db=self.t.wait)

    def left(self, due: int, wall: int) -> int:
        """Microseconds until a due time; 0 or less for a time that has come."""
        return due - (self.wall if wall else self.now) if due else 0

    def forget(self, stored: Stored) -> None:
        """Remove the record of a job."""
        self.txn.delete(stored.id, db=self.t.job)
        self.forget_more(stored.id, stored.head.flags, stored.head.seq)

    def is_running(self, stored: Stored) -> bool:
        """True when the header says ready, and the job has a lease instead of a ready entry."""
        head = stored.head
        if head.state != READY:
            return False
        if head.flags & Flag.LIMITED:
            stands = self.partitions.is_parked(stored)
        else:
            stands = self.txn.get(head.ready_key, db=self.t.ready) is not None
        return not stands

    # -- where jobs stand -----------------------------------------------------------------------

    def ready_lines(self, first: int = 0) -> Iterator[int]:
        """The lines with ready jobs, found by one seek each; the lines of lost tasks come last."""
        cursor = self.txn.cursor(self.t.ready)
        found = cursor.set_range(READY_KEY.pack(first, 0, 0))
        while found:
            line = READY_KEY.unpack(cursor.key())[0]
            yield line
            found = cursor.set_range(READY_KEY.pack(line + 1, 0, 0))

    def ring(self, row: Row, kind: int, count: int) -> None:
        """Hint ``count`` more sleepers that want this kind of the queue's jobs."""
        ring = row.name, kind
        self._rings[ring] = self._rings.get(ring, 0) + count

    def enter_scheduled(self, row: Row, due: int, wall: int, seq: int, job_id: bytes) -> None:
        """Add a job that is not due yet to the due table, and count it."""
        self.txn.put(DUE_KEY.pack(1 if wall else 0, due, DUE_JOB, seq), job_id, db=self.t.due)
        row.scheduled += 1
        row.dirty = True
        self.untimed = True

    # -- placing --------------------------------------------------------------------------------

    def enter_ready(
        self, row: Row, line: int, key: bytes, job_id: bytes, limit: JobLimit | None = None
    ) -> None:
        """Add a job to the ready table under its ready key, or to its partition; count the job."""
        row.ready += 1
        row.dirty = True
        if limit is not None:
            self.partitions.enter(limit, key, job_id)
            return
        self.txn.put(key, job_id, db=self.t.ready)
        ring = row.name, line & 1
        self._rings[ring] = self._rings.get(ring, 0) + 1

    def place(self, stored: Stored, due: int, wall: int, tail: Tail | None = None) -> None:
        """Schedule a job that is in no table, or make it ready if it is due; save the job."""
        head = stored.head
        row = self.row_of(head.line)
        head.due = due
        head.flags = head.flags & ~Flag.WALL | wall
        if self.left(due, wall) > 0:
            head.state = SCHEDULED
            self.enter_scheduled(row, due, wall, head.seq, stored.id)
        else:
            head.state = READY
            limit = job_limit_of(stored.envelope) if head.flags & Flag.LIMITED else None
            self.enter_ready(row, head.line, head.ready_key, stored.id, limit)
        self.save(stored, tail)

    def unplace(self, stored: Stored) -> None:
        """Remove a job that does not run from its table and from the counts of its queue."""
        head, row = stored.head, self.row_of(stored.head.line)
        if head.state == READY and head.flags & Flag.LIMITED:
            self.partitions.leave(stored)
        elif head.state == READY:
            self.txn.delete(head.ready_key, db=self.t.ready)
        elif head.state == SCHEDULED:
            clock = 1 if head.flags & Flag.WALL else 0
            self.txn.delete(DUE_KEY.pack(clock, head.due, DUE_JOB, head.seq), db=self.t.due)
        self.count(row, head.state, -1)

    def sync(self) -> None:
        """Bring the ready table, hints and due times up to date with the limits."""
        if self._has_limits:
            self.partitions.sync()
            self.limiters.sync()

    def next_due(self) -> float:
        """Seconds until the next due time; 0 or less when it has come, infinity for never."""
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
        """Finish a job that is in no table: keep it, or delete an acknowledged message."""
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

    def keep(self, stored: Stored, tail: Tail, *, needed: bool | None = None) -> None:
        """Save a finished job, and list the job for pruning."""
        # A job of a flow has a separate class until a look shows that no dependent needs it.
        # ``needed`` is what a look has shown; True for a job whose dependents move after it.
        head = stored.head
        if head.flags & Flag.LINKED and needed is not False:
            ttl = result_ttl_of(stored) if head.state == SUCCEEDED and not needed else -1.0
            head.prune = self.now + int(self.retention.first_look(ttl) * MICRO)
            kept, ended = KEPT_LINKED, self.now
        else:
            kept, ended = self._class_for(stored, tail)
            self.kept[kept] += 1
        self.save(stored, tail)
        key = FIN_KEY.pack(kept, head.prune, head.seq)
        self.txn.put(key, NUMBER.pack(ended) + stored.id, db=self.t.fin)

    def _class_for(self, stored: Stored, tail: Tail) -> tuple[int, int]:
        """The class of a finished job, and the time of its end; set its prune time by the class."""
        head = stored.head
        kept = class_of(head.state, tail)
        ended = self.now - max(0, self.wall - head.finished)
        head.prune = ended + int(self._keep_for(stored, kept) * MICRO)
        return kept, ended

    def vanish(self, stored: Stored) -> None:
        """Delete an unfinished job that no table lists."""
        self._leave(stored, self.row_of(stored.head.line))
        self.forget(stored)

    def _leave(
        self, stored: Stored, row: Row, state: int = WAITING, *, promote: bool = True
    ) -> None:
        """Drop the expiry and the key of a job that ends or is deleted, and wake its waiters."""
        head = stored.head
        if head.flags & Flag.LINKED:
            self.ended.append((stored, state))
        if head.expires:
            self.txn.delete(DUE_KEY.pack(0, head.expires, DUE_EXPIRY, head.seq), db=self.t.due)
        if head.flags & Flag.KEYED and promote and (successor := give_up(self, stored, state)):
            waiting = self.load(successor)
            assert waiting is not None
            self.unplace(waiting)
            self.place(waiting, waiting.head.due, waiting.head.flags & Flag.WALL)
        self.finished.append(stored.id)
        if row.max_size:
            self._shrunk.add(row.name)

    def _keep_for(self, stored: Stored, kept: int) -> float:
        if kept == KEPT_OTHER:
            return self.retention.failed
        ttl = result_ttl_of(stored) if stored.head.state == SUCCEEDED else -1.0
        return self.retention.of_success(ttl, kept == KEPT_RESULT)

    @property
    def kept(self) -> list[int]:
        """The number of finished jobs in each of the first three classes."""
        if self._kept is None:
            self._kept = kept_counts(self.store, self.txn)
            self._first_kept = self._kept.copy()
        return self._kept

    def unfinish(self, stored: Stored) -> None:
        """Take a finished job off the list of jobs to be pruned."""
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
        """Hint sleepers, and write the rows and counters. Called before the commit."""
        # Without a change nothing is written, so the transaction does not wait for the disk.
        self.sync()
        if self.store.wakeups.anyone():
            self._ring()
            self.sync()
        if self._has_limits:
            self.partitions.write()
            self.limiters.write()
        if "order" in vars(self):  # this commit has stored jobs
            self.order.write()
        self._write_rows()
        write_history(self)
        if self._kept is not None and self._kept != self._first_kept:
            self.txn.put(self.store.key("kept"), KEPT.pack(*self._kept))

    def _write_rows(self) -> None:
        put, key = self.txn.put, self.store.key
        for row in self._rows.values():
            if row.dirty:
                put(key("q/" + row.name), row.pack())
        if self._seq != self._first_seq:
            put(key("seq"), NUMBER.pack(self._seq))

    def tells(self, owner: LocalOwner) -> None:
        """Remember that after this commit the owner knows of all its leases."""
        self._told.append((owner, self._seq))

    def told(self, owner: LocalOwner) -> int:
        """The highest token that the owner may know, also by an earlier step of this commit."""
        return max([owner.told, *[number for one, number in self._told if one is owner]])

    def committed(self) -> None:
        for owner, number in self._told:
            owner.told = number
        if self._has_limits:
            self.store.remember_lent(self.partitions.lent)

    def ring_rest(self, names: Sequence[str] = ()) -> None:
        """Pass on a hint for jobs that may be ready: in the named queues, or else in all queues."""
        if not self.store.wakeups.anyone():
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
        """False when all ready jobs of a queue wait for limits."""
        if not (self._has_limits and self.partitions.any):
            return True
        cursor = self.txn.cursor(self.t.ready)
        for line in (row.lines[kind], row.lost_line)[: 2 - kind]:
            prefix = READY_KEY.pack(line, 0, 0)[:4]
            if cursor.set_range(prefix) and cursor.key()[:4] == prefix:
                return True
        return False

    def _ring(self) -> None:
        wakeups = self.store.wakeups
        give = None
        if self.hand_over and sum(self._rings.values()) <= _HANDED_MOST:
            lines = [self._rows[name].lines[kind] for name, kind in self._rings]
            give = functools.partial(self.hand_over, self, lines)
        while self._rings:  # a hand-off may make more jobs ready
            (name, kind), count = self._rings.popitem()
            row = self._rows[name]
            if row.has_limit:
                count = self.limiters.room(row, count)
            # Skip queues whose jobs were all handed over.
            if row.ready and count and self._stands(row, kind):
                wakeups.ring(MESSAGES if kind else TASKS, bloom([name]), count, digest(name), give)
                self.sync()
        if self.finished:
            wakeups.ring(RESULT, bloom([job_id.decode() for job_id in self.finished]))
        if self._shrunk:
            wakeups.ring(SPACE, bloom(list(self._shrunk)))
        seconds = self.next_due() if self.untimed else _NEVER
        if seconds < _NEVER:
            wakeups.keep_time(self.now + max(0, int(seconds * MICRO)))


HandOver = Callable[[Transitions, list[int], int, SleeperWant], int]
"""Leases the jobs of some lines to a sleeper, by its number and its want; returns their number."""


class Commit(Protocol):
    """A function that applies its argument to one commit, and returns the result."""

    def __call__(
        self, apply: Callable[[Transitions], T], /, *, patience: float | None = None
    ) -> T: ...
