"""Limits of queues, and the terms of all limits, inside one commit.

A queue's gate is one record in the main database, read with the queue's row when that says there is
one. How many of its jobs run is what the row counts. When it is closed while jobs are ready, and
time alone opens it, the due table says when.

Other terms of a limit by name reach its lanes in pieces, in the order of their names. A lane goes
by its old terms until its turn. The place that was reached is in the limit's record, with the terms
that hold behind it. An entry in the due table makes the next piece everybody's next task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lmdb
import msgspec

from tidemill.brokers.lmdb.layout import DUE_GATE, DUE_KEY, DUE_TERMS, MICRO, READY_KEY, Row
from tidemill.brokers.lmdb.record import encode
from tidemill.crash import point
from tidemill.gate import (
    NEVER,
    Claim,
    Gate,
    Held,
    LimitStats,
    Terms,
    change,
    ended,
    give_back,
    hold,
    hold_to,
    let_go,
    opens,
    room,
    take,
)
from tidemill.job import Outcome

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.moves import Moves
    from tidemill.brokers.lmdb.store import Store

__all__ = [
    "GATES",
    "LIMITS",
    "Gates",
    "Limited",
    "gate_held",
    "gate_shown",
    "names_of",
    "read_limited",
]

GATES, LIMITS = "g/", "l/"
"""What leads the names of records in the main database: of a queue's gate, and of a limit."""


class Limited(msgspec.Struct, array_like=True):
    """A limit as it is stored: the terms that hold, and those that code declared last.

    Attributes:
        gate: of a queue; a limit by name has one in each of its lanes.
        due: the time of its entry in the due table, 0 for none.
        by_hand: the terms are somebody's, and not the code's.
        behind: the terms that lanes still go by: of each the name behind which they hold, up to
            the next name. Empty when all lanes go by ``terms``.
    """

    terms: Terms = Terms()
    declared: Terms | None = None
    gate: Gate = msgspec.field(default_factory=Gate)
    due: int = 0
    by_hand: bool = False
    behind: list[tuple[bytes, Terms]] = []

    def terms_of(self, lane: bytes) -> Terms:
        """What holds for a lane."""
        terms = self.terms
        for after, older in self.behind:
            if lane <= after:
                break
            terms = older
        return terms

    def reach(self, lane: bytes) -> None:
        """All lanes up to this one go by ``terms``."""
        rows = [(max(after, lane), older) for after, older in self.behind]
        # Of terms that would hold behind the same lane, the last.
        self.behind = list(dict(rows).items())


_LIMITED = msgspec.msgpack.Decoder(Limited)


def read_limited(store: Store, txn: lmdb.Transaction[bytes], name: str) -> Limited | None:
    """A stored limit; ``name`` begins with ``GATES`` or ``LIMITS``."""
    data = txn.get(store.key(name))
    return _LIMITED.decode(data) if data is not None else None


class Gates:
    """The limits a commit has to do with."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._queues: dict[str, tuple[Row, Limited]] = {}
        self._closed: set[str] = set()  # queues that let nothing start before this commit
        self._names: dict[str, Limited] = {}
        self._dirty: set[str] = set()
        self.pieces = 0  # how often lanes were told of other terms

    # -- queues ---------------------------------------------------------------------------------

    def load(self, row: Row) -> None:
        """Read the gate of a queue, before anything changes."""
        limited = read_limited(self._moves.store, self._moves.txn, GATES + row.name)
        assert limited is not None
        self._queues[row.name] = row, limited
        if limited.due or not self.room(row, 1):
            self._closed.add(row.name)

    def room(self, row: Row, most: int) -> int:
        """How many jobs of a queue with a gate may start now."""
        limited = self._queues[row.name][1]
        return room(limited.terms, limited.gate, row.running, self._moves.now, most)

    def take(self, row: Row, count: int) -> None:
        """So many jobs of the queue were leased."""
        if count:
            limited = self._queues[row.name][1]
            take(limited.terms, limited.gate, self._moves.now, count)
            self._dirty.add(GATES + row.name)

    def hold(self, row: Row, charged: int) -> None:
        """A lease of the queue goes to the carrier, which has been charged at that time."""
        limited = self._queues[row.name][1]
        hold(limited.terms, limited.gate, charged)
        self._dirty.add(GATES + row.name)

    def let_go(self, row: Row, *, starts: bool) -> None:
        """A job of the queue lies with the carrier no more."""
        limited = self._queues[row.name][1]
        let_go(limited.gate)
        if starts:
            take(limited.terms, limited.gate, self._moves.now)
        self._dirty.add(GATES + row.name)

    def ended(self, row: Row, outcome: int, back: int) -> None:
        """A lease of the queue has ended; ``back``: when it was made, if the job never ran."""
        limited = self._queues[row.name][1]
        if outcome in (Outcome.SUCCESS, Outcome.RETRY, Outcome.FAIL):
            well = outcome == Outcome.SUCCESS
            ended(limited.terms, limited.gate, self._moves.now, well=well)
        elif back:
            give_back(limited.terms, limited.gate, back)
        self._dirty.add(GATES + row.name)

    def came_due(self, row: Row) -> None:
        """The entry of a queue in the due table came up, and is gone."""
        self._queues[row.name][1].due = 0
        self._dirty.add(GATES + row.name)

    def sync(self) -> None:
        """Have sleepers know what has opened, and the due table when what is closed will."""
        for name, (row, limited) in self._queues.items():
            when = opens(limited.terms, limited.gate, row.running, self._moves.now)
            if not when and name in self._closed:
                self._closed.discard(name)
                self._ring(row)
            self._arm(name, row, limited, when if row.ready and when < NEVER else 0)

    def _ring(self, row: Row) -> None:
        count = self.room(row, row.ready)
        cursor = self._moves.txn.cursor(self._moves.t.ready)
        for line in (*row.lines, row.lost_line):
            prefix = READY_KEY.pack(line, 0, 0)[:4]
            if count and cursor.set_range(prefix) and cursor.key()[:4] == prefix:
                self._moves.ring(row, line & 1, count)

    def _arm(self, name: str, row: Row, limited: Limited, when: int) -> None:
        if when == limited.due:
            return
        moves = self._moves
        if limited.due:
            moves.txn.delete(DUE_KEY.pack(0, limited.due, DUE_GATE, row.number), db=moves.t.due)
        if when:
            key = DUE_KEY.pack(0, when, DUE_GATE, row.number)
            moves.txn.put(key, name.encode(), db=moves.t.due)
            moves.untimed = True
        limited.due = when
        self._dirty.add(GATES + name)

    def set_queue(self, row: Row, terms: Terms | None, *, declared: bool) -> None:
        """Have these terms hold for a queue."""
        if not row.gated:
            row.gated = 1
            row.dirty = True
            self._queues[row.name] = row, Limited(gate=Gate(held=row.carried))
        limited = self._queues[row.name][1]
        old = hold_to(limited, terms, declared=declared)
        self._dirty.add(GATES + row.name)
        if limited.terms != old:
            change(old, limited.terms, limited.gate, self._moves.now)
            self._closed.add(row.name)

    # -- limits by name -------------------------------------------------------------------------

    def terms(self, lane: bytes) -> Terms:
        """What holds for a lane of a limit that some job has brought along."""
        limited = self._named(lane[: lane.index(0)].decode())
        assert limited is not None
        return limited.terms_of(lane)

    def _named(self, name: str) -> Limited | None:
        limited = self._names.get(name)
        if limited is None:
            limited = read_limited(self._moves.store, self._moves.txn, LIMITS + name)
            if limited is not None:
                self._names[name] = limited
        return limited

    def declare(self, claim: Claim, *, anew: bool = True) -> None:
        """A job is stored that brings a limit along; without ``anew`` a known one stays."""
        limited = self._named(claim.name)
        if limited is None or (anew and limited.declared != claim.terms):
            self.set_named(claim.name, claim.terms, declared=True)

    def set_named(self, name: str, terms: Terms | None, *, declared: bool) -> None:
        """Have these terms hold for a limit, in some of its lanes at once."""
        limited = self._named(name)
        if limited is None:
            limited = self._names[name] = Limited()
        old = hold_to(limited, terms, declared=declared)
        self._dirty.add(LIMITS + name)
        if limited.terms == old:
            return
        first = not limited.behind
        if first or limited.behind[0][0]:
            limited.behind = [(b"", old), *limited.behind]
        if self.go_on(name) and first:
            self._call(name)

    def go_on(self, name: str) -> bool:
        """Have the terms reach more lanes of a limit; True when others go by older ones still."""
        limited = self._named(name)
        if limited is None or not limited.behind:
            return False
        self.pieces += 1
        reached = self._moves.lanes.change(name, limited)
        if reached:
            limited.reach(reached)
        else:
            limited.behind = []
        self._dirty.add(LIMITS + name)
        point("store.terms")
        return bool(limited.behind)

    def _call(self, name: str) -> None:
        """Have whoever comes next go on. No id of a job ends as the reference does."""
        moves = self._moves
        key = DUE_KEY.pack(0, moves.now, DUE_TERMS, moves.next_number())
        moves.txn.put(key, name.encode() + b"\0", db=moves.t.due)
        moves.untimed = True

    def called(self, reference: bytes) -> None:
        """An entry that calls to go on came up, and is gone."""
        name = reference[:-1].decode()
        if self.go_on(name):
            self._call(name)

    def catch_up(self) -> bool:
        """Go on with a limit whose entry an older release took; True when there is more to do."""
        if self.pieces:  # enough for one commit
            return True
        for name in names_of(self._moves.store, self._moves.txn, LIMITS):
            limited = self._named(name)
            if limited is not None and limited.behind:
                self.go_on(name)
                return True
        return False

    def write(self) -> None:
        """Store what has changed."""
        for key in self._dirty:
            name = key[len(GATES) :]
            limited = self._queues[name][1] if key.startswith(GATES) else self._names[name]
            self._moves.txn.put(self._moves.store.key(key), encode(limited))
        self._dirty.clear()


def names_of(store: Store, txn: lmdb.Transaction[bytes], kind: str) -> list[str]:
    """The names of records of a kind."""
    first, names = store.key(kind), []
    cursor = txn.cursor()
    more = cursor.set_range(first)
    while more and cursor.key().startswith(first):
        names.append(cursor.key()[len(first) :].decode())
        more = cursor.next()
    return names


# -- looking -------------------------------------------------------------------------------------


def gate_held(limited: Limited, row: Row, now: int) -> Held | None:
    """What keeps the jobs of a queue waiting."""
    when = opens(limited.terms, limited.gate, row.running, now)
    if not when:
        return None
    breaker = limited.terms.breaker
    broken = breaker is not None and limited.gate.failures >= breaker[0]
    seconds = seconds_until(when, now)
    return Held(row.name, "", True, seconds, row.running, limited.terms, broken)


def gate_shown(limited: Limited, row: Row, now: int) -> LimitStats:
    """The limit of a queue in numbers."""
    when = opens(limited.terms, limited.gate, row.running, now)
    return LimitStats(
        name=row.name,
        queue=True,
        terms=limited.terms,
        declared=limited.declared,
        by_hand=limited.by_hand,
        running=row.running,
        failures=limited.gate.failures,
        until=seconds_until(when, now) if when else 0.0,
    )


def seconds_until(when: int, now: int) -> float:
    """Seconds until a gate opens; infinity when no time alone opens it."""
    return (when - now) / MICRO if when < NEVER else float("inf")
