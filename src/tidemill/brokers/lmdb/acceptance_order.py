"""The order of acceptance, in which lists show jobs, newest first.

The store numbers the jobs that it accepts. The job table is sorted by id. Ids made by tidemill grow
with time, so most jobs of the table are also in the order of their numbers. A job out of this order
is *apart*. Such a job has an entry in the table ``said``::

    i·number → id

Two walks downward give all jobs by number: one over the job table without the jobs apart, one over
these entries. A put needs only one comparison: a new job is in order if its id is higher than all
ids in order, and was made about now. A wrong clock, two producers at once, or a foreign id that
looks like an id of tidemill costs an entry. The order is exact in any case.
"""

from __future__ import annotations

import functools
import heapq
import struct
from collections.abc import Iterator
from typing import TypeAlias

import lmdb
import msgspec

from tidemill.brokers.lmdb.commit_state import CommitState
from tidemill.brokers.lmdb.layout import MICRO
from tidemill.brokers.lmdb.record import number_in
from tidemill.brokers.lmdb.store import Store
from tidemill.core.clock import id_floor

FIRST = 1 << 64
"""A bound above all numbers."""

OURS = 26
"""Characters of an id made by tidemill."""

_AHEAD, _BEHIND = 1, 86_400  # seconds that an id in order may differ from the clock
_ENTRY = struct.Struct(">cQ")  # i, number
_I = b"i"

Txn: TypeAlias = "lmdb.Transaction[bytes]"
Rows = Iterator[tuple[int, bytes, bytes, bool]]
"""Number, id and record of jobs, and whether each is in order."""


class Mark(msgspec.Struct, array_like=True):
    """The counts and bounds that tell jobs in order from jobs apart.

    Attributes:
        strays: the number of entries of jobs whose ids have the length of tidemill's ids.
        bottom, top: the lowest and the highest id that a job in order may have.
    """

    strays: int = 0
    bottom: bytes = b""
    top: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_MARK = msgspec.msgpack.Decoder(Mark)


class Order:
    """The changes of one commit to the order of acceptance."""

    def __init__(self, state: CommitState) -> None:
        self.state = state
        self._stored = b""
        self._mark: Mark | None = None
        self._ahead = b""

    @property
    def mark(self) -> Mark:
        """The stored mark, or that of an empty store."""
        if self._mark is None:
            self._mark = self._load()
        return self._mark

    def _load(self) -> Mark:
        state = self.state
        floor, self._ahead = _about(state.wall // MICRO)
        self._stored = state.txn.get(state.store.key("order")) or b""
        if self._stored:
            mark = _MARK.decode(self._stored)
            mark.top = max(mark.top, floor)
            mark.bottom = mark.bottom or floor
            return mark
        return Mark(0, floor, floor)

    def accept(self, job_id: bytes) -> int:
        """Return the number of a new job. The hot path."""
        number = self.state.next_number()
        mark = self._mark or self.mark
        if mark.top < job_id < self._ahead:
            mark.top = job_id
        else:
            self.add(number, job_id)
        return number

    def add(self, number: int, job_id: bytes) -> None:
        """Add the entry of a job that is apart."""
        self.state.txn.put(_ENTRY.pack(_I, number), job_id, db=self.state.t.said)
        if len(job_id) == OURS:
            self.mark.strays += 1

    def forget(self, number: int, job_id: bytes) -> None:
        """Remove the entry of a deleted job, if it has one."""
        ours = len(job_id) == OURS
        if ours and not self.mark.strays:
            return
        if self.state.txn.delete(_ENTRY.pack(_I, number), db=self.state.t.said) and ours:
            self.mark.strays -= 1

    def write(self) -> None:
        """Store the mark, if it changed."""
        if self._mark is not None:
            data = _encode(self._mark)
            if data != self._stored:
                self.state.txn.put(self.state.store.key("order"), data)


@functools.lru_cache(2)
def _about(second: int) -> tuple[bytes, bytes]:
    """The bounds of ids that are made at about this second."""
    return id_floor(second - _BEHIND), id_floor(second + _AHEAD)


def read_mark(store: Store, txn: lmdb.Transaction[bytes]) -> Mark | None:
    """The stored mark, or None."""
    data = txn.get(store.key("order"))
    return _MARK.decode(data) if data is not None else None


# -- looking -------------------------------------------------------------------------------------


def newest(store: Store, txn: Txn, views: Txn, below: int, at: bytes) -> Rows:
    """All jobs with numbers below ``below``, the highest first.

    The records are views (:meth:`.Store.reading_views`).

    ``at`` is the id of a job in order with at least the number ``below``, or empty.
    """
    mark = read_mark(store, txn) or Mark()
    walks = _in_order(store, txn, views, mark, below, at), _apart(store, txn, views, below)
    return heapq.merge(*walks, key=lambda row: row[0], reverse=True)


def _in_order(store: Store, txn: Txn, views: Txn, mark: Mark, below: int, at: bytes) -> Rows:
    """The jobs in order, the highest id first; with ``at``, only jobs with lower ids."""
    cursor = views.cursor(store.tables.job)
    start = min(at or mark.top, mark.top)
    if start == at:
        found = cursor.prev() if cursor.set_range(at) else cursor.last()
    else:
        found = cursor.prev() if cursor.set_range(start + b"\0") else cursor.last()
    while found and (job_id := bytes(cursor.key())) >= mark.bottom:
        data = cursor.value()
        number = number_in(data)
        maybe = mark.strays or len(job_id) != OURS
        entry = maybe and txn.get(_ENTRY.pack(_I, number), db=store.tables.said)
        if number < below and entry != job_id:
            yield number, job_id, data, True
        found = cursor.prev()


def _apart(store: Store, txn: Txn, views: Txn, below: int) -> Rows:
    """The jobs that are apart, with numbers below ``below``, the highest first."""
    cursor = txn.cursor(store.tables.said)
    bound = _ENTRY.pack(_I, below) if below < FIRST else b"j"
    found = cursor.prev() if cursor.set_range(bound) else cursor.last()
    while found and cursor.key()[:1] == _I:
        number, job_id = _ENTRY.unpack(cursor.key())[1], cursor.value()
        data = views.get(job_id, db=store.tables.job)
        if data is not None and number_in(data) == number:
            yield number, job_id, data, False
        found = cursor.prev()
