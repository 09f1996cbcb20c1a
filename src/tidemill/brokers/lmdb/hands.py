"""Leasing from lanes: what one step takes of the lanes of a line.

A lane's first job is found in the ready table; those behind it come from the lane's own table. The
next of each is *held* in memory, and written only when it is not taken in the same step. Tokens are
taken from a lane's gate for all of its jobs together.
"""

from __future__ import annotations

import heapq
import struct
from typing import TYPE_CHECKING

import lmdb

from tidemill.brokers.lmdb.layout import READY_KEY
from tidemill.brokers.lmdb.record import claim_of
from tidemill.gate import NEVER, Terms, opens, room, take

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.lanes import Lane
    from tidemill.brokers.lmdb.moves import Moves

__all__ = ["COST", "Hand", "Hands", "name_of"]

COST = struct.Struct(">d")
"""What leads the id of a job in the table of lanes."""

_PARK_KEY = struct.Struct(">QIIQ")  # lane, line, rank, sequence
_NOTHING = 0, 0, 0, 0
_MOST = 1 << 30


def name_of(limit: str, key: str) -> bytes:
    """What a lane is stored under."""
    return f"{limit}\0{key}".encode()


class Hand:
    """What a step has taken of one lane.

    Attributes:
        terms, keyed: of the lane's limit, and whether the lane is one of many.
        cost: of the job that is being leased.
        spent: tokens that were taken, and are not yet noted in the gate.
        left: how many more jobs that cost 1 may start, as far as is known.
        opening: when its next job may start, which may not now.
    """

    __slots__ = ("cost", "keyed", "lane", "left", "name", "opening", "spent", "terms")

    def __init__(self, lane: Lane, name: bytes, terms: Terms, cost: float) -> None:
        self.lane = lane
        self.name = name
        self.terms = terms
        self.keyed = name[-1] != 0
        self.cost = cost
        self.spent = 0.0
        self.left = 0
        self.opening = NEVER


class Hands:
    """What a step takes of the lanes of one line; ``held`` is a heap of what they have next."""

    def __init__(self, moves: Moves, line: int) -> None:
        self.held: list[tuple[bytes, bytes, Hand]] = []
        self.moved = False  # the ready table has changed beside what was taken
        self._moves = moves
        self._line = line
        self._hands: dict[bytes, Hand] = {}
        self._cursor: lmdb.Cursor[bytes] | None = None

    def open(self, envelope: bytes) -> Hand:
        """The hand for a lane whose first job was found in the ready table."""
        claim = claim_of(envelope)
        name = name_of(claim.name, claim.key)
        lane = self._moves.lanes.opened(name)
        terms = self._moves.gates.terms(name)
        hand = self._hands[name] = Hand(lane, name, terms, claim.cost)
        return hand

    def remove(self, hand: Hand, rank: int, seq: int) -> None:
        """A job is ready no more: it leaves the table of its lane."""
        key = _PARK_KEY.pack(hand.lane.number, self._line, rank, seq)
        if self._cursor is None:
            self._cursor = self._moves.txn.cursor(self._moves.t.park)
        if self._cursor.key() == key or self._cursor.set_key(key):
            self._cursor.delete()

    def dropped(self, hand: Hand) -> None:
        """The job that was removed is not leased."""
        hand.lane.lines[self._line] = None
        self._moves.lanes.stale(hand.name)

    def start(self, hand: Hand, token: int) -> None:
        """The job that was removed is leased."""
        lane = hand.lane
        hand.spent += hand.cost
        lane.running += 1
        lane.turn = token
        if len(lane.lines) > 1:  # more than the next of this line may change
            lane.lines[self._line] = None
            self.close()
            self._moves.lanes.look_again(hand.name)
            self.moved = True
            return
        self._moves.lanes.lent[token] = hand.name, hand.cost
        assert self._cursor is not None
        key, value = self._cursor.item()  # behind the one that was taken
        number, line, rank, seq = _PARK_KEY.unpack(key) if key else _NOTHING
        if number != lane.number or line != self._line:
            del lane.lines[self._line]
            return
        hand.cost = COST.unpack_from(value)[0]
        if hand.left and hand.cost == 1:
            hand.left -= 1
        elif not self._opens(hand):
            lane.lines[self._line] = None
            return
        turn = token if hand.keyed and token > seq else seq
        lane.lines[self._line] = rank, turn, seq
        found = READY_KEY.pack(self._line, rank, turn)
        heapq.heappush(self.held, (found, value[COST.size :], hand))

    def _opens(self, hand: Hand) -> bool:
        """Whether the next of a lane may start now."""
        self._note(hand)
        lane, terms, now = hand.lane, hand.terms, self._moves.now
        if hand.cost == 1:
            hand.left = room(terms, lane.gate, lane.running, now, _MOST) - 1
            if hand.left >= 0:
                return True
            hand.left = 0
        when = opens(terms, lane.gate, lane.running, now, hand.cost)
        hand.opening = when or NEVER
        return not when

    def _note(self, hand: Hand) -> None:
        """Take the tokens of what was started."""
        take(hand.terms, hand.lane.gate, self._moves.now, hand.spent)
        hand.spent = 0.0

    def close(self) -> None:
        """Write what is to stand in the ready table, and have the lanes as they are by now."""
        for key, job_id, _ in self.held:
            self._moves.txn.put(key, job_id, db=self._moves.t.ready)
        self.held.clear()
        for hand in self._hands.values():
            if hand.spent:
                self._note(hand)
            self._moves.lanes.closed(hand.name, hand.lane, hand.opening)
        self._hands.clear()
