"""Deadlines of waits, rounded so that many waits end at the same moment.

With thousands of long polls, one poll ends every few milliseconds. A wake-up for each poll costs
several times as much as its answer, since the processor's caches are cold. So each wait ends at a
round moment, and many waits have the same round moment. The wait lasts at most 1 % and at most half
a second longer than requested.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SHARE, MOST = 100, 0.5
"""A wait may last longer by 1/SHARE of its length, but by at most MOST seconds."""

SHORTEST = 0.001
"""Seconds. A shorter wait is rounded as if it lasted this long."""


def round_moment(now: float, seconds: float) -> float:
    """The rounded end of a wait that begins at ``now``: a multiple of a power of two."""
    _, exponent = math.frexp(min(MOST, max(seconds, SHORTEST) / SHARE))
    step = math.ldexp(0.5, exponent)
    return math.ceil((now + seconds) / step) * step


class Deadlines(Generic[T]):
    """Calls ``on_end`` for each item at its deadline. Used in one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[T], object]) -> None:
        self._loop = loop
        self._on_end = on_end
        self._ends: dict[float, dict[T, None]] = {}

    def begin(self, item: T, seconds: float, latest: float = math.inf) -> float:
        """Set a deadline in ``seconds``, or a little later, but within ``latest`` seconds.

        Returns the deadline, as :meth:`end` needs it.
        """
        now = self._loop.time()
        moment = min(round_moment(now, seconds), now + latest)
        ends = self._ends.get(moment)
        if ends is None:
            ends = self._ends[moment] = {}
            self._loop.call_at(moment, self._over, moment)
        ends[item] = None
        return moment

    def end(self, item: T, moment: float) -> None:
        """Remove a deadline; does nothing when it has passed."""
        self._ends.get(moment, {}).pop(item, None)

    def _over(self, moment: float) -> None:
        for item in self._ends.pop(moment):
            self._on_end(item)
