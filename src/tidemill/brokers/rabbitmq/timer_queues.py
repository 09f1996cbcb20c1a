"""Timer queues: where delayed jobs lie while workers keep their time, instead of the server.

RabbitMQ before 3.12.5 cannot be trusted with delays in a cluster. The server's dead-letter worker
moves messages from each queue of the clock (:mod:`.due`) to the next, and remembers the leader
of that next queue. While the node of that leader is lost, the dead-letter worker moves no message.
So in a cluster each delayed job goes to a plain quorum queue, and a worker of ours moves the job on
when it is due (:mod:`.timekeeper`).

Each timer queue is for a range of delays: below 0.5 s, from 0.5 to 1 s, from 1 to 2 s, and so on.
In such a queue no job is due before it has waited for the least delay of the range.

    PREFIX.timer.LEVEL   jobs that are to wait; the header ``home`` says where each goes then
    PREFIX.timers        the levels that are in use, one message each: a worker that takes it serves
                         that queue
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

import pika

from tidemill.brokers.rabbitmq.amqp.frames import encoded
from tidemill.brokers.rabbitmq.amqp.publish_windows import Outgoing
from tidemill.brokers.rabbitmq.layout import NEVER, Names, Place, safe
from tidemill.brokers.rabbitmq.settings import Settings

__all__ = ["HOME", "LEVELS", "LONGEST", "TimerQueues", "by_workers", "forwards"]

HOME = "home"
"""The header that names the place where a job goes when it is due."""

_FORWARDS = (3, 12, 5)
"""The first version that forwards to a queue whose leader was on a node that is lost."""

_FIRST: Final = 0.5
"""Seconds: the least delay of the level 1. Level 0 is for shorter ones."""

LEVELS: Final = 24

LONGEST: Final = _FIRST * 2 ** (LEVELS - 1)
"""Seconds that a job can wait at once: 48 days."""


def forwards(version: str) -> bool:
    """Whether a server of this version moves delayed jobs on when a node of its cluster is lost."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    return not numbers or numbers >= _FORWARDS


def by_workers(settings: Settings, version: str) -> bool:
    """Whether workers keep the time of delayed jobs on a server of this version."""
    if settings.delays:
        return settings.delays == "workers"
    return len(settings.hosts) > 1 and not forwards(version)


class TimerQueues:
    """The timer queues under a prefix."""

    def __init__(self, names: Names) -> None:
        self._prefix = names.prefix
        self._arguments: dict[str, Any] = {
            "x-queue-type": "quorum",
            "x-delivery-limit": NEVER,  # what a worker holds goes back now and then
            **safe(names.failed),
        }

    def at(self, level: int) -> Place:
        """The queue of a level."""
        return Place(f"{self._prefix}.timer.{level}", self._arguments, listed=True)

    def for_delay(self, seconds: float) -> Place:
        """The queue for a delay."""
        return self.at(level_of(seconds))

    def all(self) -> list[Place]:
        """All timer queues there may be, longest delays first."""
        return [self.at(level) for level in range(LEVELS - 1, -1, -1)]

    @property
    def in_use(self) -> Place:
        """The queue of the levels that are in use."""
        return Place(f"{self._prefix}.timers", self._arguments)

    def notice(self, place: Place) -> Outgoing:
        """Return the message that tells workers of a timer queue."""
        home, level = self.in_use, place.name.rpartition(".")[2]
        properties = encoded(pika.BasicProperties(delivery_mode=2, message_id=f"timer {level}"))
        return Outgoing("", home.name, properties, level.encode(), home)

    def level(self, name: str) -> int | None:
        """The level of the queue with this name; None when it is no timer queue."""
        start, _, number = name.rpartition(".")
        return int(number) if start == f"{self._prefix}.timer" else None


def level_of(seconds: float) -> int:
    """The level for a delay."""
    if seconds < _FIRST:
        return 0
    return min(math.frexp(seconds / _FIRST)[1], LEVELS - 1)


def least(level: int) -> float:
    """Seconds that no job of a level waits less than, from when it came there."""
    return float(_FIRST * 2 ** (level - 1)) if level else 0.0


def most(level: int) -> float:
    """Seconds that no job of a level waits longer than."""
    return float(_FIRST * 2**level)
