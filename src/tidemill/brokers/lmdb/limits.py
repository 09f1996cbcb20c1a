"""Limits of queues, and the settings of all limits, inside one commit.

The limiter of a queue is one record in the main database. The row of the queue says whether there
is such a record, and counts the running jobs. If a limiter is closed and will open by time alone,
the due table has an entry for that time.

Changed settings of a named limit reach all of its partitions in the same commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lmdb
import msgspec

from tidemill.brokers.lmdb.layout import DUE_KEY, DUE_LIMITER, MICRO, READY_KEY, Row, rows_of
from tidemill.brokers.lmdb.record import encode
from tidemill.brokers.lmdb.store import Store
from tidemill.core.job import Outcome
from tidemill.core.limit_settings import JobLimit, LimitSettings
from tidemill.limits.arithmetic import (
    NEVER,
    Held,
    Limiter,
    LimitStats,
    apply_settings,
    change,
    ended,
    give_back,
    opens,
    room,
    take,
)

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.transitions import Transitions

QUEUE_LIMITS, LIMITS = "g/", "l/"
"""Prefixes of records in the main database: for the limiter of a queue, and for a limit."""


class Limited(msgspec.Struct, array_like=True):
    """A limit as stored: the settings that apply, and the settings that code declared last.

    Attributes:
        limiter: the limiter of a queue; a named limit has a limiter in each of its partitions.
        due: the time of its entry in the due table; 0 without an entry.
        by_hand: a person made the settings, not the code.
    """

    terms: LimitSettings = LimitSettings()
    declared: LimitSettings | None = None
    limiter: Limiter = msgspec.field(default_factory=Limiter)
    due: int = 0
    by_hand: bool = False


_LIMITED = msgspec.msgpack.Decoder(Limited)


def read_limited(store: Store, txn: lmdb.Transaction[bytes], name: str) -> Limited | None:
    """A stored limit; ``name`` begins with ``QUEUE_LIMITS`` or ``LIMITS``."""
    data = txn.get(store.key(name))
    return _LIMITED.decode(data) if data is not None else None


class Limiters:
    """The limits that one commit uses."""

    def __init__(self, state: Transitions) -> None:
        self._state = state
        self._queues: dict[str, tuple[Row, Limited]] = {}
        self._closed: set[str] = set()  # queues whose limits let no job start before this commit
        self._names: dict[str, Limited] = {}
        self._dirty: set[str] = set()

    # -- queues ---------------------------------------------------------------------------------

    def load(self, row: Row) -> None:
        """Read the limiter of a queue, before anything changes."""
        limited = read_limited(self._state.store, self._state.txn, QUEUE_LIMITS + row.name)
        assert limited is not None
        self._queues[row.name] = row, limited
        if limited.due or not self.room(row, 1):
            self._closed.add(row.name)

    def room(self, row: Row, most: int) -> int:
        """The number of jobs of a queue with a limiter that may start now."""
        limited = self._queues[row.name][1]
        return room(limited.terms, limited.limiter, row.running, self._state.now, most)

    def take(self, row: Row, count: int) -> None:
        """Charge the limiter for ``count`` jobs of the queue that were leased."""
        if count:
            limited = self._queues[row.name][1]
            take(limited.terms, limited.limiter, self._state.now, count)
            self._dirty.add(QUEUE_LIMITS + row.name)

    def ended(self, row: Row, outcome: int, back: int) -> None:
        """Free the place of a lease; ``back``: time of the lease if the job never ran, else 0."""
        limited = self._queues[row.name][1]
        if outcome in (Outcome.SUCCESS, Outcome.RETRY, Outcome.FAIL):
            well = outcome == Outcome.SUCCESS
            ended(limited.terms, limited.limiter, self._state.now, well=well)
        elif back:
            give_back(limited.terms, limited.limiter, back)
        self._dirty.add(QUEUE_LIMITS + row.name)

    def came_due(self, row: Row) -> None:
        """Handle a queue whose entry in the due table came due and was deleted."""
        self._queues[row.name][1].due = 0
        self._dirty.add(QUEUE_LIMITS + row.name)

    def sync(self) -> None:
        """Hint sleepers about limiters that opened, and set the due times of closed limiters."""
        for name, (row, limited) in self._queues.items():
            when = opens(limited.terms, limited.limiter, row.running, self._state.now)
            if not when and name in self._closed:
                self._closed.discard(name)
                self._ring(row)
            self._arm(name, row, limited, when if row.ready and when < NEVER else 0)

    def _ring(self, row: Row) -> None:
        count = self.room(row, row.ready)
        cursor = self._state.txn.cursor(self._state.t.ready)
        for line in (*row.lines, row.lost_line):
            prefix = READY_KEY.pack(line, 0, 0)[:4]
            if count and cursor.set_range(prefix) and cursor.key()[:4] == prefix:
                self._state.ring(row, line & 1, count)

    def _arm(self, name: str, row: Row, limited: Limited, when: int) -> None:
        if when == limited.due:
            return
        state = self._state
        if limited.due:
            state.txn.delete(DUE_KEY.pack(0, limited.due, DUE_LIMITER, row.number), db=state.t.due)
        if when:
            key = DUE_KEY.pack(0, when, DUE_LIMITER, row.number)
            state.txn.put(key, name.encode(), db=state.t.due)
            state.untimed = True
        limited.due = when
        self._dirty.add(QUEUE_LIMITS + name)

    def set_queue(self, row: Row, terms: LimitSettings | None, *, declared: bool) -> None:
        """Apply these settings to a queue."""
        if not row.has_limit:
            row.has_limit = 1
            row.dirty = True
            self._queues[row.name] = row, Limited()
        limited = self._queues[row.name][1]
        old = apply_settings(limited, terms, declared=declared)
        self._dirty.add(QUEUE_LIMITS + row.name)
        if limited.terms != old:
            change(old, limited.terms, limited.limiter, self._state.now)
            self._closed.add(row.name)

    # -- limits by name -------------------------------------------------------------------------

    def terms(self, partition: bytes) -> LimitSettings:
        """The settings that apply to a partition of a limit that a job has declared."""
        limited = self._named(partition[: partition.index(0)].decode())
        assert limited is not None
        return limited.terms

    def _named(self, name: str) -> Limited | None:
        limited = self._names.get(name)
        if limited is None:
            limited = read_limited(self._state.store, self._state.txn, LIMITS + name)
            if limited is not None:
                self._names[name] = limited
        return limited

    def declare(self, job_limit: JobLimit, *, anew: bool = True) -> None:
        """Declare the limit of a job; without ``anew``, only if the store has no such limit."""
        limited = self._named(job_limit.name)
        if limited is None or (anew and limited.declared != job_limit.terms):
            self.set_named(job_limit.name, job_limit.terms, declared=True)

    def set_named(self, name: str, terms: LimitSettings | None, *, declared: bool) -> None:
        """Apply these settings to a limit and to all of its partitions."""
        limited = self._named(name)
        if limited is None:
            limited = self._names[name] = Limited()
        old = apply_settings(limited, terms, declared=declared)
        self._dirty.add(LIMITS + name)
        if limited.terms != old:
            self._state.partitions.change(name, old)

    def write(self) -> None:
        """Store what has changed."""
        for key in self._dirty:
            name = key[len(QUEUE_LIMITS) :]
            limited = self._queues[name][1] if key.startswith(QUEUE_LIMITS) else self._names[name]
            self._state.txn.put(self._state.store.key(key), encode(limited))
        self._dirty.clear()


def names_of(store: Store, txn: lmdb.Transaction[bytes], kind: str) -> list[str]:
    """The names of all records of a kind."""
    first = store.key(kind)
    return [key[len(first) :].decode() for key, _ in rows_of(txn, None, first)]


# -- looking -------------------------------------------------------------------------------------


def queue_held(limited: Limited, row: Row, now: int) -> Held:
    """The limit of a queue, for its ready jobs."""
    when = opens(limited.terms, limited.limiter, row.running, now)
    breaker = limited.terms.breaker
    broken = breaker is not None and limited.limiter.failures >= breaker[0]
    seconds = seconds_until(when, now)
    return Held(row.name, "", True, seconds, row.running, limited.terms, broken)


def queue_limit_stats(limited: Limited, row: Row, now: int) -> LimitStats:
    """The figures of a queue's limit."""
    when = opens(limited.terms, limited.limiter, row.running, now)
    return LimitStats(
        name=row.name,
        queue=True,
        terms=limited.terms,
        declared=limited.declared,
        by_hand=limited.by_hand,
        running=row.running,
        failures=limited.limiter.failures,
        until=seconds_until(when, now),
    )


def seconds_until(when: int, now: int) -> float:
    """Seconds until a limiter opens: 0 for now, infinity when only the end of a job opens it."""
    if not when:
        return 0.0
    return (when - now) / MICRO if when < NEVER else float("inf")
