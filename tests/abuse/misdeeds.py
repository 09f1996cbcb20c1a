"""The catalogue: every misdeed with the end that its job must have in each pool.

A misdeed is one small function. :func:`misdeed` adds it to the catalogue. A sync function runs in
all pools; in the asyncio pool it blocks the event loop. An async function runs there alone.
"""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import inspect
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time
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


CATALOGUE: dict[str, Misdeed] = {}
"""All misdeeds by name, in their order."""


def misdeed(
    title: str, end: End | Mapping[str, End] = SUCCEEDS, **options: Any
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a function to the catalogue. ``end`` holds for all pools, or names one for each."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        name = function.__name__
        pools = (ASYNCIO,) if inspect.iscoroutinefunction(function) else POOLS
        ends = dict.fromkeys(pools, end) if isinstance(end, End) else dict(end)
        assert name not in CATALOGUE, f"two misdeeds are called {name}"
        CATALOGUE[name] = Misdeed(name, title, function, ends, **options)
        return function

    return add


MEGABYTE = 1_000_000
_kept: list[Any] = []
_IN_MAIN_THREAD = {THREADS: fails("ValueError"), ASYNCIO: fails("ValueError"), MAIN: SUCCEEDS}

# -- forks, exits and signals --------------------------------------------------------------------


@misdeed("`os.fork()`, and the child returns from the task")
def fork_child_returns() -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)


def _square(number: int) -> int:
    return number * number


@misdeed("`multiprocessing.Pool` by fork")
def pool_by_fork() -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_square, range(5)) == [0, 1, 4, 9, 16]


@misdeed("`os.exec*` of a program that stays", dies("worker process"))
def exec_long() -> None:
    os.execv("/bin/sleep", ["sleep", "60"])


@misdeed("`sys.exit()`", fails("SystemExit"))
def exits() -> None:
    sys.exit()


@misdeed("`sys.exit()` in a thread of the task")
def exits_in_thread() -> None:
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()


async def _exit() -> None:
    sys.exit(3)


@misdeed("`sys.exit()` in a subtask", End("failed"))
async def subtask_exits() -> None:
    await asyncio.create_task(_exit())


@misdeed("`os._exit(3)`", dies("exited with code 3"))
def exits_at_once_with_code() -> None:
    os._exit(3)


def _alarmed(signum: int, frame: object) -> None:
    raise TimeoutError("the alarm of the task")


@misdeed(
    "`signal.alarm` whose handler raises in the task",
    {THREADS: fails("ValueError"), ASYNCIO: fails("ValueError"), MAIN: fails("TimeoutError")},
    probe=True,
)
def alarm_raises() -> None:
    signal.signal(signal.SIGALRM, _alarmed)
    signal.alarm(1)
    time.sleep(5)


@misdeed("`signal.setitimer` whose handler raises after the job", _IN_MAIN_THREAD, probe=True)
def timer_raises_later() -> None:
    signal.signal(signal.SIGALRM, _alarmed)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.02)


@misdeed("SIGPIPE to its own process")
def breaks_pipe() -> None:
    os.kill(os.getpid(), signal.SIGPIPE)


# -- limits, and calls that do not return --------------------------------------------------------


@misdeed("all descriptors used up and kept", End("failed", "Too many open files"))
def uses_up_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    while True:
        _kept.append(os.open("/dev/null", os.O_RDONLY))


@misdeed("a limit of memory (`RLIMIT_AS`) reached, and left in place", fails("MemoryError"))
def reaches_memory_limit() -> None:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 50 * MEGABYTE, resource.RLIM_INFINITY))
    bytearray(100 * MEGABYTE)


@misdeed(
    "`time.sleep` past the timeout",
    {THREADS: blocks(), MAIN: times_out(), ASYNCIO: blocks(gil=True)},
    timeout=1,
)
def sleeps() -> None:
    time.sleep(60)


@misdeed("a regular expression that backtracks for ever", blocks(gil=True), timeout=1)
def backtracks() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


# -- exceptions and loggers of the app -----------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit("in __str__")

    __repr__ = __str__


@misdeed("an exception whose `__str__` and `__repr__` raise", fails("Unprintable"))
def unprintable() -> None:
    raise Unprintable


class _Handler(logging.Handler):
    def handle(self, record: Any) -> Any:
        raise SystemExit("in a log handler")


@misdeed("a log handler that raises", fails("ValueError"))
def handler_raises() -> None:
    logging.getLogger("tidemill.worker").addHandler(_Handler())
    raise ValueError("so that the worker logs a line")


# -- a broken interpreter ------------------------------------------------------------------------


@misdeed("`os.closerange(3, 256)`", breaks())
def closes_all() -> None:
    os.closerange(3, 256)


def _replaced(*args: Any, **options: Any) -> Any:
    raise SystemError("a function that the task has replaced")


@misdeed("`builtins.len` and `isinstance` raise", breaks())
def builtins_raise() -> None:
    for name in ("len", "isinstance"):
        setattr(builtins, name, _replaced)
