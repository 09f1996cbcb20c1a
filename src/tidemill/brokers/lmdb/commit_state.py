"""The state of one commit: rows of queues, the sequence, records, hints to sleepers.

Each row is read once, and written when the commit ends. :mod:`.transitions` builds the changes of
jobs on this state.
"""

from __future__ import annotations

from collections.abc import Iterator

import lmdb

from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.brokers.lmdb.layout import DUE_JOB, DUE_KEY, LOST, NUMBER, READY_KEY, Row
from tidemill.brokers.lmdb.record import STATES, Flag, Stored, Tail
from tidemill.brokers.lmdb.store import Store

_COUNTED = tuple(state.value for state in STATES)


class CommitState:
    """One commit's rows, numbers and hints.

    Attributes:
        now: the store's time, microseconds.
        wall: wall time, microseconds.
        untimed: True when this commit must ensure that a sleeper wakes at the next due time: a due
            time was added, or a sleeper left.
        history: the sums that this commit adds to rows of history, by key.
    """

    def __init__(self, store: Store, txn: lmdb.Transaction[bytes], now: int, wall: int) -> None:
        self.store = store
        self.txn = txn
        self.t = store.tables
        self.now = now
        self.wall = wall
        self.untimed = False
        self._rows: dict[str, Row] = {}
        self._rows_by_number: dict[int, Row] = {}
        self._seq = self._first_seq = self._read_number("seq")
        self._rings: dict[tuple[str, int], int] = {}
        self.history: dict[bytes, HistoryRow] = {}

    # -- numbers and rows -----------------------------------------------------------------------

    def _read_number(self, name: str) -> int:
        data = self.txn.get(self.store.key(name))
        return NUMBER.unpack(data)[0] if data else 0

    def next_number(self) -> int:
        """The next number of the store's sequence, which numbers both jobs and tokens."""
        self._seq += 1
        return self._seq

    @property
    def last_number(self) -> int:
        """The highest number of the sequence so far."""
        return self._seq

    def skip_numbers(self, count: int) -> None:
        """Skip numbers of the sequence, for jobs that keep the order of another store."""
        self._seq += count

    def count_up(self, name: str) -> int:
        """The next number of a counter that seldom changes."""
        number = self._read_number(name) + 1
        self.txn.put(self.store.key(name), NUMBER.pack(number))
        return number

    def row(self, name: str) -> Row:
        """A queue's row; a new queue gets the next number."""
        row = self._rows.get(name)
        if row is None:
            data = self.txn.get(self.store.key("q/" + name))
            number = 0
            if data is None:
                number = self.count_up("queues")
                self.txn.put(self.store.key(f"n/{number}"), name.encode())
            row = self._rows[name] = Row(name, number, data)
            self._rows_by_number[row.number] = row
            if row.has_limit:
                self._load_limiter(row)
        return row

    def _load_limiter(self, row: Row) -> None:
        """Read the limiter of a queue that has a limit."""
        raise NotImplementedError  # the subclass Transitions has the limiters

    def row_of(self, line: int) -> Row:
        """The row of the queue to which a line belongs."""
        number = (line & ~LOST) >> 1
        row = self._rows_by_number.get(number)
        if row is None:
            name = self.txn.get(self.store.key(f"n/{number}"))
            assert name is not None
            row = self.row(name.decode())
        return row

    def existing_row(self, name: str) -> Row | None:
        """A queue's row, or None when the store does not know the queue."""
        if name in self._rows or self.txn.get(self.store.key("q/" + name)):
            return self.row(name)
        return None

    def count(self, row: Row, state: int, by: int) -> None:
        """Change the queue's count of a state. The count of an end state is a total."""
        name = _COUNTED[state]
        setattr(row, name, getattr(row, name) + by)
        row.dirty = True

    # -- one job --------------------------------------------------------------------------------

    def load(self, job_id: bytes) -> Stored | None:
        """Read a job to change it; None when there is no such job."""
        data = self.txn.get(job_id, db=self.t.job)
        return Stored(job_id, data) if data is not None else None

    def save(self, stored: Stored, tail: Tail | None = None) -> None:
        """Write a job, with the given tail or, without one, with its present tail."""
        self.txn.put(stored.id, stored.packed(tail), db=self.t.job)

    def forget_more(self, job_id: bytes, flags: int) -> None:
        """Remove a job's notes, and its entry in the wait table."""
        if flags & Flag.NOTED:
            self.txn.delete(job_id, db=self.t.note)
        if flags & Flag.LINKED:
            self.txn.delete(job_id, db=self.t.wait)

    def left(self, due: int, wall: int) -> int:
        """Microseconds until a due time; 0 or less for a time that has come."""
        return due - (self.wall if wall else self.now) if due else 0

    # -- where jobs stand -----------------------------------------------------------------------

    def ready_lines(self, first: int = 0) -> Iterator[int]:
        """The lines with ready jobs, found by one seek each; the lines of lost tasks come last."""
        cursor = self.txn.cursor(self.t.ready)
        found = cursor.set_range(READY_KEY.pack(first, 0, 0))
        while found:
            line = READY_KEY.unpack(cursor.key())[0]
            yield line
            found = cursor.set_range(READY_KEY.pack(line + 1, 0, 0))

    def ring(self, row: Row, kind: int, count: int) -> None:
        """Hint ``count`` more sleepers that want this kind of the queue's jobs."""
        ring = row.name, kind
        self._rings[ring] = self._rings.get(ring, 0) + count

    def enter_scheduled(self, row: Row, due: int, wall: int, seq: int, job_id: bytes) -> None:
        """Add a job that is not due yet to the due table, and count it."""
        self.txn.put(DUE_KEY.pack(1 if wall else 0, due, DUE_JOB, seq), job_id, db=self.t.due)
        row.scheduled += 1
        row.dirty = True
        self.untimed = True

    def write_rows(self) -> None:
        """Write the rows and the sequence that have changed."""
        put, key = self.txn.put, self.store.key
        for row in self._rows.values():
            if row.dirty:
                put(key("q/" + row.name), row.pack())
        if self._seq != self._first_seq:
            put(key("seq"), NUMBER.pack(self._seq))
