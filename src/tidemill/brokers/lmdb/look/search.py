"""Lists of jobs: their order, and the search for jobs (``docs/design/lmdb.md``).

Lists show jobs in the order of acceptance, newest first. The job table is sorted by id. A new job
is *in order* if its id is higher than all earlier ids in order, and was made about now. Any other
job is *apart*: its header says so, and the table ``said`` has the entry ``i·number → id``. Two
walks downward give all jobs by number: one over the job table, one over these entries.

The walk stops when a look at the tables of the wanted states costs no more than the walk so far.
The jobs with the highest numbers there are listed, and the walk goes on behind them. Ids with a
prefix are also gathered, unless there are many. A cursor has the number of the last listed job, and
the id of the last job in order, at which the walk through the job table goes on.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import lmdb

from tidemill.brokers.contract.inspection import Filter, bad_cursor
from tidemill.brokers.lmdb.claim.limits import COST
from tidemill.brokers.lmdb.engine.store import Store
from tidemill.brokers.lmdb.layout import (
    DUE_JOB,
    DUE_KEY,
    FIN_KEY,
    LEASE_VALUE,
    MICRO,
    NUMBER,
    READY_KEY,
    Row,
    Tables,
    ids_about,
    rows_of,
)
from tidemill.brokers.lmdb.put.unique import successors
from tidemill.brokers.lmdb.record import (
    KEPT_LINKED,
    KEPT_OTHER,
    KEPT_PLAIN,
    KEPT_RESULT,
    READY,
    STATES,
    Flag,
    flags_of,
    kept_counts,
    number_in,
    state_and_line,
)
from tidemill.core.job import State

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.transitions import Transitions

_FEW = 5000  # up to this many ids are gathered at once, without a walk
_MOST = 2000  # the most ids that are gathered at a time
_PREFIXED = 20_000  # ids with a prefix are gathered if there are fewer
_CHEAPER = 6  # a step of the walk costs as much as a look at so many entries
_CURSOR = "n:"  # the beginning of a cursor
_ID_MOST = 500  # the most bytes of an id; LMDB refuses to look for longer keys

_CLASSES = {
    State.SUCCEEDED: (KEPT_PLAIN, KEPT_RESULT),
    State.FAILED: (KEPT_OTHER,),
    State.CANCELLED: (KEPT_RESULT, KEPT_OTHER),
    State.EXPIRED: (KEPT_RESULT,),
}

Rows = Iterator[tuple[bytes, bytes]]
Entry = tuple[bytes, bytes]  # the number of a job, packed, and its id

Txn: TypeAlias = "lmdb.Transaction[bytes]"


class Finding:
    """One search, newest first, through as many read transactions as it needs."""

    # ``views`` reads the jobs (:meth:`.Store.reading_views`).

    def __init__(self, store: Store, txn: Txn, views: Txn, what: Filter, cursor: str) -> None:
        self._prefix, self._suffix = what.id_prefix.encode(), what.id_suffix.encode()
        self._number, self._at = _where(cursor)
        self._store = store
        self._t = store.tables
        self._states = {READY if s is State.RUNNING else STATES.index(s) for s in what.states}
        rows = _row_of(store, txn, what.queue) if what.queue else list(queue_rows(store, txn))
        self._row = rows[0] if what.queue and rows else None
        # The rows of queues count unfinished jobs by state, and count all jobs that ever finished.
        self._tables = [s for s in what.states if any(_has(row, s) for row in rows)]
        self._none = not rows or bool(what.states and not self._tables)
        self._gathered: Iterator[bytes] | None = None
        self._are_all = False  # True when no other job below the gathered jobs can match
        self._looked = 0
        if self._prefix:
            rows_here = itertools.islice(rows_of(txn, self._t.job, self._prefix), _PREFIXED)
            few = [(number_in(data), job_id) for job_id, data in rows_here]
            if len(few) < _PREFIXED:
                below = sorted((row for row in few if row[0] < self._number), reverse=True)
                self._gathered, self._are_all = (job_id for _, job_id in below), True

    @property
    def cursor(self) -> str:
        return f"{_CURSOR}{self._number}:{self._at.decode()}"

    def _size(self, txn: Txn, state: State) -> int:
        """The number of entries to read for a state; at least the number of its jobs."""
        if state in _CLASSES:
            kept = kept_counts(self._store, txn)
            linked = txn.stat(self._t.fin)["entries"] - sum(kept)
            return linked + sum(kept[each] for each in _CLASSES[state])
        if state is State.READY and self._row:
            return self._row.ready
        table = {
            State.READY: self._t.ready,
            State.RUNNING: self._t.lease,
            State.SCHEDULED: self._t.due,
            State.WAITING: self._t.key,
        }[state]
        beside = {State.WAITING: [self._t.wait], State.READY: [self._t.park]}
        more = sum(txn.stat(each)["entries"] for each in beside.get(state, ()))
        return txn.stat(table)["entries"] + more

    def rows(self, txn: Txn, views: Txn, most: int) -> Rows:
        """(id, view) of up to ``most`` jobs. A job that cannot match has empty data."""
        if self._none:
            return
        if self._gathered is None and self._is_better_gathered(txn):
            self._gather(txn, views)
        for job_id, data in itertools.islice(self._next(txn, views), most):
            self._looked += 1
            if number_in(data) < self._number:
                self._number = number_in(data)
                if not flags_of(data) & Flag.APART:
                    self._at = job_id
            else:
                # Since the ids were gathered, another job was put under this id.
                data = b""
            yield job_id, data if data and self._may_match(job_id, data) else b""

    def _may_match(self, job_id: bytes, data: bytes) -> bool:
        """False when the id and the header alone show that the job does not match."""
        state, line = state_and_line(data)
        return (
            job_id.startswith(self._prefix)
            and job_id.endswith(self._suffix)
            and (not self._states or state in self._states)
            and (self._row is None or line in self._row.lines)
        )

    def _is_better_gathered(self, txn: Txn) -> bool:
        if not self._tables:
            return False
        size = sum(self._size(txn, state) for state in self._tables)
        return size <= _FEW or size <= self._looked * _CHEAPER

    def _gather(self, txn: Txn, views: Txn) -> None:
        """List next the jobs with the highest numbers that may match."""
        below = NUMBER.pack(min(self._number, FIRST - 1))
        entries = (self._entries(txn, views, state, below) for state in self._tables)
        rows = {row for row in itertools.chain.from_iterable(entries) if row[0] < below}
        latest = heapq.nlargest(_MOST, rows)
        self._gathered = (job_id for _, job_id in latest)
        self._are_all = len(latest) < _MOST

    def _next(self, txn: Txn, views: Txn) -> Rows:
        """The jobs below the number that the search has reached, the newest first."""
        if self._gathered is not None:
            for job_id in self._gathered:
                data = views.get(job_id, db=self._t.job)
                if data is not None:
                    yield job_id, data
            if self._are_all:
                return
            self._gathered, self._looked = None, 0
        for _, job_id, data, _ in newest(self._store, txn, views, self._number, self._at):
            yield job_id, data

    def _entries(self, txn: Txn, views: Txn, state: State, below: bytes) -> Iterable[Entry]:
        """The entries of the latest jobs below a number that may be in a state."""
        if state is State.RUNNING:
            leases = (value for _, value in txn.cursor(self._t.lease))
            return ((value[8:16], value[LEASE_VALUE.size :]) for value in leases)
        if state is State.WAITING:
            waiting = (job_id for job_id, _ in txn.cursor(self._t.wait))
            ids = itertools.chain(successors(txn, self._t), waiting)
            found = ((job_id, views.get(job_id, db=self._t.job)) for job_id in ids)
            return ((NUMBER.pack(number_in(data)), job_id) for job_id, data in found if data)
        if state is State.SCHEDULED:
            return _latest(txn, self._t.due, bytes((DUE_JOB,)) + below)
        if state is State.READY:
            prefixes = [b""]
            if self._row is not None:
                lines = (*self._row.lines, self._row.lost_line)
                prefixes = [READY_KEY.pack(line, 0, 0)[:4] for line in lines]
            ready = (_latest(txn, self._t.ready, below, each) for each in prefixes)
            return itertools.chain(*ready, _latest(txn, self._t.park, below, skip=COST.size))
        classes = (bytes((kept,)) for kept in (*_CLASSES[state], KEPT_LINKED))
        ended = (_latest(txn, self._t.fin, below, each, NUMBER.size) for each in classes)
        return itertools.chain(*ended)


def _latest(
    txn: Txn, table: lmdb._Database, below: bytes, prefix: bytes = b"", skip: int = 0
) -> list[Entry]:
    """The entries with the highest ends of keys below a bound, of a table whose keys end so."""
    # The last keys come first, because they have mostly the highest ends. ``skip`` bytes of a value
    # are before the id.
    cursor = txn.cursor(table)
    if not (cursor.prev() if cursor.set_range(prefix + b"\xff" * 8) else cursor.last()):
        return []
    size = len(below)
    keys = itertools.takewhile(prefix.__le__, cursor.iterprev(values=False))
    ends = (key for key in keys if key[-size:] < below)
    latest = heapq.nlargest(_MOST, ends, key=operator.itemgetter(slice(-size, None)))
    found = ((key, txn.get(key, db=table)) for key in latest)
    return [(key[-NUMBER.size :], value[skip:]) for key, value in found if value is not None]


def _has(row: Row, state: State) -> bool:
    """True when a queue may have jobs in a state. Purged jobs are cancelled jobs."""
    return bool(getattr(row, state.value) or (state is State.CANCELLED and row.purged))


def _where(cursor: str) -> tuple[int, bytes]:
    """The number, and the id in the job table, below which the page of a cursor begins."""
    if not cursor:
        return FIRST, b""
    number, _, job_id = cursor.removeprefix(_CURSOR).partition(":")
    at = job_id.encode("utf-8", "backslashreplace")
    known = cursor.startswith(_CURSOR) and number.isascii() and number.isdigit()
    if not known or len(number) > 19 or len(at) >= _ID_MOST:
        raise bad_cursor(cursor)
    return int(number), at


def _row_of(store: Store, txn: Txn, queue: str) -> list[Row]:
    data = txn.get(store.key("q/" + queue))
    return [] if data is None else [Row.of(queue, data)]


def queue_rows(store: Store, txn: Txn) -> Iterator[Row]:
    prefix = store.key("q/")
    for key, data in rows_of(txn, None, prefix):
        yield Row.of(key[len(prefix) :].decode(), data)


# -- the order of acceptance ---------------------------------------------------------------------


FIRST = 1 << 64  # a bound above all numbers
_ENTRY = struct.Struct(">cQ")  # i, number
Numbered = Iterator[tuple[int, bytes, bytes, bool]]  # number, id, record, in order or not


class Order:
    """The changes of one commit; the store keeps the lowest and the highest id in order."""

    def __init__(self, commit: Transitions) -> None:
        self._commit = commit
        self._stored = self._bottom = self._top = self._ahead = b""

    def accept(self, number: int, job_id: bytes) -> int:
        """Give a new job its place; return ``Flag.APART`` or 0. The hot path."""
        if not self._ahead:
            floor, self._ahead = ids_about(self._commit.wall // MICRO)
            self._stored = self._commit.txn.get(self._commit.store.key("order")) or b""
            self._bottom, _, self._top = (self._stored or floor + b" " + floor).partition(b" ")
        if self._top < job_id < self._ahead:
            self._top = job_id
            return 0
        return self.set_apart(number, job_id)

    def set_apart(self, number: int, job_id: bytes) -> int:
        """Add the entry of a job that is apart; return ``Flag.APART``."""
        self._commit.txn.put(_ENTRY.pack(b"i", number), job_id, db=self._commit.t.said)
        return Flag.APART

    def forget(self, number: int) -> None:
        """Remove the entry of a deleted job that was apart."""
        self._commit.txn.delete(_ENTRY.pack(b"i", number), db=self._commit.t.said)

    def write(self) -> None:
        """Store the bounds, if they changed."""
        if self._ahead and (bounds := self._bottom + b" " + self._top) != self._stored:
            self._commit.txn.put(self._commit.store.key("order"), bounds)


def newest(store: Store, txn: Txn, views: Txn, below: int, at: bytes) -> Numbered:
    """All jobs with numbers below ``below``, the highest first, as views."""
    # ``at`` is the id of a job in order with at least the number ``below``, or empty.
    bottom, _, top = (txn.get(store.key("order")) or b" ").partition(b" ")
    walks = (
        _in_order(store, views, below, bottom, at or top + b"\0"),
        _apart(store, txn, views, below),
    )
    return heapq.merge(*walks, key=lambda row: row[0], reverse=True)


def _in_order(store: Store, views: Txn, below: int, bottom: bytes, end: bytes) -> Numbered:
    """The jobs in order with ids below ``end``, the highest id first."""
    cursor = views.cursor(store.tables.job)
    found = cursor.prev() if cursor.set_range(end) else cursor.last()
    while found and (job_id := bytes(cursor.key())) >= bottom:
        data = cursor.value()
        if not flags_of(data) & Flag.APART and (number := number_in(data)) < below:
            yield number, job_id, data, True
        found = cursor.prev()


def _apart(store: Store, txn: Txn, views: Txn, below: int) -> Numbered:
    """The jobs that are apart, with numbers below ``below``, the highest first."""
    cursor = txn.cursor(store.tables.said)
    bound = _ENTRY.pack(b"i", below) if below < FIRST else b"j"
    found = cursor.prev() if cursor.set_range(bound) else cursor.last()
    while found and cursor.key()[:1] == b"i":
        number, job_id = _ENTRY.unpack(cursor.key())[1], cursor.value()
        data = views.get(job_id, db=store.tables.job)
        if data is not None and number_in(data) == number:
            yield number, job_id, data, False
        found = cursor.prev()


# -- the first jobs of a queue -------------------------------------------------------------------


def first_ids(
    txn: Txn, views: Txn, tables: Tables, row: Row, state: State, ahead: int
) -> Iterator[bytes]:
    """Ids of a queue's jobs in this state, in order. The caller must check each job's state."""
    # ``ahead``: wall time minus the store's time.
    lines = *row.lines, row.lost_line
    if state is State.READY:
        found = heapq.merge(*(_line(txn, tables, line) for line in lines))
        return (job_id for _, job_id in found)
    if state is State.SCHEDULED:
        ids = _scheduled(txn, tables, ahead) if row.scheduled else iter(())
    else:
        classes = (_ended(txn, tables, kept) for kept in (KEPT_OTHER, KEPT_LINKED))
        ids = itertools.chain(*classes) if row.failed else iter(())
    return (job_id for job_id in ids if _is_of(views, tables, job_id, lines))


def _line(txn: Txn, tables: Tables, line: int) -> Iterator[tuple[bytes, bytes]]:
    """(rank and sequence, id) of the entries of a line."""
    for key, job_id in rows_of(txn, tables.ready, READY_KEY.pack(line, 0, 0)[:4]):
        yield key[4:], job_id


def _scheduled(txn: Txn, tables: Tables, ahead: int) -> Iterator[bytes]:
    """Ids of all scheduled jobs, by due time."""
    clocks = (_due_by(txn, tables, clock, less) for clock, less in ((0, 0), (1, ahead)))
    return (job_id for _, job_id in heapq.merge(*clocks))


def _due_by(txn: Txn, tables: Tables, clock: int, less: int) -> Iterator[tuple[int, bytes]]:
    """(time - ``less``, id) of jobs scheduled on a clock: 0 is the store's, 1 is wall time."""
    for key, job_id in rows_of(txn, tables.due, DUE_KEY.pack(clock, 0, 0, 0)[:1]):
        _, time, kind, _ = DUE_KEY.unpack(key)
        if kind == DUE_JOB:
            yield time - less, job_id


def _ended(txn: Txn, tables: Tables, kept: int) -> Iterator[bytes]:
    """Ids of a class of finished jobs, in the order in which the jobs ended."""
    for _, value in rows_of(txn, tables.fin, FIN_KEY.pack(kept, 0, 0)[:1]):
        yield value[NUMBER.size :]


def _is_of(views: Txn, tables: Tables, job_id: bytes, lines: Sequence[int]) -> bool:
    data = views.get(job_id, db=tables.job)
    return data is not None and state_and_line(data)[1] in lines
