"""Consumers of one place, which together bring as much as an owner has credit for.

The prefetch of a consumer cannot be changed, and what it brought stays in hand when it ends: a new
one does not count that. So there are several for a place. When more is wanted another begins beside
them, with what is missing; when less is, those end which could bring the most, and what they
brought counts until it is acknowledged.

    begun ──(cancel)──► ending ──(cancel-ok)──► ended ──(nothing of it in hand)──► forgotten

What is on its way to one that ends may come until the server has said that it has ended, or goes
back to the front of the queue: so none begins meanwhile, whose messages would come before those.
One that is full brings nothing, and its end holds up nobody.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

__all__ = ["Consumer", "Stage", "in_hand", "plan"]

_PART = 64
"""A consumer that begins has at least this part of the credit, lest there are thousands."""

_TINY = 4
"""One that has less than this part of what begins ends: each costs the server a step of its own."""


class Stage(enum.Enum):
    """Where a consumer is in its life."""

    BEGUN = enum.auto()
    ENDING = enum.auto()
    ENDED = enum.auto()


class Consumer:
    """A consumer.

    Attributes:
        in_hand: how many messages it brought that are not acknowledged or given back.
        known: the server has said that it has begun.
    """

    __slots__ = ("in_hand", "known", "prefetch", "stage", "tag")

    def __init__(self, tag: str, prefetch: int, stage: Stage = Stage.BEGUN) -> None:
        self.tag = tag
        self.prefetch = prefetch
        self.in_hand = 0
        self.known = False
        self.stage = stage

    @property
    def room(self) -> int:
        """How many messages it may bring before any is acknowledged."""
        return self.prefetch - self.in_hand if self.stage is Stage.BEGUN else 0


def in_hand(consumers: Sequence[Consumer]) -> int:
    """How many messages they brought."""
    return sum([one.in_hand for one in consumers])


def plan(
    consumers: Sequence[Consumer], credit: int, *, trim: bool = False
) -> tuple[list[Consumer], int]:
    """Which are to end, and the prefetch of one that is to begin, or 0.

    With ``trim`` they can bring no more than the credit afterwards; else a little more may stay.
    """
    begun = [one for one in consumers if one.stage is Stage.BEGUN]
    if not credit:
        return begun, 0
    part = credit // _PART
    spare = sum([one.in_hand + one.room for one in consumers]) - credit
    if spare > (0 if trim else part):
        ends: list[Consumer] = []
        for one in sorted(begun, key=lambda one: -one.room):
            if spare <= 0 or one.room <= 0:
                break
            ends.append(one)
            spare -= one.room
        return ends, 0
    if spare >= 0 or any(one.stage is Stage.ENDING for one in consumers):
        return [], 0
    begins = max(-spare, part)
    return [one for one in begun if one.room <= 0 and one.prefetch * _TINY < begins], begins
