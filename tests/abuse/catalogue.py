"""The catalogue: every misdeed with the end that its job must have in each pool.

A misdeed is one small function. :func:`misdeed` adds it to the catalogue. A sync function runs in
all pools; in the asyncio pool it blocks the event loop. An async function runs there alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

THREADS, MAIN, ASYNCIO = POOLS = "threads", "main thread", "asyncio"


@dataclasses.dataclass(frozen=True)
class End:
    """How the misdeed's job ends: its state, its error, and what it costs its process.

    ``process`` is "kept", "replaced", or empty where both are right. ``dies`` says that the process
    dies by itself, so that the jobs which ran beside the misdeed use an attempt and run again.
    """

    state: str
    error: str = ""
    process: str = ""
    dies: bool = False
    interrupts: bool = False  # jobs beside the misdeed cannot finish: they go back uncounted


SUCCEEDS = End("succeeded")


def fails(error: str) -> End:
    """The job fails with this text in its error; the process lives on."""
    return End("failed", error, "kept")


def dies(error: str) -> End:
    """The process dies, and the job fails with this text in its error."""
    return End("failed", error, "replaced", dies=True)


def times_out() -> End:
    """The worker interrupts the job after its timeout; the process lives on."""
    return End("failed", "JobTimeout", "kept")


def blocks(*, gil: bool = False) -> End:
    """Nothing can interrupt the job after its timeout; its process is replaced.

    Nobody in the process can finish while the job holds the interpreter lock.
    """
    return End("failed", "JobTimeout", "replaced", interrupts=gil)


def breaks() -> End:
    """The process gives up: it runs the misdeed once more, alone, and then the job fails."""
    return End("failed", "gave up", "replaced", interrupts=True)


@dataclasses.dataclass(frozen=True)
class Misdeed:
    """A misdeed of the catalogue."""

    name: str
    title: str
    function: Callable[[], Any]
    ends: Mapping[str, End]  # by pool
    timeout: float | None = None
    probe: bool = False  # a timeout must still interrupt a later job

    @property
    def is_async(self) -> bool:
        """True when the misdeed is a coroutine function."""
        return inspect.iscoroutinefunction(self.function)


_catalogue: dict[str, Misdeed] = {}


def misdeed(
    title: str, end: End | Mapping[str, End] = SUCCEEDS, **options: Any
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a function to the catalogue. ``end`` holds for all pools, or names one for each."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        name = function.__name__
        pools = (ASYNCIO,) if inspect.iscoroutinefunction(function) else POOLS
        ends = dict.fromkeys(pools, end) if isinstance(end, End) else dict(end)
        assert name not in _catalogue, f"two misdeeds are called {name}"
        _catalogue[name] = Misdeed(name, title, function, ends, **options)
        return function

    return add


def catalogue() -> dict[str, Misdeed]:
    """All misdeeds by name, in their order."""
    importlib.import_module("abuse.misdeeds")
    return _catalogue
