"""Consumers of one place, which together bring as many messages as an owner has credit for.

The prefetch of a consumer cannot change. Messages of an ended consumer stay with the owner, and a
new consumer does not count these. So a place (a queue of the server) has several consumers. When
the credit grows, another consumer begins with the missing prefetch. When the credit falls, the
consumers with the most room end. Their messages count until they are acknowledged.

    begun ──(cancel)──► ending ──(cancel-ok)──► ended ──(none of its messages in hand)──► forgotten

Messages for an ending consumer may still come until its cancel-ok, or go back to the front of the
queue. So no new consumer begins before the cancel-ok: its messages would overtake messages that
went back. A full consumer brings no more messages, so a new consumer may begin when the full
consumer is told to end.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

_PART = 64
"""A new consumer has at least 1/64 of the credit, so that a place has few consumers."""

_TINY = 4
"""A full consumer ends if its prefetch is less than 1/4 of a new consumer's prefetch. Each consumer
costs the server its own step."""


class Stage(enum.Enum):
    """The stage of a consumer's life."""

    BEGUN = enum.auto()
    ENDING = enum.auto()
    ENDED = enum.auto()


class Consumer:
    """A consumer.

    Attributes:
        in_hand: the number of its messages that are neither acknowledged nor returned.
        known: True when the server has said that the consumer has begun.
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
        """The number of messages that the consumer may bring before an acknowledgement."""
        return self.prefetch - self.in_hand if self.stage is Stage.BEGUN else 0


def in_hand(consumers: Sequence[Consumer]) -> int:
    """The number of messages in hand from these consumers."""
    return sum([one.in_hand for one in consumers])


def plan(
    consumers: Sequence[Consumer], credit: int, *, trim: bool = False
) -> tuple[list[Consumer], int]:
    """Choose the consumers that end, and the prefetch of a consumer that begins, or 0.

    With ``trim`` the consumers then bring no more than the credit; without ``trim`` a little more.
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
