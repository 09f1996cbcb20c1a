"""The context of one commit: the elementary changes of a job.

A :class:`Transitions` places jobs and takes them away, and writes rows, numbers and hints when it
finishes. :mod:`.put`, :mod:`.claim`, :mod:`.settle`, :mod:`.due` and :mod:`.admin` decide which
jobs change. These modules raise errors before they write anything. If an error comes later, the
whole transaction is dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import lmdb

from tidemill.brokers.lmdb.acceptance_order import Order
from tidemill.brokers.lmdb.commit_state import CommitState
from tidemill.brokers.lmdb.history import write_history
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
from tidemill.brokers.lmdb.limits import Limiters
from tidemill.brokers.lmdb.partitions import Partitions
from tidemill.brokers.lmdb.record import (
    READY,
    SCHEDULED,
    SUCCEEDED,
    WAITING,
    Flag,
    Stored,
    Tail,
    job_limit_of,
    result_ttl_of,
)
from tidemill.brokers.lmdb.retention import (
    KEPT,
    KEPT_LINKED,
    KEPT_OTHER,
    KEPT_RESULT,
    class_of,
    kept_counts,
)
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.unique import give_up
from tidemill.brokers.lmdb.wakeup import (
    MESSAGES,
    RESULT,
    SPACE,
    TASKS,
    SleeperWant,
    bloom,
    digest,
)
from tidemill.brokers.shared.lost_jobs import LostJob
from tidemill.core.limit_settings import JobLimit
from tidemill.core.retention import Retention

T = TypeVar("T")

# The most jobs that a put hands over. For more jobs, the time of a second commit matters little.
_HANDED_MOST = 16
_NEVER = float("inf")


class Told(Protocol):
    """An owner, as far as a commit changes it."""

    told: int  # the highest token that the owner may know


class Transitions(CommitState):
    """The context of one commit."""

    def __init__(
        self, store: Store, txn: lmdb.Transaction[bytes], now: int, wall: int, retention: Retention
    ) -> None:
        super().__init__(store, txn, now, wall)
        self.retention = retention
        self._kept: list[int] | None = None
        self._first_kept: list[int] = []
        # A function that leases the jobs of a put to sleepers.
        self.hand_over: HandOver | None = None
        self.linked = False  # True when a put has stored jobs with parents or children
        self._told: list[tuple[Told, int]] = []
        self._finished: list[bytes] = []
        self.fallen = 0  # the number of children that were counted down
        self.ended: list[tuple[Stored, int]] = []  # jobs whose children are yet to be counted down
        self.lost: list[LostJob] = []  # jobs that failed because they were lost with their workers
        self._shrunk: set[str] = set()
        self.limiters = Limiters(self)
        self.partitions = Partitions(self, self.limiters)
        self.order = Order(self)

    def _load_limiter(self, row: Row) -> None:
        self.limiters.load(row)

    # -- one job --------------------------------------------------------------------------------

    def forget(self, stored: Stored) -> None:
        """Remove the record of a job."""
        self.txn.delete(stored.id, db=self.t.job)
        if stored.head.flags & Flag.APART:
            self.order.forget(stored.head.seq)
        self.forget_more(stored.id, stored.head.flags)

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

    def keep(self, stored: Stored, tail: Tail, *, parted: bool = False) -> None:
        """Save a finished job, and list the job for pruning.

        A job of a flow has a separate class while a dependent needs the job. With ``parted`` no
        dependent needs it.
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
        """Hint sleepers, and write the rows and counters. Called before the commit.

        Without a change nothing is written, so the transaction does not wait for the disk.
        """
        self.sync()
        if self.store.wakeups.anyone():
            self._ring()
            self.sync()
        self.partitions.write()
        self.limiters.write()
        self.order.write()
        self.write_rows()
        write_history(self)
        if self._kept is not None and self._kept != self._first_kept:
            self.txn.put(self.store.key("kept"), KEPT.pack(*self._kept))

    def tells(self, owner: Told) -> None:
        """Remember that after this commit the owner knows of all its leases."""
        self._told.append((owner, self._seq))

    def told(self, owner: Told) -> int:
        """The highest token that the owner may know, also by an earlier step of this commit."""
        return max([owner.told, *[number for one, number in self._told if one is owner]])

    def committed(self) -> None:
        """Called after the commit, before the next one can begin."""
        for owner, number in self._told:
            owner.told = number
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
        if not self.partitions.any:
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
        if self._finished:
            wakeups.ring(RESULT, bloom([job_id.decode() for job_id in self._finished]))
        if self._shrunk:
            wakeups.ring(SPACE, bloom(list(self._shrunk)))
        seconds = self.next_due() if self.untimed else _NEVER
        if seconds < _NEVER:
            wakeups.keep_time(self.now + max(0, int(seconds * MICRO)))


class HandOver(Protocol):
    """A function that leases jobs to a sleeper, by its want, and returns their number."""

    def __call__(
        self, commit: Transitions, lines: list[int], owner: int, terms: SleeperWant, /
    ) -> int: ...


class Commit(Protocol):
    """A function that applies its argument to one commit, and returns the result."""

    def __call__(
        self, apply: Callable[[Transitions], T], /, *, patience: float | None = None
    ) -> T: ...
