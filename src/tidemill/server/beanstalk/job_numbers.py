"""Numbers of jobs: ids of beanstalkd are unsigned 64-bit integers, ids of tidemill are texts.

A job that is put with number 17 has the id ``#000000000017``. When a job with this id exists
already, the number is skipped. A job of another producer gets a number when a client of the port
first sees the job. This process remembers the number for a while.
"""

from __future__ import annotations

import asyncio
import collections
import re
from collections.abc import Awaitable, Callable

BLOCK = 1000
"""Numbers taken from the store at once."""

FOREIGN = 100_000
"""The most jobs of other producers whose numbers stay in memory: the jobs seen last."""

_OWN = re.compile(r"#([0-9]{12}|[1-9][0-9]{12,19})")


def id_of(number: int) -> str:
    """The id of a job that is put with a number. Ids sort like their numbers."""
    return f"#{number:012d}"


def number_of(job_id: str) -> int | None:
    """The number in an id that :func:`id_of` made; None for any other id."""
    found = _OWN.fullmatch(job_id)
    number = int(found[1]) if found else 2**64
    return number if number < 2**64 else None


class JobNumbers:
    """The numbers of one port. ``reserve`` takes numbers from the store and returns the first."""

    def __init__(self, reserve: Callable[[int], Awaitable[int]]) -> None:
        self._reserve = reserve
        self._lock = asyncio.Lock()
        self._block = iter(range(0))
        self._ids: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._numbers: dict[str, int] = {}

    async def draw(self) -> int:
        """A new number."""
        async with self._lock:
            number = next(self._block, None)
            if number is None:
                number = await self._reserve(BLOCK)
                self._block = iter(range(number + 1, number + BLOCK))
            return number

    async def skip(self, count: int) -> None:
        """Skip ``count`` numbers, since other jobs have them already."""
        async with self._lock:
            await self._reserve(count)
            self._block = iter(range(0))

    def id_of(self, number: int) -> str:
        """The id of the job with a number."""
        return self._ids.get(number) or id_of(number)

    async def of(self, job_id: str) -> int:
        """The number of a job. A job without a number gets a new number."""
        number = number_of(job_id)
        if number is not None:
            return number
        number = self._numbers.get(job_id)
        if number is None:
            number = await self.draw()
            if job_id in self._numbers:  # another client saw the job meanwhile
                return self._numbers[job_id]
            self._numbers[job_id] = number
            if len(self._numbers) > FOREIGN:
                _, oldest = self._ids.popitem(last=False)
                del self._numbers[oldest]
        self._ids[number] = job_id
        self._ids.move_to_end(number)
        return number
