"""The order of acceptance, in which lists show jobs, newest first.

The store numbers the jobs that it accepts. The job table is sorted by id. A new job is *in order*
if its id is higher than all earlier ids in order, and was made about now. Any other job is *apart*:
its header says so, and the table ``said`` has the entry ``i·number → id``. Two walks downward give
all jobs by number: one over the job table, one over these entries. A foreign id may look like an id
of tidemill, and two producers may put at once: this costs an entry. The order is exact in any case.
"""

from __future__ import annotations

import functools
import heapq
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import lmdb

from tidemill.brokers.lmdb.layout import MICRO
from tidemill.brokers.lmdb.record import Flag, flags_of, number_in
from tidemill.brokers.lmdb.store import Store
from tidemill.core.clock import id_floor

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.transitions import Transitions

FIRST = 1 << 64
"""A bound above all numbers."""

_AHEAD, _BEHIND = 1, 86_400  # seconds that an id in order may differ from the clock
_ENTRY = struct.Struct(">cQ")  # i, number

Txn: TypeAlias = "lmdb.Transaction[bytes]"
Rows = Iterator[tuple[int, bytes, bytes, bool]]
"""Number, id and record of jobs, and whether each is in order."""


class Order:
    """The changes of one commit; the store keeps the lowest and the highest id in order."""

    def __init__(self, state: Transitions) -> None:
        self._state = state
        self._stored = self._bottom = self._top = self._ahead = b""

    def accept(self, number: int, job_id: bytes) -> int:
        """Give a new job its place; return ``Flag.APART`` or 0. The hot path."""
        if not self._ahead:
            floor, self._ahead = _about(self._state.wall // MICRO)
            self._stored = self._state.txn.get(self._state.store.key("order")) or b""
            self._bottom, _, self._top = (self._stored or floor + b" " + floor).partition(b" ")
        if self._top < job_id < self._ahead:
            self._top = job_id
            return 0
        return self.set_apart(number, job_id)

    def set_apart(self, number: int, job_id: bytes) -> int:
        """Add the entry of a job that is apart; return ``Flag.APART``."""
        self._state.txn.put(_ENTRY.pack(b"i", number), job_id, db=self._state.t.said)
        return Flag.APART

    def forget(self, number: int) -> None:
        """Remove the entry of a deleted job that was apart."""
        self._state.txn.delete(_ENTRY.pack(b"i", number), db=self._state.t.said)

    def write(self) -> None:
        """Store the bounds, if they changed."""
        if self._ahead and (bounds := self._bottom + b" " + self._top) != self._stored:
            self._state.txn.put(self._state.store.key("order"), bounds)


@functools.lru_cache(2)
def _about(second: int) -> tuple[bytes, bytes]:
    """The bounds of ids that are made at about this second."""
    return id_floor(second - _BEHIND), id_floor(second + _AHEAD)


def newest(store: Store, txn: Txn, views: Txn, below: int, at: bytes) -> Rows:
    """All jobs with numbers below ``below``, the highest first, as views.

    ``at`` is the id of a job in order with at least the number ``below``, or empty.
    """
    bottom, _, top = (txn.get(store.key("order")) or b" ").partition(b" ")
    walks = (
        _in_order(store, views, below, bottom, at or top + b"\0"),
        _apart(store, txn, views, below),
    )
    return heapq.merge(*walks, key=lambda row: row[0], reverse=True)


def _in_order(store: Store, views: Txn, below: int, bottom: bytes, end: bytes) -> Rows:
    """The jobs in order with ids below ``end``, the highest id first."""
    cursor = views.cursor(store.tables.job)
    found = cursor.prev() if cursor.set_range(end) else cursor.last()
    while found and (job_id := bytes(cursor.key())) >= bottom:
        data = cursor.value()
        if not flags_of(data) & Flag.APART and (number := number_in(data)) < below:
            yield number, job_id, data, True
        found = cursor.prev()


def _apart(store: Store, txn: Txn, views: Txn, below: int) -> Rows:
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
