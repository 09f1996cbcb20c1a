"""The tasks of the rig: each misdeed, and the jobs that run beside misdeeds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from abuse.catalogue import Misdeed, catalogue
from abuse.counters import Counters
from tidemill import Tidemill, this_job

LONGEST = 40.0
"""Seconds a long job waits for its release at most."""

TOGETHER = 30.0
"""Seconds a job waits at most for the jobs that are to run beside it."""


class _Jobs:
    """The jobs of one rig; each knows the number of its row."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters

    def _begin(self, index: int) -> None:
        self.counters.begin(index, this_job().attempt)

    def short(self, index: int) -> None:
        """End at once."""
        self._begin(index)
        self.counters.end(index)

    async def async_short(self, index: int) -> None:
        """End at once."""
        self.short(index)

    def long(self, index: int) -> None:
        """Run until the rig releases it."""
        self._begin(index)
        self.counters.until(lambda: self.counters.released, LONGEST, time.sleep)
        self.counters.end(index)

    async def async_long(self, index: int) -> None:
        """Run until the rig releases it."""
        self._begin(index)
        for _ in range(int(LONGEST / 0.02)):
            if self.counters.released:
                break
            await asyncio.sleep(0.02)
        self.counters.end(index)

    def together(self, index: int, first: int, last: int) -> None:
        """Wait until all of a row of jobs run at a time."""
        self._begin(index)
        others = range(first, last)
        if not self.counters.until(lambda: self.counters.together(others), TOGETHER, time.sleep):
            raise AssertionError("not all of them ran at a time")
        self.counters.end(index)

    async def async_together(self, index: int, first: int, last: int) -> None:
        """Wait until all of a row of jobs run at a time."""
        self._begin(index)
        for _ in range(int(TOGETHER / 0.01)):
            if self.counters.together(range(first, last)):
                return self.counters.end(index)
            await asyncio.sleep(0.01)
        raise AssertionError("not all of them ran at a time")

    def overdue(self, index: int) -> None:
        """Run past a timeout that can interrupt it."""
        self._begin(index)
        for _ in range(1000):
            time.sleep(0.01)

    async def async_overdue(self, index: int) -> None:
        """Run past a timeout that can interrupt it."""
        self._begin(index)
        await asyncio.sleep(10)


def _misdeeds(mill: Tidemill, entry: Misdeed, counters: Counters) -> None:
    def does(index: int) -> Any:
        counters.begin(index, this_job().attempt)
        result = entry.function()
        counters.end(index)
        return result

    async def async_does(index: int) -> Any:
        counters.begin(index, this_job().attempt)
        result = entry.function()
        if entry.is_async:
            result = await result
        counters.end(index)
        return result

    mill.task(name=f"{entry.name}.async", timeout=entry.timeout, retries=0)(async_does)
    if not entry.is_async:
        mill.task(name=f"{entry.name}.sync", timeout=entry.timeout, retries=0)(does)


def declare(url: str, counters: Counters) -> Tidemill:
    """An app on that store with all tasks."""
    mill = Tidemill(url)
    jobs = _Jobs(counters)
    for name in ("short", "long", "together", "overdue"):
        timeout = 0.5 if name == "overdue" else None
        plain: Callable[..., Any] = getattr(jobs, name)
        mill.task(name=f"{name}.sync", timeout=timeout)(_function(plain))
        mill.task(name=f"{name}.async", timeout=timeout)(_coroutine(getattr(jobs, f"async_{name}")))
    for entry in catalogue().values():
        _misdeeds(mill, entry, counters)
    return mill


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: int) -> Any:
        return method(*args)

    return function


def _coroutine(method: Callable[..., Any]) -> Callable[..., Any]:
    async def function(*args: int) -> Any:
        return await method(*args)

    return function
