"""Lanes: each key of each limit by name, inside one commit.

All ready jobs of a lane lie in a table of their own, in order. Of each line the lane has jobs in,
the first also stands in the ready table, if the gate lets it start: so a lease finds what may start
where it finds all else, and never walks over what may not. Whatever changes in a lane makes it
*stale*; :meth:`Lanes.sync` then makes what stands in the ready table true again.

In the ready table the first job of a lane with a key has the number of the lane's last lease for
its sequence, when that is higher: keys take turns.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import lmdb
import msgspec

from tidemill.brokers.lmdb.gates import LIMITS, Limited, read_limited, seconds_until
from tidemill.brokers.lmdb.hands import COST, name_of
from tidemill.brokers.lmdb.layout import DUE_KEY, DUE_LANE, LOST, NUMBER, READY_KEY, UNUSED, Tables
from tidemill.brokers.lmdb.record import Stored, claim_of, encode
from tidemill.brokers.lmdb.wake import MESSAGES, TASKS
from tidemill.gate import (
    NEVER,
    Claim,
    Gate,
    Held,
    Terms,
    change,
    clear_at,
    give_back,
    hold,
    let_go,
    opens,
    room,
    take,
)

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.moves import Moves
    from tidemill.brokers.lmdb.store import Store

__all__ = ["Lane", "Lanes", "is_parked", "lane_held", "lanes_of", "parked_in"]

_LINE = struct.Struct(">I")

CHANGE_MOST = 300
"""Lanes that other terms reach in one commit: some 10 ms."""

Place = tuple[int, int, int]


class Lane(msgspec.Struct, array_like=True, gc=False):
    """One lane as it is stored, under the limit's name, a zero and the key.

    Attributes:
        number: what leads the keys of its jobs.
        running: how many of its jobs are leased.
        turn: the number of its last lease.
        clock, due: of its entry in the due table, 0 for none: when it opens, or can be forgotten.
        lines: by line it has ready jobs in, (rank, turn, sequence) of the one in the ready table,
            if any. Its turn is its sequence, or that of its lane.
    """

    number: int
    gate: Gate = msgspec.field(default_factory=Gate)
    running: int = 0
    turn: int = 0
    clock: int = 0
    due: int = 0
    lines: dict[int, Place | None] = {}


_LANE = msgspec.msgpack.Decoder(Lane)


class Lanes:
    """The lanes a commit has to do with."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._lanes: dict[bytes, Lane] = {}
        self._stale: set[bytes] = set()
        self._came: dict[bytes, dict[int, int]] = {}  # how many jobs, by line
        self._dirty: set[bytes] = set()
        self._cursor: lmdb.Cursor[bytes] | None = None
        self.lent: dict[int, tuple[bytes, float]] = {}  # by token, what a lease was taken from

    @property
    def any(self) -> bool:
        """True when the commit has to do with some lane."""
        return bool(self._lanes)

    def _lane(self, name: bytes) -> Lane:
        lane = self._lanes.get(name)
        if lane is None:
            data = self._moves.txn.get(name, db=self._moves.t.lane)
            lane = _LANE.decode(data) if data is not None else Lane(self._moves.next_number())
            self._lanes[name] = lane
        return lane

    def stale(self, name: bytes) -> None:
        """What stands in the ready table for a lane may be true no more."""
        self._dirty.add(name)
        self._stale.add(name)

    # -- jobs -----------------------------------------------------------------------------------

    def enter(self, claim: Claim, key: bytes, job_id: bytes) -> None:
        """A job of a lane is ready, under its ready key."""
        name = name_of(claim.name, claim.key)
        lane = self._lane(name)
        line, rank, seq = READY_KEY.unpack(key)
        value = COST.pack(claim.cost) + job_id
        self._moves.txn.put(NUMBER.pack(lane.number) + key, value, db=self._moves.t.park)
        first = lane.lines.setdefault(line, None)
        came = self._came.setdefault(name, {})
        came[line] = came.get(line, 0) + 1
        if first is None or (rank, seq) < (first[0], first[2]):
            self.stale(name)

    def leave(self, stored: Stored) -> None:
        """A ready job of a lane is taken away, and was not leased."""
        name = _name_of(stored)
        key = NUMBER.pack(self._lane(name).number) + stored.head.ready_key
        self._moves.txn.delete(key, db=self._moves.t.park)
        self.stale(name)

    def is_parked(self, stored: Stored) -> bool:
        """True when the job is ready: it is not running."""
        lane = self._lanes.get(_name_of(stored))
        txn, tables = self._moves.txn, self._moves.t
        return is_parked(txn, tables, stored, lane)

    def ended(self, stored: Stored, token: int, back: int = 0) -> None:
        """A lease of the lane has ended; ``back``: when it was made, if the job never ran."""
        name, cost = self._moves.store.lent.pop(token, None) or _taken_from(stored)
        lane = self._lane(name)
        lane.running -= 1
        if back:
            terms = self._moves.gates.terms(name)
            give_back(terms, lane.gate, back, cost)
        self._dirty.add(name)
        if None in lane.lines.values() or not (lane.lines or lane.running):
            self._stale.add(name)  # else nothing else can be the first

    def hold(self, stored: Stored, token: int, charged: int) -> None:
        """A lease of the lane goes to the carrier, which has been charged at that time."""
        name, cost = self._moves.store.lent.pop(token, None) or _taken_from(stored)
        hold(self._moves.gates.terms(name), self._lane(name).gate, charged, cost)
        self.stale(name)

    def let_go(self, stored: Stored, *, starts: bool) -> None:
        """A job of the lane lies with the carrier no more."""
        name, cost = _taken_from(stored)
        lane = self._lane(name)
        let_go(lane.gate, cost)
        if starts:
            take(self._moves.gates.terms(name), lane.gate, self._moves.now, cost)
        else:
            lane.running -= 1
        self.stale(name)

    def goes_on(self, stored: Stored) -> None:
        """The lease that has ended is held all the same."""
        self._lane(_name_of(stored)).running += 1

    # -- while jobs are leased: see hands.py ----------------------------------------------------

    def opened(self, name: bytes) -> Lane:
        """A lane that jobs are about to be leased from."""
        self._dirty.add(name)
        return self._lane(name)

    def heirs(
        self, envelope: bytes, found: bytes, seq: int, queues: Collection[int], owner: int
    ) -> list[int]:
        """Lines to whose sleepers the place of a job that could be taken now is to be left.

        Jobs of its lane wait there that are older, in no queue that the owner takes from.
        """
        claim = claim_of(envelope)
        name = name_of(claim.name, claim.key)
        lane = self._lane(name)
        if len(lane.lines) < 2:
            return []
        moves, (_, rank, _) = self._moves, READY_KEY.unpack(found)
        heirs = []
        for line, place in lane.lines.items():
            if not place or (place[0], place[2]) >= (rank, seq) or line >= LOST:
                continue
            row = moves.row_of(line)
            if row.number in queues or row.paused or (row.gated and not moves.gates.room(row, 1)):
                continue
            if moves.store.bells.sleeps(MESSAGES if line & 1 else TASKS, row.name, owner):
                heirs.append(line)
        terms = moves.gates.terms(name)
        free = room(terms, lane.gate, lane.running, moves.now, len(heirs) + 1)
        return heirs if free <= len(heirs) else []

    def closed(self, name: bytes, lane: Lane, opening: int) -> None:
        """They were; ``opening`` is when the next may start, if it may not now."""
        if lane.due or opening < NEVER or not lane.lines:
            self._arm(name, lane, opening)

    def look_again(self, name: bytes) -> None:
        """One was, and others of the lane may have to wait."""
        self._stale.discard(name)
        self._sync_one(name, self._came.pop(name, {}), ring=False)

    def jobs_in(self, lines: Collection[int], most: int) -> list[bytes]:
        """Ids of ready jobs of some lines, that are in any lane."""
        return list(itertools.islice(parked_in(self._moves.txn, self._moves.t, lines), most))

    # -- lanes ----------------------------------------------------------------------------------

    def came_due(self, name: bytes) -> None:
        """The entry of a lane in the due table came up, and is gone."""
        lane = self._lane(name)
        lane.due = lane.clock = 0
        self.stale(name)

    def change(self, limit: str, limited: Limited) -> bytes:
        """Have some lanes that go by older terms of a limit look again.

        The name of the last of them, or nothing when there are no more.
        """
        after, last = limited.behind[0][0], b""
        stored = lanes_of(self._moves.txn, self._moves.t, limit, after)
        found = [name for name, _ in itertools.islice(stored, CHANGE_MOST)]
        if len(found) == CHANGE_MOST:
            last = found[-1]
        prefix = f"{limit}\0".encode()
        new = [n for n in self._lanes if n.startswith(prefix) and after < n <= (last or n)]
        for name in {*found, *new}:
            lane = self._lane(name)
            change(limited.terms_of(name), limited.terms, lane.gate, self._moves.now)
            self.stale(name)
        return last

    def sweep(self, most: int) -> bool:
        """Forget lanes that can be; True when there are more."""
        moves = self._moves
        cursor = moves.txn.cursor(moves.t.due)
        for _ in range(most):
            if not cursor.set_range(DUE_KEY.pack(UNUSED, 0, 0, 0)):
                return False
            clock, due, _, _ = DUE_KEY.unpack(cursor.key())
            if clock != UNUSED or due > moves.now:
                return False
            name = cursor.value()
            cursor.delete()
            self.came_due(name)
        return True

    def sync(self) -> None:
        """Make what stands in the ready table true for every lane that has changed."""
        while self._stale:
            name = self._stale.pop()
            self._sync_one(name, self._came.pop(name, {}))
        while self._came:  # behind those that stand there
            name, came = self._came.popitem()
            terms, lane = self._moves.gates.terms(name), self._lanes[name]
            for line, count in came.items():
                self._ring(terms, lane, line, count)

    def _sync_one(self, name: bytes, came: dict[int, int], *, ring: bool = True) -> None:
        moves, lane = self._moves, self._lanes[name]
        terms = moves.gates.terms(name)
        turn = lane.turn if name[-1] else 0
        opening = NEVER
        if self._cursor is None:
            self._cursor = moves.txn.cursor(moves.t.park)
        cursor = self._cursor
        for line, head in list(lane.lines.items()):
            prefix = NUMBER.pack(lane.number) + _LINE.pack(line)
            want: Place | None = None
            job_id = b""
            if cursor.set_range(prefix) and cursor.key().startswith(prefix):
                found, value = cursor.item()
                _, rank, seq = READY_KEY.unpack_from(found, NUMBER.size)
                cost, job_id = COST.unpack_from(value)[0], value[COST.size :]
                when = opens(terms, lane.gate, lane.running, moves.now, cost)
                if when:
                    opening = min(opening, when)
                else:
                    want = rank, max(seq, turn), seq
            else:
                del lane.lines[line]
            if want != head:
                self._stand(line, head, want, job_id)
            if line in lane.lines:
                lane.lines[line] = want
            if want and ring and (line in came or head is None):
                self._ring(terms, lane, line, came.get(line, 1))
        self._arm(name, lane, opening)

    def _ring(self, terms: Terms, lane: Lane, line: int, count: int) -> None:
        """Hint those who sleep: so many jobs of a line may start, or as many as the gate lets."""
        moves = self._moves
        count = room(terms, lane.gate, lane.running, moves.now, count)
        moves.ring(moves.row_of(line), line & 1, max(1, count))

    def _stand(self, line: int, old: Place | None, new: Place | None, job_id: bytes) -> None:
        """Have another job stand in the ready table for its lane, or none."""
        moves = self._moves
        if old:
            moves.txn.delete(READY_KEY.pack(line, *old[:2]), db=moves.t.ready)
        if new:
            moves.txn.put(READY_KEY.pack(line, *new[:2]), job_id, db=moves.t.ready)

    def _arm(self, name: bytes, lane: Lane, opening: int) -> None:
        """One entry in the due table: when it opens, or when nobody need know of it."""
        clock, due = (0, opening) if opening < NEVER else (0, 0)
        if not lane.lines and not lane.running:
            clear = clear_at(self._moves.gates.terms(name), lane.gate)
            clock, due = (UNUSED, clear) if clear > self._moves.now else (0, 0)
        if (clock, due) == (lane.clock, lane.due):
            return
        moves = self._moves
        if lane.due:
            old = DUE_KEY.pack(lane.clock, lane.due, DUE_LANE, lane.number)
            moves.txn.delete(old, db=moves.t.due)
        if due:
            moves.txn.put(DUE_KEY.pack(clock, due, DUE_LANE, lane.number), name, db=moves.t.due)
            moves.untimed = True
        lane.clock, lane.due = clock, due
        self._dirty.add(name)

    def write(self) -> None:
        """Store what has changed; what tells no more than nothing would is forgotten."""
        moves = self._moves
        for name in self._dirty:
            lane = self._lanes[name]
            if lane.lines or lane.running or lane.due:
                moves.txn.put(name, encode(lane), db=moves.t.lane)
            else:
                moves.txn.delete(name, db=moves.t.lane)
        self._dirty.clear()


def _name_of(stored: Stored) -> bytes:
    return _taken_from(stored)[0]


def _taken_from(stored: Stored) -> tuple[bytes, float]:
    claim = claim_of(stored.envelope)
    return name_of(claim.name, claim.key), claim.cost


# -- looking -------------------------------------------------------------------------------------


def lanes_of(
    txn: lmdb.Transaction[bytes], tables: Tables, limit: str, after: bytes = b""
) -> Iterator[tuple[bytes, Lane]]:
    """The lanes of a limit, by name; those behind ``after``."""
    prefix = f"{limit}\0".encode()
    cursor = txn.cursor(tables.lane)
    found = cursor.set_range(after + b"\0" if after else prefix)
    while found and cursor.key().startswith(prefix):
        yield cursor.key(), _LANE.decode(cursor.value())
        found = cursor.next()


def _read(txn: lmdb.Transaction[bytes], tables: Tables, name: bytes) -> Lane | None:
    data = txn.get(name, db=tables.lane)
    return _LANE.decode(data) if data is not None else None


def is_parked(
    txn: lmdb.Transaction[bytes], tables: Tables, stored: Stored, lane: Lane | None = None
) -> bool:
    """True when a job of a lane whose header says ready is that, and not running."""
    lane = lane or _read(txn, tables, _name_of(stored))
    if lane is None:
        return False
    key = NUMBER.pack(lane.number) + stored.head.ready_key
    return txn.get(key, db=tables.park) is not None


def parked_in(
    txn: lmdb.Transaction[bytes], tables: Tables, lines: Collection[int] | None = None
) -> Iterator[bytes]:
    """Ids of ready jobs that are in lanes: of all lines, or of some."""
    for key, value in txn.cursor(tables.park):
        if lines is None or _LINE.unpack_from(key, NUMBER.size)[0] in lines:
            yield value[COST.size :]


def lane_held(store: Store, txn: lmdb.Transaction[bytes], stored: Stored, now: int) -> Held | None:
    """What keeps a job of a lane waiting."""
    claim = claim_of(stored.envelope)
    limited, name = read_limited(store, txn, LIMITS + claim.name), name_of(claim.name, claim.key)
    lane = _read(txn, store.tables, name)
    assert limited is not None
    if lane is None:
        return None
    terms = limited.terms_of(name)
    when = opens(terms, lane.gate, lane.running, now, claim.cost)
    if not when:
        return None
    until = seconds_until(when, now)
    return Held(claim.name, claim.key, False, until, lane.running, terms)
