"""The tasks of the app: each misdeed, and the jobs that run beside misdeeds.

A job notes that it begins by a folder of its name: that needs no descriptor, no memory and none of
the functions that a misdeed replaces.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from abuse.misdeeds import CATALOGUE, Misdeed
from tidemill import Tidemill, this_job

LONGEST = 100.0
"""Seconds that a job waits at most for what the test does."""


class Beside:
    """The jobs beside misdeeds: each begins, and waits until something is there."""

    def __init__(self, here: str) -> None:
        self.here = here

    def begin(self) -> None:
        for run in (1, 2, 3):
            try:
                os.mkdir(f"{self.here}/{this_job().id}.{run}")
                break
            except FileExistsError:
                continue

    def wait_for(self, *names: str) -> Iterator[None]:
        self.begin()
        until = time.time() + LONGEST
        while not all(os.path.exists(f"{self.here}/{name}") for name in names):
            assert time.time() < until
            yield

    def short(self) -> Iterator[None]:
        return self.wait_for()

    def long(self) -> Iterator[None]:
        return self.wait_for("go")

    def overdue(self) -> Iterator[None]:
        return self.wait_for("what never comes")

    def together(self, names: list[str]) -> Iterator[None]:
        return self.wait_for(*(f"{name}.1" for name in names))


def declare(mill: Tidemill, here: str) -> None:
    """All tasks; ``here`` is the folder of their notes."""
    beside = Beside(here)
    for wait in (beside.short, beside.long, beside.together, beside.overdue):
        _add_waiting(mill, wait)
    for entry in CATALOGUE.values():
        _add_misdeed(mill, entry, beside.begin)


def _add_waiting(mill: Tidemill, wait: Callable[..., Iterator[None]]) -> None:
    def sync(*args: Any) -> None:
        for _ in wait(*args):
            time.sleep(0.01)

    async def coroutine(*args: Any) -> None:
        for _ in wait(*args):
            await asyncio.sleep(0.01)

    overdue = wait.__name__ == "overdue"
    options: dict[str, Any] = {"timeout": 0.5, "retries": 0} if overdue else {}
    mill.task(name=f"{wait.__name__}.sync", **options)(sync)
    mill.task(name=f"{wait.__name__}.async", **options)(coroutine)


def _add_misdeed(mill: Tidemill, entry: Misdeed, begin: Callable[[], None]) -> None:
    def sync() -> Any:
        begin()
        return entry.function()

    async def coroutine() -> Any:
        begin()
        result = entry.function()
        return await result if entry.is_async else result

    mill.task(name=f"{entry.name}.async", timeout=entry.timeout, retries=0)(coroutine)
    if not entry.is_async:
        mill.task(name=f"{entry.name}.sync", timeout=entry.timeout, retries=0)(sync)
