"""Lanes: each key of each limit by name, inside one commit.

All ready jobs of a lane lie in a table of their own, in order. Of each line the lane has jobs in,
the first also stands in the ready table, if the gate lets it start: so a lease finds what may start
where it finds all else, and never walks over what may not. Whatever changes in a lane makes it
*stale*; :meth:`Lanes.sync` then makes what stands in the ready table true again.

In the ready table the first job of a lane with a key has the number of the lane's last lease for
its sequence, when that is higher: keys take turns.
"""

from __future__ import annotations

import heapq
import itertools
import struct
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

import lmdb
import msgspec

from tidemill.brokers.lmdb.gates import LIMITS, read_limited, seconds_until
from tidemill.brokers.lmdb.layout import DUE_KEY, DUE_LANE, NUMBER, READY_KEY, UNUSED, Tables
from tidemill.brokers.lmdb.record import Stored, claim_of, encode
from tidemill.gate import NEVER, Claim, Gate, Held, Terms, change, clear_at, give_back, opens, take
from tidemill.gate import room as room_in

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.moves import Moves
    from tidemill.brokers.lmdb.store import Store

__all__ = ["COST", "Lane", "Lanes", "is_parked", "lane_held", "lanes_of", "parked_in"]

COST = struct.Struct(">d")
"""What leads the id of a job in the table of lanes."""

_LINE = struct.Struct(">I")


_PARK_KEY = struct.Struct(">QIIQ")  # lane, line, rank, sequence
_PREFIX = struct.Struct(">QI")

Entry = tuple[bytes, bytes]  # of the ready table
Place = tuple[int, int, int]


class Lane(msgspec.Struct, array_like=True):
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


class Taken(NamedTuple):
    """A job that has left its lane to be leased."""

    claim: Claim
    name: bytes
    lane: Lane
    line: int


def _name_of(claim: Claim) -> bytes:
    return f"{claim.name}\0{claim.key}".encode()


class Lanes:
    """The lanes a commit has to do with."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._lanes: dict[bytes, Lane] = {}
        self._stale: dict[bytes, dict[int, int]] = {}  # how many jobs came, by line
        self._dirty: set[bytes] = set()
        self._cursor: lmdb.Cursor[bytes] | None = None
        self.moved = False  # the ready table has changed beside what was taken

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

    def _changed(self, name: bytes) -> dict[int, int]:
        self._dirty.add(name)
        return self._stale.setdefault(name, {})

    # -- jobs -----------------------------------------------------------------------------------

    def enter(self, claim: Claim, key: bytes, job_id: bytes) -> None:
        """A job of a lane is ready, under its ready key."""
        name = _name_of(claim)
        lane = self._lane(name)
        line = _LINE.unpack_from(key)[0]
        value = COST.pack(claim.cost) + job_id
        self._moves.txn.put(NUMBER.pack(lane.number) + key, value, db=self._moves.t.park)
        lane.lines.setdefault(line, None)
        came = self._changed(name)
        came[line] = came.get(line, 0) + 1

    def leave(self, stored: Stored) -> None:
        """A ready job of a lane is taken away, and was not leased."""
        name = _name_of(claim_of(stored.envelope))
        key = NUMBER.pack(self._lane(name).number) + stored.head.ready_key
        self._moves.txn.delete(key, db=self._moves.t.park)
        self._changed(name)

    def is_parked(self, stored: Stored) -> bool:
        """True when the job is ready: it is not running."""
        lane = self._lanes.get(_name_of(claim_of(stored.envelope)))
        txn, tables = self._moves.txn, self._moves.t
        return is_parked(txn, tables, stored, lane)

    def taken(self, envelope: bytes, found: bytes, seq: int) -> Taken:
        """The job behind an entry of the ready table, which is gone, leaves its lane."""
        claim = claim_of(envelope)
        name = _name_of(claim)
        lane = self._lane(name)
        line, rank, _ = READY_KEY.unpack(found)
        if self._cursor is None:
            self._cursor = self._moves.txn.cursor(self._moves.t.park)
        if self._cursor.set_key(_PARK_KEY.pack(lane.number, line, rank, seq)):
            self._cursor.delete()
        lane.lines[line] = None
        self._changed(name)
        return Taken(claim, name, lane, line)

    def start(self, taken: Taken, token: int, held: list[Entry], *, runs: bool) -> None:
        """A job that was taken is leased; without ``runs`` it is gone when taken.

        The next that is to stand in its place is added to the heap ``held``, so that it need not be
        written when it is taken at once; or, where there is more to the lane, it is written, and
        ``moved`` says so.
        """
        claim, name, lane, line = taken
        terms = self._moves.gates.terms(claim.name)
        take(terms, lane.gate, self._moves.now, claim.cost)
        lane.running += runs
        lane.turn = token
        came = self._stale.pop(name)
        if not runs or len(lane.lines) > 1:
            self._sync_one(name, came, ring=False)
            self.moved = True
            return
        assert self._cursor is not None
        found, value = self._cursor.item()  # behind the one that was taken
        opening = NEVER
        if found[:_PREFIX.size] != _PREFIX.pack(lane.number, line):
            del lane.lines[line]
        else:
            _, _, rank, seq = _PARK_KEY.unpack(found)
            cost = COST.unpack_from(value)[0]
            opening = opens(terms, lane.gate, lane.running, self._moves.now, cost)
            if not opening:
                opening = NEVER
                turn = max(seq, token) if claim.key else seq
                lane.lines[line] = rank, turn, seq
                heapq.heappush(held, (READY_KEY.pack(line, rank, turn), value[COST.size :]))
        if lane.due or opening < NEVER or not lane.lines:
            self._arm(name, lane, opening)

    def ended(self, stored: Stored, back: int = 0) -> None:
        """A lease of the lane has ended; ``back``: when it was made, if the job never ran."""
        claim = claim_of(stored.envelope)
        name = _name_of(claim)
        lane = self._lane(name)
        lane.running -= 1
        if back:
            give_back(self._moves.gates.terms(claim.name), lane.gate, back, claim.cost)
        self._changed(name)

    def goes_on(self, stored: Stored) -> None:
        """The lease that has ended is held all the same."""
        self._lane(_name_of(claim_of(stored.envelope))).running += 1

    def jobs_in(self, lines: Collection[int], most: int) -> list[bytes]:
        """Ids of ready jobs of some lines, that are in any lane."""
        return list(itertools.islice(parked_in(self._moves.txn, self._moves.t, lines), most))

    # -- lanes ----------------------------------------------------------------------------------

    def came_due(self, name: bytes) -> None:
        """The entry of a lane in the due table came up, and is gone."""
        lane = self._lane(name)
        lane.due = lane.clock = 0
        self._changed(name)

    def change(self, limit: str, old: Terms, new: Terms) -> None:
        """Other terms hold for a limit: every lane of it looks again."""
        prefix = f"{limit}\0".encode()
        names = {name for name in self._lanes if name.startswith(prefix)}
        names.update(name for name, _ in lanes_of(self._moves.txn, self._moves.t, limit))
        for name in names:
            change(old, new, self._lane(name).gate, self._moves.now)
            self._changed(name)

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
            name, came = self._stale.popitem()
            self._sync_one(name, came)

    def _sync_one(self, name: bytes, came: dict[int, int], *, ring: bool = True) -> None:
        moves, lane = self._moves, self._lanes[name]
        limit, _, key = name.partition(b"\0")
        terms = moves.gates.terms(limit.decode())
        turn = lane.turn if key else 0
        opening = NEVER
        cursor = moves.txn.cursor(moves.t.park)
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
            if want and ring:
                more = came.get(line, 0)
                if more or head is None:
                    count = room_in(terms, lane.gate, lane.running, moves.now, more or 1)
                    moves.ring(moves.row_of(line), line & 1, max(1, count))
        self._arm(name, lane, opening)

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
            limit = name.partition(b"\0")[0].decode()
            clear = clear_at(self._moves.gates.terms(limit), lane.gate)
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


# -- looking -------------------------------------------------------------------------------------


def lanes_of(
    txn: lmdb.Transaction[bytes], tables: Tables, limit: str
) -> Iterator[tuple[bytes, Lane]]:
    """The lanes of a limit, by name."""
    prefix = f"{limit}\0".encode()
    cursor = txn.cursor(tables.lane)
    found = cursor.set_range(prefix)
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
    lane = lane or _read(txn, tables, _name_of(claim_of(stored.envelope)))
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


def lane_held(
    store: Store, txn: lmdb.Transaction[bytes], stored: Stored, now: int
) -> Held | None:
    """What keeps a job of a lane waiting."""
    claim = claim_of(stored.envelope)
    limited = read_limited(store, txn, LIMITS + claim.name)
    lane = _read(txn, store.tables, _name_of(claim))
    assert limited is not None
    if lane is None:
        return None
    when = opens(limited.terms, lane.gate, lane.running, now, claim.cost)
    if not when:
        return None
    until = seconds_until(when, now)
    return Held(claim.name, claim.key, False, until, lane.running, limited.terms)
