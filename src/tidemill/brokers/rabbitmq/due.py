"""How the server itself keeps what is not due: a clock of queues.

A delay is a number of units in the base 32. For each level (what a digit stands for) and each value
of the digit there is a queue whose messages expire after just that time, and go, by the server's
own hand, to the exchange of the next lower level: so a message waits once for each of its digits
that is not 0, and then reaches the queue it is for. Since all messages of a queue wait equally
long, none stands behind one that waits longer, and there are at most 166 such queues, made when
first used. A message's routing key tells its way: its digits, highest first, and the place it is
for.

    5.0.0.12.0.7.tidemill.tasks.normal.default

What the clock cannot hold at once, 46 days, is sent round again by whoever gets it.
"""

from __future__ import annotations

from typing import Any, Final

from tidemill.brokers.rabbitmq.layout import Place

__all__ = ["DIGITS", "LEVELS", "DelayQueues", "longest", "split"]

UNIT = 0.01
"""Seconds: a delay is rounded up to these."""

DIGITS: Final = 32
LEVELS: Final = 6
_COARSE = 3600.0
"""Seconds: from such a delay on the lowest digit is 0: up to 0.32 s more, and a wait less."""

_TOP = 11
"""The highest digit of the highest level: more milliseconds do not fit into the server's number."""


def longest() -> float:
    """Seconds the clock can hold at once."""
    return UNIT * (int((_TOP + 1) * DIGITS ** (LEVELS - 1)) - 1)


def split(seconds: float) -> tuple[int, ...]:
    """The digits of a delay, highest first; never less than the delay, up to the longest."""
    units = -int(-min(seconds, longest()) / UNIT // 1)
    if seconds >= _COARSE:
        units = -(-units // DIGITS) * DIGITS
    units = max(1, min(units, round(longest() / UNIT)))
    digits = []
    for _ in range(LEVELS):
        units, digit = divmod(units, DIGITS)
        digits.append(digit)
    return tuple(reversed(digits))


class DelayQueues:
    """The names of the clock's queues and exchanges under a prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def route(self, digits: tuple[int, ...], home: str) -> tuple[str, str]:
        """(exchange, routing key) for a message that is to be at ``home`` after that time."""
        first = next(i for i, digit in enumerate(digits) if digit)
        return self.exchange(LEVELS - 1 - first), ".".join([*map(str, digits), home])

    def exchange(self, level: int) -> str:
        """The exchange of a level; below the lowest that of what is due."""
        return f"{self._prefix}.delay.{level}" if level >= 0 else f"{self._prefix}.due"

    def waits(self, digits: tuple[int, ...]) -> list[tuple[Place, int, int]]:
        """The queues a message goes through: each with its level and digit."""
        levels = range(LEVELS - 1, -1, -1)
        return [
            (self._queue(level, digit), level, digit)
            for level, digit in zip(levels, digits, strict=True)
            if digit
        ]

    def all_waits(self) -> list[Place]:
        """All queues there may be, longest waits first."""
        return [
            self._queue(level, digit)
            for level in range(LEVELS - 1, -1, -1)
            for digit in range(_TOP if level == LEVELS - 1 else DIGITS - 1, 0, -1)
        ]

    def left(self, place: Place, key: str) -> tuple[float, float]:
        """Seconds that a message with this key, in this queue, has still to wait: from, to.

        Raises:
            ValueError: it has lost its way.
        """
        level, digit = map(int, place.name.rsplit(".", 2)[1:])
        below = map(int, key.split(".", LEVELS)[LEVELS - level : LEVELS])
        least = sum(d * _seconds(n) for d, n in zip(below, range(level - 1, -1, -1), strict=True))
        return least, least + digit * _seconds(level)

    def _queue(self, level: int, digit: int) -> Place:
        milliseconds = round(digit * _seconds(level) * 1000)
        arguments: dict[str, Any] = {
            "x-queue-type": "quorum",
            "x-message-ttl": milliseconds,
            "x-dead-letter-exchange": self.exchange(level - 1),
            # It is gone here only when it has arrived there; only quorum queues can do that.
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
        return Place(f"{self._prefix}.delay.{level}.{digit}", arguments)

    @staticmethod
    def binding(level: int, digit: int) -> str:
        """The pattern of the messages of a level that have this digit there."""
        return ".".join([*["*"] * (LEVELS - 1 - level), str(digit), "#"])

    @staticmethod
    def arrival(home: str) -> str:
        """The pattern of the messages for a place, when they are due."""
        return ".".join([*["*"] * LEVELS, home])


def _seconds(level: int) -> float:
    """What a digit of 1 stands for."""
    return float(DIGITS**level * UNIT)
