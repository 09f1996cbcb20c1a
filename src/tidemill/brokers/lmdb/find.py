"""Finding jobs: a walk down the job table, or the tables that have just those of some states.

Whoever asks for a state that few jobs have shall not wait until all were looked at. A walk finds at
once what is frequent where it begins; when it does not, the ids are gathered from the tables that
moving a job keeps anyway, and sorted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import lmdb

from tidemill.brokers.base import Filter
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
from tidemill.brokers.lmdb.record import READY, STATES, state_and_line
from tidemill.brokers.lmdb.store import Store
from tidemill.job import State

__all__ = ["Finding", "queue_rows"]

_FEW = 5000  # ids, that are gathered without a walk first
_LOOK = 20_000  # jobs, that are walked before ids are gathered

_CLASSES = {
    State.SUCCEEDED: (KEPT_PLAIN, KEPT_RESULT),
    State.FAILED: (KEPT_OTHER,),
    State.CANCELLED: (KEPT_RESULT,),
    State.EXPIRED: (KEPT_RESULT,),
}

Rows = Iterator[tuple[bytes, bytes]]
Txn: TypeAlias = "lmdb.Transaction[bytes]"


class Finding:
    """One search, newest first; it goes on through as many read transactions as it takes."""

    def __init__(self, store: Store, txn: Txn, what: Filter, below: bytes) -> None:
        self._prefix = what.id_prefix.encode()
        # Where to go on; no text has a byte of 255.
        self.below = below or (self._prefix and self._prefix + b"\xff")
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
        beside = {State.WAITING: [self._t.wait], State.READY: [self._t.park, self._t.carried]}
        more = sum(txn.stat(each)["entries"] for each in beside.get(state, ()))
        return txn.stat(table)["entries"] + more

    def rows(self, txn: Txn, most: int) -> Rows:
        """(id, data) of the next jobs that may match, ``most`` looked at; nothing more: the end."""
        if self._none:
            return
        if self._gathered is None and self._is_better_gathered(txn):
            self._gathered = iter(sorted(self._gather(txn), reverse=True))
        walk = self._walk(txn) if self._gathered is None else self._fetch(txn, self._gathered)
        for job_id, data in itertools.islice(walk, most):
            if not job_id.startswith(self._prefix):
                return
            self.below = job_id
            self._looked += 1
            yield job_id, data if self._may_match(data) else b""

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
        more = cursor.set_range(self.below) if self.below else False
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
        return {job_id for job_id in ids if job_id < self.below} if self.below else ids

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
            return (value for key, value in due if DUE_KEY.unpack(key)[2] == DUE_JOB)
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
