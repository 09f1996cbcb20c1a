"""Finding jobs: a walk down the job table, or the tables that have just those of some states.

Whoever asks for a state that few jobs have shall not wait until all were looked at. A walk finds at
once what is frequent where it begins; when it does not, the ids are gathered from the tables that
moving a job keeps anyway, and sorted.

The job table is sorted by id: what tidemill makes up goes by time, a user's own ids do not. So in a
store of up to :data:`ALL` jobs, and where few are gathered, the order is that of the sequence
numbers. A walk through more jobs goes by id. A cursor says which it is, and goes on in that order.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import lmdb

from tidemill.brokers.base import Filter, bad_cursor
from tidemill.brokers.lmdb.carried import carried_in
from tidemill.brokers.lmdb.kept import (
    KEPT_LINKED,
    KEPT_OTHER,
    KEPT_PLAIN,
    KEPT_RESULT,
    kept_counts,
)
from tidemill.brokers.lmdb.keys import successors
from tidemill.brokers.lmdb.lanes import parked_in
from tidemill.brokers.lmdb.layout import (
    DUE_JOB,
    DUE_KEY,
    FIN_KEY,
    LEASE_VALUE,
    NUMBER,
    READY_KEY,
    Row,
)
from tidemill.brokers.lmdb.record import READY, STATES, number_in, state_and_line
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.unknown import jobs_aside
from tidemill.job import State

__all__ = ["Finding", "Order", "queue_rows"]

_FEW = 5000  # ids, that are gathered without a walk first
_LOOK = 20_000  # jobs, that are walked before ids are gathered
ALL = 50_000
"""Jobs whose numbers are read when a list begins: it takes 50 ms."""

_BY_ID, _BY_NUMBER = "id:", "n:"  # how a cursor begins
_ID_MOST = 500  # bytes; LMDB refuses to look for longer keys

_CLASSES = {
    State.SUCCEEDED: (KEPT_PLAIN, KEPT_RESULT),
    State.FAILED: (KEPT_OTHER,),
    State.CANCELLED: (KEPT_RESULT,),
    State.EXPIRED: (KEPT_RESULT,),
}

_FIRST = 1 << 64  # above all numbers

Rows = Iterator[tuple[bytes, bytes]]
Txn: TypeAlias = "lmdb.Transaction[bytes]"


class Order:
    """The ids of all jobs by number, as they were when a list began.

    Numbers only grow, so what is below the highest of then can only have gone since.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, bytes]] = []

    def below(self, number: int, store: Store) -> Iterator[bytes]:
        """The ids of the jobs with lower numbers, the highest first."""
        rows = self._rows
        if not rows or number > rows[-1][0]:
            # Buffers: bodies are not copied.
            with store.translating(), store.env.begin(buffers=True) as txn:
                jobs = txn.cursor(store.tables.job)
                rows = sorted((number_in(data), bytes(job_id)) for job_id, data in jobs)
            self._rows = rows if len(rows) <= 2 * ALL else []
        end = bisect.bisect_left(rows, (number,))
        return (rows[at][1] for at in range(end - 1, -1, -1))


class Finding:
    """One search, newest first; it goes on through as many read transactions as it takes."""

    def __init__(
        self, store: Store, txn: Txn, what: Filter, cursor: str, order: Order
    ) -> None:
        self._order = order
        self._prefix = what.id_prefix.encode()
        below, self._number = _where(cursor)
        # Where to go on; no text has a byte of 255.
        self._below = below or (self._prefix and self._prefix + b"\xff")
        self._store = store
        self._t = store.tables
        self._states = {READY if s is State.RUNNING else STATES.index(s) for s in what.states}
        rows = [row for row in queue_rows(store, txn) if what.queue in ("", row.name)]
        self._row = rows[0] if what.queue and rows else None
        # Rows count the unfinished by state, and have counted whatever finished.
        self._tables = [s for s in what.states if any(row.shown(s.value) for row in rows)]
        self._none = not rows or bool(what.states and not self._tables)
        self._gathered: Iterator[bytes] | None = None
        self._looked = 0
        if not cursor:
            few = txn.stat(self._t.job)["entries"] <= ALL or self._is_better_gathered(txn)
            self._number = _FIRST if few else None

    @property
    def cursor(self) -> str:
        """Where to go on, in this order."""
        if self._number is not None:
            return f"{_BY_NUMBER}{self._number}"
        return _BY_ID + self._below.decode()

    def _size(self, txn: Txn, state: State) -> int:
        """How many entries there are to go through for a state; at least as many as jobs."""
        if state in _CLASSES:
            kept = kept_counts(self._store, txn)
            linked = txn.stat(self._t.fin)["entries"] - sum(kept)
            return linked + sum(kept[each] for each in _CLASSES[state])
        if state is State.READY and self._row:
            return self._row.shown(state.value)
        table = {
            State.READY: self._t.ready,
            State.RUNNING: self._t.lease,
            State.SCHEDULED: self._t.due,
            State.WAITING: self._t.key,
        }[state]
        beside = {
            State.WAITING: [self._t.wait],
            State.READY: [self._t.park, self._t.carried],
            State.SCHEDULED: [self._t.said],
        }
        more = sum(txn.stat(each)["entries"] for each in beside.get(state, ()))
        return txn.stat(table)["entries"] + more

    def rows(self, txn: Txn, most: int) -> Rows:
        """(id, data) of the next jobs that may match, ``most`` looked at; nothing more: the end."""
        if self._none:
            return
        if self._gathered is None and self._number is not None:
            self._gathered = self._by_number(txn, self._number)
        if self._gathered is None and self._is_better_gathered(txn):
            self._gathered = iter(sorted(self._gather(txn), reverse=True))
        walk = self._walk(txn) if self._gathered is None else self._fetch(txn, self._gathered)
        for job_id, data in itertools.islice(walk, most):
            if not job_id.startswith(self._prefix):
                return
            self._looked += 1
            if self._number is None:
                self._below = job_id
            elif number_in(data) < self._number:
                self._number = number_in(data)
            else:  # another was put under its id meanwhile
                data = b""
            yield job_id, data if data and self._may_match(data) else b""

    def _by_number(self, txn: Txn, below: int) -> Iterator[bytes]:
        """The ids of all that may match with lower numbers, the highest number first."""
        if self._is_better_gathered(txn):
            rows = self._fetch(txn, iter(self._gather(txn)))
            found = sorted(((number_in(data), job_id) for job_id, data in rows), reverse=True)
            return iter([job_id for number, job_id in found if number < below])
        ids = self._order.below(below, self._store)
        return (job_id for job_id in ids if job_id.startswith(self._prefix))

    def _may_match(self, data: bytes) -> bool:
        """False when the header alone tells that it does not."""
        state, line = state_and_line(data)
        return (not self._states or state in self._states) and (
            self._row is None or line in self._row.lines
        )

    def _is_better_gathered(self, txn: Txn) -> bool:
        if not self._tables:
            return False
        size = sum(self._size(txn, state) for state in self._tables)
        return size <= _FEW or (
            self._looked >= _LOOK and size * 4 < txn.stat(self._t.job)["entries"]
        )

    def _walk(self, txn: Txn) -> Rows:
        """Jobs below where it stands, or from the last."""
        cursor = txn.cursor(self._t.job)
        more = cursor.set_range(self._below) if self._below else False
        more = cursor.prev() if more else cursor.last()
        while more:
            yield cursor.item()
            more = cursor.prev()

    def _fetch(self, txn: Txn, ids: Iterator[bytes]) -> Rows:
        for job_id in ids:
            data = txn.get(job_id, db=self._t.job)
            if data is not None:
                yield job_id, data

    def _gather(self, txn: Txn) -> set[bytes]:
        """The ids of all that may match below where it stands."""
        ids = set(itertools.chain.from_iterable(self._ids(txn, state) for state in self._tables))
        ids = {job_id for job_id in ids if job_id.startswith(self._prefix)}
        return {job_id for job_id in ids if job_id < self._below} if self._below else ids

    def _ids(self, txn: Txn, state: State) -> Iterable[bytes]:
        if state in _CLASSES:
            return (
                value[NUMBER.size :]
                for kept in (*_CLASSES[state], KEPT_LINKED)
                for value in _range(txn, self._t.fin, FIN_KEY.pack(kept, 0, 0)[:1])
            )
        if state is State.RUNNING:
            return (value[LEASE_VALUE.size :] for _, value in txn.cursor(self._t.lease))
        if state is State.SCHEDULED:
            due = txn.cursor(self._t.due)
            timed = (value for key, value in due if DUE_KEY.unpack(key)[2] == DUE_JOB)
            return itertools.chain(timed, (job_id for *_, job_id in jobs_aside(txn, self._t.said)))
        if state is State.WAITING:
            return (*successors(txn, self._t), *(job_id for job_id, _ in txn.cursor(self._t.wait)))
        if self._row is None:
            ready = (value for _, value in txn.cursor(self._t.ready))
            return itertools.chain(ready, parked_in(txn, self._t), carried_in(txn, self._t))
        lines = *self._row.lines, self._row.lost_line
        prefixes = (READY_KEY.pack(line, 0, 0)[:4] for line in lines)
        ready = (value for prefix in prefixes for value in _range(txn, self._t.ready, prefix))
        more = parked_in(txn, self._t, lines), carried_in(txn, self._t, lines)
        return itertools.chain(ready, *more)


def _where(cursor: str) -> tuple[bytes, int | None]:
    """Where a cursor goes on: below which id, or below which number.

    Raises:
        InvalidOption: it is no cursor.
    """
    number = cursor.removeprefix(_BY_NUMBER)
    if number != cursor and number.isascii() and number.isdigit() and len(number) < 20:
        return b"", int(number)
    job_id = cursor.removeprefix(_BY_ID).encode("utf-8", "backslashreplace")
    if cursor and not (cursor.startswith(_BY_ID) and 0 < len(job_id) < _ID_MOST):
        raise bad_cursor(cursor)
    return job_id, None


def _range(txn: Txn, table: lmdb._Database, prefix: bytes) -> Iterator[bytes]:
    """The values of all keys that begin alike."""
    cursor = txn.cursor(table)
    size = len(prefix)
    more = cursor.set_range(prefix)
    while more and cursor.key()[:size] == prefix:
        yield cursor.value()
        more = cursor.next()


def queue_rows(store: Store, txn: Txn) -> Iterator[Row]:
    """Every queue, by name."""
    prefix = store.key("q/")
    cursor = txn.cursor()
    more = cursor.set_range(prefix)
    while more and cursor.key().startswith(prefix):
        yield Row(cursor.key()[len(prefix) :].decode(), 0, cursor.value())
        more = cursor.next()
