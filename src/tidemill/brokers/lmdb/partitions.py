"""Partitions: the state of each key of each named limit, inside one commit.

A separate table has all ready jobs of a partition, in order. For each line, the ready table also
has the partition's first job, if the limiter lets that job start. So a claim finds the jobs that
may start, and never walks over jobs that may not start. Each change of a partition makes it
*stale*; :meth:`Partitions.sync` then corrects the ready table.

Keys take turns. A partition's turn is the number of its last lease. In the ready table, the first
job of a partition has the turn in place of its sequence, if the turn is higher. So a key that has
just got a lease comes after the other keys.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import lmdb
import msgspec

from tidemill.brokers.lmdb.layout import (
    DUE_KEY,
    DUE_PARTITION,
    NUMBER,
    READY_KEY,
    UNUSED,
    Tables,
    rows_of,
)
from tidemill.brokers.lmdb.limits import LIMITS, read_limited, seconds_until
from tidemill.brokers.lmdb.record import Stored, encode, job_limit_of
from tidemill.brokers.lmdb.store import Store
from tidemill.core.limit_settings import JobLimit, LimitSettings
from tidemill.limits.arithmetic import (
    NEVER,
    Held,
    Limiter,
    change,
    clear_at,
    give_back,
    opens,
    room,
)

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.transitions import Transitions

_LINE = struct.Struct(">I")
COST = struct.Struct(">d")
"""The cost that precedes the id of a job in the table of partitions."""

Place = tuple[int, int, int]


class Partition(msgspec.Struct, array_like=True, gc=False):
    """A partition as stored. The table's key is the name of the limit, a zero and the key.

    Attributes:
        number: the prefix of its jobs' keys.
        running: the number of its leased jobs.
        turn: the number of its last lease.
        clock, due: the clock and time of its entry in the due table; 0 without an entry. At this
            time the partition opens, or can be forgotten.
        lines: for each line with ready jobs, (rank, turn, sequence) of its job in the ready table,
            if any. Here turn is the job's sequence, or the partition's turn if the partition's turn
            is higher.
    """

    number: int
    limiter: Limiter = msgspec.field(default_factory=Limiter)
    running: int = 0
    turn: int = 0
    clock: int = 0
    due: int = 0
    lines: dict[int, Place | None] = {}


_PARTITION = msgspec.msgpack.Decoder(Partition)


class Partitions:
    """The partitions that one commit uses."""

    def __init__(self, state: Transitions) -> None:
        self.state = state
        self.limiters = state.limiters
        self._partitions: dict[bytes, Partition] = {}
        self._stale: set[bytes] = set()
        self._came: dict[bytes, dict[int, int]] = {}  # the number of new jobs by partition and line
        self._dirty: set[bytes] = set()
        self._cursor: lmdb.Cursor[bytes] | None = None
        self.lent: dict[int, tuple[bytes, float]] = {}  # partition and cost of a lease, by token

    @property
    def any(self) -> bool:
        """True when the commit uses any partition."""
        return bool(self._partitions)

    def _partition(self, name: bytes) -> Partition:
        partition = self._partitions.get(name)
        if partition is None:
            data = self.state.txn.get(name, db=self.state.t.partition)
            partition = (
                _PARTITION.decode(data) if data is not None else Partition(self.state.next_number())
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
        self.state.txn.put(NUMBER.pack(partition.number) + key, value, db=self.state.t.park)
        first = partition.lines.setdefault(line, None)
        came = self._came.setdefault(name, {})
        came[line] = came.get(line, 0) + 1
        if first is None or (rank, seq) < (first[0], first[2]):
            self.stale(name)

    def leave(self, stored: Stored) -> None:
        """Remove a ready job of a partition that was not leased."""
        name = _name_of(stored)
        key = NUMBER.pack(self._partition(name).number) + stored.head.ready_key
        self.state.txn.delete(key, db=self.state.t.park)
        self.stale(name)

    def is_parked(self, stored: Stored) -> bool:
        """True when a ready job of a partition does not run."""
        partition = self._partitions.get(_name_of(stored))
        txn, tables = self.state.txn, self.state.t
        return is_parked(txn, tables, stored, partition)

    def ended(self, stored: Stored, token: int, back: int = 0) -> None:
        """Free the place of a lease; ``back``: time of the lease if the job never ran, else 0."""
        lent = self.state.store.lent
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

    # -- while jobs are leased: see partition_claim.py ------------------------------------------

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
        """Apply the changed settings of a limit to all of its partitions."""
        stored = {name for name, _ in partitions_of(self.state.txn, self.state.t, limit)}
        prefix = f"{limit}\0".encode()
        for name in stored.union(name for name in self._partitions if name.startswith(prefix)):
            terms, limiter = self.limiters.terms(name), self._partition(name).limiter
            change(old, terms, limiter, self.state.now)
            self.stale(name)

    def sweep(self, most: int) -> bool:
        """Forget partitions that are no longer used; True when there are more."""
        state = self.state
        cursor = state.txn.cursor(state.t.due)
        for _ in range(most):
            if not cursor.set_range(DUE_KEY.pack(UNUSED, 0, 0, 0)):
                return False
            clock, due, _, _ = DUE_KEY.unpack(cursor.key())
            if clock != UNUSED or due > state.now:
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
        state, partition = self.state, self._partitions[name]
        terms = self.limiters.terms(name)
        turn = partition.turn if name[-1] else 0
        opening = NEVER
        if self._cursor is None:
            self._cursor = state.txn.cursor(state.t.park)
        cursor = self._cursor
        for line, head in list(partition.lines.items()):
            prefix = NUMBER.pack(partition.number) + _LINE.pack(line)
            want: Place | None = None
            job_id = b""
            if cursor.set_range(prefix) and cursor.key().startswith(prefix):
                found, value = cursor.item()
                _, rank, seq = READY_KEY.unpack_from(found, NUMBER.size)
                cost, job_id = COST.unpack_from(value)[0], value[COST.size :]
                when = opens(terms, partition.limiter, partition.running, state.now, cost)
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
        state = self.state
        count = room(terms, partition.limiter, partition.running, state.now, count)
        state.ring(state.row_of(line), line & 1, max(1, count))

    def _stand(self, line: int, old: Place | None, new: Place | None, job_id: bytes) -> None:
        """Replace the partition's job in the ready table by another job, or by none."""
        state = self.state
        if old:
            state.txn.delete(READY_KEY.pack(line, *old[:2]), db=state.t.ready)
        if new:
            state.txn.put(READY_KEY.pack(line, *new[:2]), job_id, db=state.t.ready)

    def _arm(self, name: bytes, partition: Partition, opening: int) -> None:
        """Set the entry in the due table: the time to open or to forget the partition."""
        clock, due = (0, opening) if opening < NEVER else (0, 0)
        if not partition.lines and not partition.running:
            clear = clear_at(self.limiters.terms(name), partition.limiter)
            clock, due = (UNUSED, clear) if clear > self.state.now else (0, 0)
        if (clock, due) == (partition.clock, partition.due):
            return
        state = self.state
        if partition.due:
            old = DUE_KEY.pack(partition.clock, partition.due, DUE_PARTITION, partition.number)
            state.txn.delete(old, db=state.t.due)
        if due:
            state.txn.put(
                DUE_KEY.pack(clock, due, DUE_PARTITION, partition.number), name, db=state.t.due
            )
            state.untimed = True
        partition.clock, partition.due = clock, due
        self._dirty.add(name)

    def write(self) -> None:
        """Store what has changed; a partition without any state is deleted."""
        state = self.state
        for name in self._dirty:
            partition = self._partitions[name]
            if partition.lines or partition.running or partition.due:
                state.txn.put(name, encode(partition), db=state.t.partition)
            else:
                state.txn.delete(name, db=state.t.partition)
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
    """The partitions of a limit, by name."""
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


def parked_in(
    txn: lmdb.Transaction[bytes], tables: Tables, lines: Collection[int] | None = None
) -> Iterator[bytes]:
    """Ids of ready jobs in partitions, of all lines or of some lines."""
    for key, value in txn.cursor(tables.park):
        if lines is None or _LINE.unpack_from(key, NUMBER.size)[0] in lines:
            yield value[COST.size :]


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
