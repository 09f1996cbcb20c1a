"""Timer queues: the places of delayed jobs, which workers hold until they are due.

A worker moves a job on when it is due (:mod:`.timekeeper`). While no worker runs, the job waits.

Each timer queue is for a range of delays: below 0.5 s, from 0.5 to 1 s, from 1 to 2 s, and so on.
No job in a timer queue is due before it has waited for the least delay of the range.

    PREFIX.timer.LEVEL   delayed jobs; the header ``home`` names the place of each due job
    PREFIX.timers        the levels in use, one message each; the worker that takes the message
                         serves the queue of that level
"""

from __future__ import annotations

import math
from typing import Any, Final

import pika

from tidemill.brokers.rabbitmq.amqp.frames import encoded
from tidemill.brokers.rabbitmq.amqp.publish_channel import Outgoing
from tidemill.brokers.rabbitmq.layout import NEVER, Names, Place, safe

HOME = "home"
"""The header that names the place of a job when it is due."""

_FIRST: Final = 0.5
"""Seconds: the least delay of level 1. Level 0 is for shorter delays."""

LEVELS: Final = 24

LONGEST: Final = _FIRST * 2 ** (LEVELS - 1)
"""Seconds of the longest delay in one timer queue: 48 days."""


class TimerQueues:
    """The timer queues under a prefix."""

    def __init__(self, names: Names) -> None:
        self._prefix = names.prefix
        self._arguments: dict[str, Any] = {
            "x-queue-type": "quorum",
            # Each return counts: workers return held messages from time to time.
            "x-delivery-limit": NEVER,
            **safe(names.failed),
        }

    def at(self, level: int) -> Place:
        """The queue of a level."""
        return Place(f"{self._prefix}.timer.{level}", self._arguments, listed=True)

    def for_delay(self, seconds: float) -> Place:
        """The queue for a delay."""
        return self.at(level_of(seconds))

    def all(self) -> list[Place]:
        """All timer queues that can exist, longest delays first."""
        return [self.at(level) for level in range(LEVELS - 1, -1, -1)]

    @property
    def in_use(self) -> Place:
        """The queue that lists the levels in use."""
        return Place(f"{self._prefix}.timers", self._arguments)

    def notice(self, place: Place) -> Outgoing:
        """Return the message that tells workers of a timer queue."""
        home, level = self.in_use, place.name.rpartition(".")[2]
        properties = encoded(pika.BasicProperties(delivery_mode=2, message_id=f"timer {level}"))
        return Outgoing(properties, level.encode(), home)


def level_of(seconds: float) -> int:
    """The level for a delay."""
    if seconds < _FIRST:
        return 0
    return min(math.frexp(seconds / _FIRST)[1], LEVELS - 1)


def least(level: int) -> float:
    """The shortest wait of a job in the queue of a level, in seconds from its arrival there."""
    return float(_FIRST * 2 ** (level - 1)) if level else 0.0


def most(level: int) -> float:
    """The longest wait of a job in the queue of a level, in seconds."""
    return float(_FIRST * 2**level)
