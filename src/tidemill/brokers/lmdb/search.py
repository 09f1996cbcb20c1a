"""Finding jobs: a walk from the newest on, or ids from the tables of some states.

A walk that begins at the newest job finds frequent jobs soon. For a rare state the walk would look
at all jobs. So the ids of jobs in rare states are gathered from the tables of these states, and
sorted by number. Ids with a prefix are also gathered, unless there are many.

The walk is in :mod:`.acceptance_order`. A cursor has the number of the last listed job. It also has
the id of the last job in order, at which the walk through the job table goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import lmdb

from tidemill.brokers.contract.inspection import Filter, bad_cursor
from tidemill.brokers.lmdb.acceptance_order import FIRST, newest
from tidemill.brokers.lmdb.layout import (
    DUE_JOB,
    DUE_KEY,
    FIN_KEY,
    LEASE_VALUE,
    NUMBER,
    READY_KEY,
    Row,
    rows_of,
)
from tidemill.brokers.lmdb.partitions import parked_in
from tidemill.brokers.lmdb.record import READY, STATES, number_in, state_and_line
from tidemill.brokers.lmdb.retention import (
    KEPT_LINKED,
    KEPT_OTHER,
    KEPT_PLAIN,
    KEPT_RESULT,
    kept_counts,
)
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.unique import successors
from tidemill.core.job import State

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
