"""Limits inside one commit: the limiters of queues, and the partitions (keys) of named limits.

The limiter of a queue is one record in the main database. The row of the queue says whether there
is such a record, and counts the running jobs. If a limiter is closed and will open by time alone,
the due table has an entry for that time.

A separate table has all ready jobs of a partition, in order. For each line, the ready table also
has the partition's first job, if it may start. Each change of a partition makes it *stale*;
:meth:`Partitions.sync` then corrects the ready table. In the ready table, the first job of a
partition has the turn, the number of the partition's last lease, in place of its sequence, if the
turn is higher. So keys take turns. See ``docs/design/limits.md``.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import lmdb
import msgspec

from tidemill.brokers.lmdb.engine.store import Store
from tidemill.brokers.lmdb.layout import (
    DUE_KEY,
    DUE_LIMITER,
    DUE_PARTITION,
    MICRO,
    NUMBER,
    READY_KEY,
    UNUSED,
    Row,
    Tables,
    rows_of,
)
from tidemill.brokers.lmdb.record import Stored, encode, job_limit_of
from tidemill.core.envelope import JobLimit, LimitSettings
from tidemill.core.job import Outcome
from tidemill.limits.arithmetic import (
    NEVER,
    Held,
    Limiter,
    LimitStats,
    apply_settings,
    change,
    clear_at,
    ended,
    give_back,
    opens,
    room,
    take,
)

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.transitions import Transitions

QUEUE_LIMITS, LIMITS = "g/", "l/"  # prefixes of records: a queue's limiter, a limit


class Limited(msgspec.Struct, array_like=True):
    """A limit as stored: the settings that apply, and the settings that code declared last."""

    terms: LimitSettings = LimitSettings()
    declared: LimitSettings | None = None
    # The limiter of a queue; a named limit has a limiter in each of its partitions.
    limiter: Limiter = msgspec.field(default_factory=Limiter)
    due: int = 0  # the time of its entry in the due table; 0 without an entry
    by_hand: bool = False  # a person made the settings, not the code


_LIMITED = msgspec.msgpack.Decoder(Limited)


def read_limited(store: Store, txn: lmdb.Transaction[bytes], name: str) -> Limited | None:
    """A stored limit; ``name`` begins with ``QUEUE_LIMITS`` or ``LIMITS``."""
    data = txn.get(store.key(name))
    return _LIMITED.decode(data) if data is not None else None


class Limiters:
    """The limits that one commit uses."""

    def __init__(self, commit: Transitions) -> None:
        self._commit = commit
        self._queues: dict[str, tuple[Row, Limited]] = {}
        self._closed: set[str] = set()  # queues whose limits let no job start before this commit
        self._names: dict[str, Limited] = {}
        self._dirty: dict[str, Limited] = {}

    # -- queues ---------------------------------------------------------------------------------

    def load(self, row: Row) -> None:
        """Read the limiter of a queue, before anything changes."""
        limited = read_limited(self._commit.store, self._commit.txn, QUEUE_LIMITS + row.name)
        assert limited is not None
        self._queues[row.name] = row, limited
        if limited.due or not self.room(row, 1):
            self._closed.add(row.name)

    def room(self, row: Row, most: int) -> int:
        """The number of jobs of a queue with a limiter that may start now."""
        limited = self._queues[row.name][1]
        return room(limited.terms, limited.limiter, row.running, self._commit.now, most)

    def take(self, row: Row, count: int) -> None:
        """Charge the limiter for ``count`` jobs of the queue that were leased."""
        if count:
            limited = self._queues[row.name][1]
            take(limited.terms, limited.limiter, self._commit.now, count)
            self._dirty[QUEUE_LIMITS + row.name] = limited

    def ended(self, row: Row, outcome: int, back: int) -> None:
        """Free the place of a lease; ``back``: time of the lease if the job never ran, else 0."""
        limited = self._queues[row.name][1]
        if outcome in (Outcome.SUCCESS, Outcome.RETRY, Outcome.FAIL):
            well = outcome == Outcome.SUCCESS
            ended(limited.terms, limited.limiter, self._commit.now, well=well)
        elif back:
            give_back(limited.terms, limited.limiter, back)
        self._dirty[QUEUE_LIMITS + row.name] = limited

    def came_due(self, row: Row) -> None:
        """Handle a queue whose entry in the due table came due and was deleted."""
        limited = self._queues[row.name][1]
        limited.due = 0
        self._dirty[QUEUE_LIMITS + row.name] = limited

    def sync(self) -> None:
        """Hint sleepers about limiters that opened, and set the due times of closed limiters."""
        for name, (row, limited) in self._queues.items():
            when = opens(limited.terms, limited.limiter, row.running, self._commit.now)
            if not when and name in self._closed:
                self._closed.discard(name)
                self._ring(row)
            self._arm(name, row, limited, when if row.ready and when < NEVER else 0)

    def _ring(self, row: Row) -> None:
        count = self.room(row, row.ready)
        cursor = self._commit.txn.cursor(self._commit.t.ready)
        for line in (*row.lines, row.lost_line):
            prefix = READY_KEY.pack(line, 0, 0)[:4]
            if count and cursor.set_range(prefix) and cursor.key()[:4] == prefix:
                self._commit.ring(row, line & 1, count)

    def _arm(self, name: str, row: Row, limited: Limited, when: int) -> None:
        if when != limited.due:
            old, limited.due = limited.due, when
            _move_entry(self._commit, DUE_LIMITER, row.number, (0, old), (0, when), name.encode())
            self._dirty[QUEUE_LIMITS + name] = limited

    def set_queue(self, row: Row, terms: LimitSettings | None, *, declared: bool) -> None:
        """Apply these settings to a queue."""
        if not row.has_limit:
            row.has_limit = 1
            row.dirty = True
            self._queues[row.name] = row, Limited()
        limited = self._queues[row.name][1]
        old = apply_settings(limited, terms, declared=declared)
        self._dirty[QUEUE_LIMITS + row.name] = limited
        if limited.terms != old:
            change(old, limited.terms, limited.limiter, self._commit.now)
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
            limited = read_limited(self._commit.store, self._commit.txn, LIMITS + name)
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
        self._dirty[LIMITS + name] = limited
        if limited.terms != old:
            self._commit.partitions.change(name, old)

    def write(self) -> None:
        for key, limited in self._dirty.items():
            self._commit.txn.put(self._commit.store.key(key), encode(limited))
        self._dirty.clear()


def _move_entry(
    commit: Transitions,
    kind: int,
    number: int,
    old: tuple[int, int],
    new: tuple[int, int],
    reference: bytes,
) -> None:
    """Replace an entry of the due table by another clock and time; the time 0 means no entry."""
    if old[1]:
        commit.txn.delete(DUE_KEY.pack(*old, kind, number), db=commit.t.due)
    if new[1]:
        commit.txn.put(DUE_KEY.pack(*new, kind, number), reference, db=commit.t.due)
        commit.untimed = True


def names_of(store: Store, txn: lmdb.Transaction[bytes], kind: str) -> list[str]:
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


# -- partitions ----------------------------------------------------------------------------------


_LINE = struct.Struct(">I")
COST = struct.Struct(">d")  # the cost that precedes the id of a job in the table of partitions

Place = tuple[int, int, int]


class Partition(msgspec.Struct, array_like=True, gc=False):
    """A partition as stored. The table's key is the name of the limit, a zero and the key."""

    number: int  # the prefix of its jobs' keys
    limiter: Limiter = msgspec.field(default_factory=Limiter)
    running: int = 0  # the number of its leased jobs
    turn: int = 0  # the number of its last lease
    # clock, due: the clock and time of its entry in the due table; 0 without an entry. At this time
    # the partition opens, or can be forgotten.
    clock: int = 0
    due: int = 0
    # For each line with ready jobs, (rank, turn, sequence) of its job in the ready table, if any.
    # Here turn is the job's sequence, or the partition's turn if the partition's turn is higher.
    lines: dict[int, Place | None] = {}


_PARTITION = msgspec.msgpack.Decoder(Partition)


class Partitions:
    """The partitions that one commit uses."""

    def __init__(self, commit: Transitions) -> None:
        self._commit = commit
        self.limiters = commit.limiters
        self._partitions: dict[bytes, Partition] = {}
        self._stale: set[bytes] = set()
        self._came: dict[bytes, dict[int, int]] = {}  # the number of new jobs by partition and line
        self._dirty: set[bytes] = set()
        self._cursor: lmdb.Cursor[bytes] | None = None
        self.lent: dict[int, tuple[bytes, float]] = {}  # partition and cost of a lease, by token

    @property
    def any(self) -> bool:
        return bool(self._partitions)

    def _partition(self, name: bytes) -> Partition:
        partition = self._partitions.get(name)
        if partition is None:
            data = self._commit.txn.get(name, db=self._commit.t.partition)
            partition = (
                _PARTITION.decode(data)
                if data is not None
                else Partition(self._commit.next_number())
            )
            self._partitions[name] = partition
        return partition

    def stale(self, name: bytes) -> None:
        """Have ``sync`` correct the entries of the partition in the ready table."""
        self._dirty.add(name)
        self._stale.add(name)

    # -- jobs -----------------------------------------------------------------------------------

    def enter(self, job_limit: JobLimit, key: bytes, job_id: bytes) -> None:
        """Add a ready job of a partition, under its ready key."""
        name = name_of(job_limit.name, job_limit.key)
        partition = self._partition(name)
        line, rank, seq = READY_KEY.unpack(key)
        value = COST.pack(job_limit.cost) + job_id
        self._commit.txn.put(NUMBER.pack(partition.number) + key, value, db=self._commit.t.park)
        first = partition.lines.setdefault(line, None)
        came = self._came.setdefault(name, {})
        came[line] = came.get(line, 0) + 1
        if first is None or (rank, seq) < (first[0], first[2]):
            self.stale(name)

    def leave(self, stored: Stored) -> None:
        """Remove a ready job of a partition that was not leased."""
        name = _name_of(stored)
        key = NUMBER.pack(self._partition(name).number) + stored.head.ready_key
        self._commit.txn.delete(key, db=self._commit.t.park)
        self.stale(name)

    def is_parked(self, stored: Stored) -> bool:
        """True when a ready job of a partition does not run."""
        partition = self._partitions.get(_name_of(stored))
        txn, tables = self._commit.txn, self._commit.t
        return is_parked(txn, tables, stored, partition)

    def ended(self, stored: Stored, token: int, back: int = 0) -> None:
        """Free the place of a lease; ``back``: time of the lease if the job never ran, else 0."""
        lent = self._commit.store.lent
        name, cost = lent.pop(token) if token in lent else _taken_from(stored)
        partition = self._partition(name)
        partition.running -= 1
        if back:
            terms = self.limiters.terms(name)
            give_back(terms, partition.limiter, back, cost)
        self._dirty.add(name)
        if None in partition.lines.values() or not (partition.lines or partition.running):
            self._stale.add(name)  # a first job waits for a free place, or the partition is empty

    def goes_on(self, stored: Stored) -> None:
        """Count the lease of a stuck job as running again, after the end of its attempt."""
        self._partition(_name_of(stored)).running += 1

    # -- while jobs are leased: see PartitionClaims ---------------------------------------------

    def opened(self, name: bytes) -> Partition:
        """The partition, before jobs of it are leased."""
        self._dirty.add(name)
        return self._partition(name)

    def closed(self, name: bytes, partition: Partition, opening: int) -> None:
        """Re-arm the timer after leasing; ``opening`` is the earliest start of the next job."""
        if partition.due or opening < NEVER or not partition.lines:
            self._arm(name, partition, opening)

    def look_again(self, name: bytes) -> None:
        """Correct the ready table after a lease: other jobs of the partition may have to wait."""
        self._stale.discard(name)
        self._sync_one(name, self._came.pop(name, {}), ring=False)

    # -- changes --------------------------------------------------------------------------------

    def came_due(self, name: bytes) -> None:
        """Handle a partition whose entry in the due table came due and was deleted."""
        partition = self._partition(name)
        partition.due = partition.clock = 0
        self.stale(name)

    def change(self, limit: str, old: LimitSettings) -> None:
        stored = {name for name, _ in partitions_of(self._commit.txn, self._commit.t, limit)}
        prefix = f"{limit}\0".encode()
        for name in stored.union(name for name in self._partitions if name.startswith(prefix)):
            terms, limiter = self.limiters.terms(name), self._partition(name).limiter
            change(old, terms, limiter, self._commit.now)
            self.stale(name)

    def sweep(self, most: int) -> bool:
        """Forget partitions that are no longer used; True when there are more."""
        commit = self._commit
        cursor = commit.txn.cursor(commit.t.due)
        for _ in range(most):
            if not cursor.set_range(DUE_KEY.pack(UNUSED, 0, 0, 0)):
                return False
            clock, due, _, _ = DUE_KEY.unpack(cursor.key())
            if clock != UNUSED or due > commit.now:
                return False
            name = cursor.value()
            cursor.delete()
            self.came_due(name)
        return True

    def sync(self) -> None:
        """Correct the ready table for every partition that has changed."""
        while self._stale:
            name = self._stale.pop()
            self._sync_one(name, self._came.pop(name, {}))
        while self._came:  # new jobs that are not the first jobs of their lines
            name, came = self._came.popitem()
            terms, partition = self.limiters.terms(name), self._partitions[name]
            for line, count in came.items():
                self._ring(terms, partition, line, count)

    def _sync_one(self, name: bytes, came: dict[int, int], *, ring: bool = True) -> None:
        commit, partition = self._commit, self._partitions[name]
        terms = self.limiters.terms(name)
        turn = partition.turn if name[-1] else 0
        opening = NEVER
        if self._cursor is None:
            self._cursor = commit.txn.cursor(commit.t.park)
        cursor = self._cursor
        for line, head in list(partition.lines.items()):
            prefix = NUMBER.pack(partition.number) + _LINE.pack(line)
            want: Place | None = None
            job_id = b""
            if cursor.set_range(prefix) and cursor.key().startswith(prefix):
                found, value = cursor.item()
                _, rank, seq = READY_KEY.unpack_from(found, NUMBER.size)
                cost, job_id = COST.unpack_from(value)[0], value[COST.size :]
                when = opens(terms, partition.limiter, partition.running, commit.now, cost)
                if when:
                    opening = min(opening, when)
                else:
                    want = rank, max(seq, turn), seq
            else:
                del partition.lines[line]
            if want != head:
                self._stand(line, head, want, job_id)
            if line in partition.lines:
                partition.lines[line] = want
            if want and ring and (line in came or head is None):
                self._ring(terms, partition, line, came.get(line, 1))
        self._arm(name, partition, opening)

    def _ring(self, terms: LimitSettings, partition: Partition, line: int, count: int) -> None:
        """Hint sleepers for ``count`` jobs of a line, at most as many as the limiter lets start."""
        commit = self._commit
        count = room(terms, partition.limiter, partition.running, commit.now, count)
        commit.ring(commit.row_of(line), line & 1, max(1, count))

    def _stand(self, line: int, old: Place | None, new: Place | None, job_id: bytes) -> None:
        """Replace the partition's job in the ready table by another job, or by none."""
        commit = self._commit
        if old:
            commit.txn.delete(READY_KEY.pack(line, *old[:2]), db=commit.t.ready)
        if new:
            commit.txn.put(READY_KEY.pack(line, *new[:2]), job_id, db=commit.t.ready)

    def _arm(self, name: bytes, partition: Partition, opening: int) -> None:
        """Set the entry in the due table: the time to open or to forget the partition."""
        clock, due = (0, opening) if opening < NEVER else (0, 0)
        if not partition.lines and not partition.running:
            clear = clear_at(self.limiters.terms(name), partition.limiter)
            clock, due = (UNUSED, clear) if clear > self._commit.now else (0, 0)
        old = partition.clock, partition.due
        if (clock, due) != old:
            partition.clock, partition.due = clock, due
            _move_entry(self._commit, DUE_PARTITION, partition.number, old, (clock, due), name)
            self._dirty.add(name)

    def write(self) -> None:
        """Store what has changed; a partition without any state is deleted."""
        commit = self._commit
        for name in self._dirty:
            partition = self._partitions[name]
            if partition.lines or partition.running or partition.due:
                commit.txn.put(name, encode(partition), db=commit.t.partition)
            else:
                commit.txn.delete(name, db=commit.t.partition)
        self._dirty.clear()


def name_of(limit: str, key: str) -> bytes:
    """The key under which a partition is stored."""
    return f"{limit}\0{key}".encode()


def _name_of(stored: Stored) -> bytes:
    return _taken_from(stored)[0]


def _taken_from(stored: Stored) -> tuple[bytes, float]:
    job_limit = job_limit_of(stored.envelope)
    return name_of(job_limit.name, job_limit.key), job_limit.cost


# -- looking -------------------------------------------------------------------------------------


def partitions_of(
    txn: lmdb.Transaction[bytes], tables: Tables, limit: str
) -> Iterator[tuple[bytes, Partition]]:
    for name, data in rows_of(txn, tables.partition, f"{limit}\0".encode()):
        yield name, _PARTITION.decode(data)


def _read(txn: lmdb.Transaction[bytes], tables: Tables, name: bytes) -> Partition | None:
    data = txn.get(name, db=tables.partition)
    return _PARTITION.decode(data) if data is not None else None


def is_parked(
    txn: lmdb.Transaction[bytes], tables: Tables, stored: Stored, partition: Partition | None = None
) -> bool:
    """True when a job whose header says ready does not run."""
    key = parked_key(txn, tables, stored, partition)
    return bool(key) and txn.get(key, db=tables.park) is not None


def parked_key(
    txn: lmdb.Transaction[bytes], tables: Tables, stored: Stored, partition: Partition | None = None
) -> bytes:
    """The key of a ready job in the table of partitions; empty without its partition."""
    partition = partition or _read(txn, tables, _name_of(stored))
    return b"" if partition is None else NUMBER.pack(partition.number) + stored.head.ready_key


def partition_held(
    store: Store, txn: lmdb.Transaction[bytes], stored: Stored, now: int
) -> Held | None:
    """The limit of a job of a partition; None for a partition that is gone."""
    job_limit = job_limit_of(stored.envelope)
    limited, name = (
        read_limited(store, txn, LIMITS + job_limit.name),
        name_of(job_limit.name, job_limit.key),
    )
    partition = _read(txn, store.tables, name)
    assert limited is not None
    if partition is None:
        return None
    terms = limited.terms
    when = opens(terms, partition.limiter, partition.running, now, job_limit.cost)
    until = seconds_until(when, now)
    return Held(job_limit.name, job_limit.key, False, until, partition.running, terms)


# -- leasing from partitions ---------------------------------------------------------------------


_PARK_KEY = struct.Struct(">QIIQ")  # partition, line, rank, sequence
_NOTHING = 0, 0, 0, 0
_MOST = 1 << 30


class PartitionClaim:
    """The jobs that a step has taken from one partition."""

    __slots__ = ("cost", "keyed", "left", "name", "opening", "partition", "spent", "terms")

    def __init__(
        self, partition: Partition, name: bytes, terms: LimitSettings, cost: float
    ) -> None:
        self.partition = partition
        self.name = name
        self.terms = terms  # the settings of the partition's limit
        self.keyed = name[-1] != 0  # True when the limit has keys, and so several partitions
        self.cost = cost  # the cost of the job that is being leased
        self.spent = 0.0  # tokens of leased jobs that the limiter does not know yet
        self.left = 0  # the number of jobs of cost 1 that may still start, as far as the step knows
        self.opening = NEVER  # the earliest start of its next job, if that job may not start now


class PartitionClaims:
    """The claims of a step on the partitions of one line; ``held``: a heap of their next jobs."""

    def __init__(self, commit: Transitions, line: int) -> None:
        self.held: list[tuple[bytes, bytes, PartitionClaim]] = []
        self.moved = False  # True when the step has to read the ready table again
        self._commit = commit
        self._line = line
        self._claims: dict[bytes, PartitionClaim] = {}
        self._cursor: lmdb.Cursor[bytes] | None = None

    def open(self, envelope: bytes) -> PartitionClaim:
        """Open the claim on a partition whose first job was found in the ready table."""
        job_limit = job_limit_of(envelope)
        name = name_of(job_limit.name, job_limit.key)
        partition = self._commit.partitions.opened(name)
        terms = self._commit.limiters.terms(name)
        claim = self._claims[name] = PartitionClaim(partition, name, terms, job_limit.cost)
        return claim

    def remove(self, claim: PartitionClaim, rank: int, seq: int) -> None:
        """Remove a job that is no longer ready from the table of its partition."""
        key = _PARK_KEY.pack(claim.partition.number, self._line, rank, seq)
        if self._cursor is None:
            self._cursor = self._commit.txn.cursor(self._commit.t.park)
        if self._cursor.key() == key or self._cursor.set_key(key):
            self._cursor.delete()

    def dropped(self, claim: PartitionClaim) -> None:
        """Mark the partition as stale: the removed job is not leased."""
        claim.partition.lines[self._line] = None
        self._commit.partitions.stale(claim.name)

    def start(self, claim: PartitionClaim, token: int) -> None:
        """Count the lease of the removed job, and prepare the next job of its partition."""
        partition = claim.partition
        claim.spent += claim.cost
        partition.running += 1
        partition.turn = token
        if len(partition.lines) > 1:  # the first jobs of the other lines may change
            partition.lines[self._line] = None
            self.close()
            self._commit.partitions.look_again(claim.name)
            self.moved = True
            return
        self._commit.partitions.lent[token] = claim.name, claim.cost
        assert self._cursor is not None
        key, value = self._cursor.item()  # the job that follows the leased job
        number, line, rank, seq = _PARK_KEY.unpack(key) if key else _NOTHING
        if number != partition.number or line != self._line:
            del partition.lines[self._line]
            return
        claim.cost = COST.unpack_from(value)[0]
        if claim.left and claim.cost == 1:
            claim.left -= 1
        elif not self._opens(claim):
            partition.lines[self._line] = None
            return
        turn = token if claim.keyed and token > seq else seq
        partition.lines[self._line] = rank, turn, seq
        found = READY_KEY.pack(self._line, rank, turn)
        heapq.heappush(self.held, (found, value[COST.size :], claim))

    def _opens(self, claim: PartitionClaim) -> bool:
        """True when the next job of a partition may start now."""
        self._note(claim)
        partition, terms, now = claim.partition, claim.terms, self._commit.now
        if claim.cost == 1:
            claim.left = room(terms, partition.limiter, partition.running, now, _MOST) - 1
            if claim.left >= 0:
                return True
            claim.left = 0
        when = opens(terms, partition.limiter, partition.running, now, claim.cost)
        claim.opening = when or NEVER
        return not when

    def _note(self, claim: PartitionClaim) -> None:
        """Take the tokens of started jobs from the limiter."""
        take(claim.terms, claim.partition.limiter, self._commit.now, claim.spent)
        claim.spent = 0.0

    def close(self) -> None:
        """Write the next jobs to the ready table, and bring the partitions up to date."""
        for key, job_id, _ in self.held:
            self._commit.txn.put(key, job_id, db=self._commit.t.ready)
        self.held.clear()
        for claim in self._claims.values():
            if claim.spent:
                self._note(claim)
            self._commit.partitions.closed(claim.name, claim.partition, claim.opening)
        self._claims.clear()
