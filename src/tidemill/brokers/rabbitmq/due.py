"""Delay queues: the server itself holds delayed jobs until they are due.

A delay is a number of units, written in base 32. The level of a digit is its position, 0 for the
lowest digit. Each value of a digit at each level has its own queue. The messages of a queue expire
after the time of its digit: digit * 32**level units. The server moves an expired message to the
exchange of the next lower level. So a message waits once for each of its digits that is not 0. Then
the message reaches its home: the queue of its jobs. All messages of a queue wait equally long, so
no message blocks a message that is due earlier. At most 166 delay queues exist; each is made at its
first use. A message's routing key is its route: its digits, highest first, then its home.

    5.0.0.12.0.7.tidemill.tasks.normal.default

The longest delay is 46 days. The receiver of a job with a longer delay sends the job through the
delay queues again.
"""

from __future__ import annotations

from typing import Any, Final

from tidemill.brokers.rabbitmq.layout import Place

UNIT = 0.01
"""Seconds of one unit. A delay is rounded up to whole units."""

DIGITS: Final = 32
LEVELS: Final = 6
_COARSE = 3600.0
"""Seconds. In a delay of at least this length the lowest digit is 0. The message passes one queue
less, and its delay is up to 0.32 s longer."""

_TOP = 11
"""The highest digit of the highest level: the longest delay stays below 2**32 milliseconds."""


def longest() -> float:
    """The longest delay of the delay queues, in seconds."""
    return UNIT * (int((_TOP + 1) * DIGITS ** (LEVELS - 1)) - 1)


def split(seconds: float) -> tuple[int, ...]:
    """The digits of a delay, highest first.

    The delay is rounded up. A delay above ``longest()`` is cut to ``longest()``.
    """
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
    """The names of the delay queues and their exchanges under a prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def route(self, digits: tuple[int, ...], home: str) -> tuple[str, str]:
        """(exchange, routing key) for a message that reaches ``home`` after this delay."""
        first = next(i for i, digit in enumerate(digits) if digit)
        return self.exchange(LEVELS - 1 - first), ".".join([*map(str, digits), home])

    def exchange(self, level: int) -> str:
        """The exchange of a level; below level 0, the exchange of the due jobs."""
        return f"{self._prefix}.delay.{level}" if level >= 0 else f"{self._prefix}.due"

    def waits(self, digits: tuple[int, ...]) -> list[tuple[Place, int, int]]:
        """The queues that a message passes, each with its level and digit."""
        levels = range(LEVELS - 1, -1, -1)
        return [
            (self._queue(level, digit), level, digit)
            for level, digit in zip(levels, digits, strict=True)
            if digit
        ]

    def all_waits(self) -> list[Place]:
        """All delay queues that can exist, longest waits first."""
        return [
            self._queue(level, digit)
            for level in range(LEVELS - 1, -1, -1)
            for digit in range(_TOP if level == LEVELS - 1 else DIGITS - 1, 0, -1)
        ]

    def _queue(self, level: int, digit: int) -> Place:
        milliseconds = round(digit * _seconds(level) * 1000)
        arguments: dict[str, Any] = {
            "x-queue-type": "quorum",
            "x-message-ttl": milliseconds,
            "x-dead-letter-exchange": self.exchange(level - 1),
            # A message stays in its queue until the next queue has stored it. Only quorum queues do
            # this.
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
        return Place(f"{self._prefix}.delay.{level}.{digit}", arguments)

    @staticmethod
    def binding(level: int, digit: int) -> str:
        """The binding pattern of the messages that have this digit at this level."""
        return ".".join([*["*"] * (LEVELS - 1 - level), str(digit), "#"])

    @staticmethod
    def arrival(home: str) -> str:
        """The binding pattern of the due messages for a place."""
        return ".".join([*["*"] * LEVELS, home])


def _seconds(level: int) -> float:
    """Seconds of the digit 1 at a level."""
    return float(DIGITS**level * UNIT)
