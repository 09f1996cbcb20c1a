"""Ends of waits, many of them at the same moment.

Of thousands of long polls one ends every few milliseconds. To wake up for each costs several times
what it takes to answer it, since by then nothing that this needs is in the processor's caches. So a
wait lasts up to a hundredth longer than was asked, and never more than half a second, until a round
moment at which others end, too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Deadlines", "round_moment"]

T = TypeVar("T")

SHARE, MOST = 100, 0.5
"""By such a part of its length a wait may last longer, and by so many seconds at most."""

SHORTEST = 0.001
"""Seconds that a wait has at least, as far as that is concerned."""


def round_moment(now: float, seconds: float) -> float:
    """When a wait ends that begins now: a multiple of the largest power of two that will do."""
    _, exponent = math.frexp(min(MOST, max(seconds, SHORTEST) / SHARE))
    step = math.ldexp(0.5, exponent)
    return math.ceil((now + seconds) / step) * step


class Deadlines(Generic[T]):
    """Who is to be told that a time is over; used in one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tell: Callable[[T], object]) -> None:
        self._loop = loop
        self._tell = tell
        self._ends: dict[float, dict[T, None]] = {}

    def begin(self, who: T, seconds: float, latest: float = math.inf) -> float:
        """Tell them in so many seconds, or a little later; the moment, by which it is ended.

        It is never later than in ``latest`` seconds.
        """
        now = self._loop.time()
        moment = min(round_moment(now, seconds), now + latest)
        ends = self._ends.get(moment)
        if ends is None:
            ends = self._ends[moment] = {}
            self._loop.call_at(moment, self._over, moment)
        ends[who] = None
        return moment

    def end(self, who: T, moment: float) -> None:
        """They need not be told; nothing happens when they were."""
        self._ends.get(moment, {}).pop(who, None)

    def _over(self, moment: float) -> None:
        for who in self._ends.pop(moment):
            self._tell(who)
