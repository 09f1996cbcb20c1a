"""Lists of jobs: their order, and the search for jobs.

Lists show jobs in the order of acceptance, newest first. The store numbers the jobs that it
accepts. The job table is sorted by id. A new job is *in order* if its id is higher than all earlier
ids in order, and was made about now. Any other job is *apart*: its header says so, and the table
``said`` has the entry ``i·number → id``. Two walks downward give all jobs by number: one over the
job table, one over these entries. A foreign id may look like an id of tidemill, and two producers
may put at once: this costs an entry. The order is exact in any case.

A walk that begins at the newest job finds frequent jobs soon. For a rare state the walk would look
at all jobs. So the ids of jobs in rare states are gathered from the tables of these states, and
sorted by number. Ids with a prefix are also gathered, unless there are many.

A cursor has the number of the last listed job. It also has the id of the last job in order, at
which the walk through the job table goes on.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import lmdb

from tidemill.brokers.contract.inspection import Filter, bad_cursor
from tidemill.brokers.lmdb.claim.limits import parked_in
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
from tidemill.core.clock import id_floor
from tidemill.core.job import State

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.transitions import Transitions

_FEW = 5000  # up to this many ids are gathered at once, without a walk
_LOOK = 20_000  # the walk looks at this many jobs before ids are gathered
_CURSOR = "n:"  # the beginning of a cursor
_ID_MOST = 500  # the most bytes of an id; LMDB refuses to look for longer keys

_CLASSES = {
    State.SUCCEEDED: (KEPT_PLAIN, KEPT_RESULT),
    State.FAILED: (KEPT_OTHER,),
    State.CANCELLED: (KEPT_RESULT, KEPT_OTHER),
    State.EXPIRED: (KEPT_RESULT,),
}

Rows = Iterator[tuple[bytes, bytes]]
Txn: TypeAlias = "lmdb.Transaction[bytes]"


class Finding:
    """One search, newest first, through as many read transactions as it needs.

    ``views`` reads the jobs (:meth:`.Store.reading_views`).
    """

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
        self._looked = 0
        if self._is_better_gathered(txn):
            self._gathered = self._sorted(views, self._gather(txn))
        elif self._prefix:
            rows_here = rows_of(txn, self._t.job, self._prefix)
            ids = [job_id for job_id, _ in itertools.islice(rows_here, _LOOK)]
            if len(ids) < _LOOK:
                self._gathered = self._sorted(views, ids)

    @property
    def cursor(self) -> str:
        """The cursor from which to go on."""
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
        beside = {
            State.WAITING: [self._t.wait],
            State.READY: [self._t.park],
        }
        more = sum(txn.stat(each)["entries"] for each in beside.get(state, ()))
        return txn.stat(table)["entries"] + more

    def rows(self, txn: Txn, views: Txn, most: int) -> Rows:
        """(id, view) of up to ``most`` jobs. A job that cannot match has empty data."""
        if self._none:
            return
        if self._looked >= _LOOK and self._is_better_gathered(txn):
            self._gathered, self._looked = self._sorted(views, self._gather(txn)), -(1 << 62)
        walk = self._walk(txn, views)
        if self._gathered is not None:
            walk = self._fetch(views, self._gathered)
        for job_id, data in itertools.islice(walk, most):
            self._looked += 1
            if number_in(data) < self._number:
                self._number = number_in(data)
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
        return size <= _FEW or (
            self._looked >= _LOOK and size * 4 < txn.stat(self._t.job)["entries"]
        )

    def _walk(self, txn: Txn, views: Txn) -> Rows:
        """All jobs below the number that the search has reached, the newest first."""
        for _, job_id, data, in_order in newest(self._store, txn, views, self._number, self._at):
            if in_order:
                self._at = job_id
            yield job_id, data

    def _fetch(self, views: Txn, ids: Iterable[bytes]) -> Rows:
        for job_id in ids:
            data = views.get(job_id, db=self._t.job)
            if data is not None:
                yield job_id, data

    def _sorted(self, views: Txn, ids: Iterable[bytes]) -> Iterator[bytes]:
        """Ids of jobs below the number that the search has reached, the newest first."""
        rows = ((number_in(data), job_id) for job_id, data in self._fetch(views, ids))
        below = sorted((row for row in rows if row[0] < self._number), reverse=True)
        return iter([job_id for _, job_id in below])

    def _gather(self, txn: Txn) -> set[bytes]:
        """The ids of all jobs that may match."""
        ids = set(itertools.chain.from_iterable(self._ids(txn, state) for state in self._tables))
        return {job_id for job_id in ids if job_id.startswith(self._prefix)}

    def _ids(self, txn: Txn, state: State) -> Iterable[bytes]:
        if state in _CLASSES:
            return (
                value[NUMBER.size :]
                for kept in (*_CLASSES[state], KEPT_LINKED)
                for _, value in rows_of(txn, self._t.fin, FIN_KEY.pack(kept, 0, 0)[:1])
            )
        if state is State.RUNNING:
            return (value[LEASE_VALUE.size :] for _, value in txn.cursor(self._t.lease))
        if state is State.SCHEDULED:
            due = txn.cursor(self._t.due)
            return (value for key, value in due if DUE_KEY.unpack(key)[2] == DUE_JOB)
        if state is State.WAITING:
            return (*successors(txn, self._t), *(job_id for job_id, _ in txn.cursor(self._t.wait)))
        if self._row is None:
            ready = (value for _, value in txn.cursor(self._t.ready))
            return itertools.chain(ready, parked_in(txn, self._t))
        lines = *self._row.lines, self._row.lost_line
        prefixes = (READY_KEY.pack(line, 0, 0)[:4] for line in lines)
        ready = (value for prefix in prefixes for _, value in rows_of(txn, self._t.ready, prefix))
        return itertools.chain(ready, parked_in(txn, self._t, lines))


def _has(row: Row, state: State) -> bool:
    """True when a queue may have jobs in a state. Purged jobs are cancelled jobs."""
    return bool(getattr(row, state.value) or (state is State.CANCELLED and row.purged))


def _where(cursor: str) -> tuple[int, bytes]:
    """The number, and the id in the job table, below which the page of a cursor begins.

    Raises:
        InvalidOption: the text is no cursor.
    """
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
    """The rows of all queues, by name."""
    prefix = store.key("q/")
    for key, data in rows_of(txn, None, prefix):
        yield Row.of(key[len(prefix) :].decode(), data)


# -- the order of acceptance ---------------------------------------------------------------------


FIRST = 1 << 64
"""A bound above all numbers."""

_AHEAD, _BEHIND = 1, 86_400  # seconds that an id in order may differ from the clock
_ENTRY = struct.Struct(">cQ")  # i, number

Numbered = Iterator[tuple[int, bytes, bytes, bool]]
"""Number, id and record of jobs, and whether each is in order."""


class Order:
    """The changes of one commit; the store keeps the lowest and the highest id in order."""

    def __init__(self, commit: Transitions) -> None:
        self._commit = commit
        self._stored = self._bottom = self._top = self._ahead = b""

    def accept(self, number: int, job_id: bytes) -> int:
        """Give a new job its place; return ``Flag.APART`` or 0. The hot path."""
        if not self._ahead:
            floor, self._ahead = _about(self._commit.wall // MICRO)
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


@functools.lru_cache(2)
def _about(second: int) -> tuple[bytes, bytes]:
    """The bounds of ids that are made at about this second."""
    return id_floor(second - _BEHIND), id_floor(second + _AHEAD)


def newest(store: Store, txn: Txn, views: Txn, below: int, at: bytes) -> Numbered:
    """All jobs with numbers below ``below``, the highest first, as views.

    ``at`` is the id of a job in order with at least the number ``below``, or empty.
    """
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
    """Ids of a queue's jobs in this state, in order. The caller must check each job's state.

    ``ahead``: wall time minus the store's time.
    """
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
