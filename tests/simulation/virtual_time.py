"""Virtual time: what happens when, and who waits for it.

The supervisor under test and the test are two greenlets. The supervisor runs until it waits. Then
time jumps to the next event, or to the moment at which the test wants to look. So a test has one
thread, waits for nothing, and runs the same way each time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import select
from collections.abc import Callable, Iterable, Sequence

import greenlet

from tidemill.core.clock import clock

MOST_AT_ONCE = 10_000
"""The most events at one moment. A worker that never sleeps would make the test endless."""


class Ended(BaseException):
    """Unwinds a supervisor whose process is dead: it must do nothing more."""


class VirtualTime:
    """The clock of a simulation, and its events in their order."""

    def __init__(self) -> None:
        self.machine = 1000.0
        self.since_1970 = 1_800_000_000.0 - self.machine
        self.looks: list[Callable[[], tuple[float, Callable[[], None]]]] = []
        self.fakes: Callable[[Sequence[int]], list[int]] = lambda fds: []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._test = greenlet.getcurrent()
        self._horizon = self.machine
        self._wanted: Callable[[], object] | None = None
        self._at_once = 0
        self.over = False  # True when the simulation unwinds its workers
        self._before = clock.wall, clock.machine
        clock.wall, clock.machine = self.wall, lambda: self.machine

    def wall(self) -> float:
        """Seconds since 1970."""
        return self.machine + self.since_1970

    def close(self) -> None:
        """Give the process its own clock back."""
        clock.wall, clock.machine = self._before

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Have something happen at a machine time."""
        heapq.heappush(self._events, (moment, next(self._number), act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Have something happen in some seconds."""
        self.at(self.machine + seconds, act)

    # -- called by the test ---------------------------------------------------------------------

    def run(
        self,
        supervisor: greenlet.greenlet | None,
        seconds: float,
        wanted: Callable[[], object] | None = None,
    ) -> None:
        """Let the worker run for some seconds, or until ``wanted()`` is true; None has ended."""
        self._horizon, self._wanted = self.machine + seconds, wanted
        self._test = greenlet.getcurrent()
        if wanted is not None and wanted():
            return
        if supervisor is None:
            self._pass_without_worker()
        else:
            supervisor.switch()

    def _pass_without_worker(self) -> None:
        """Let the events of the time happen although the supervisor has ended."""
        while self._events and self._events[0][0] <= self._horizon:
            self.machine, _, act = heapq.heappop(self._events)
            act()
        self.machine = max(self.machine, self._horizon)

    # -- called by the worker -------------------------------------------------------------------

    def sleep(
        self, timeout: float, ready: Callable[[], list[int]] = list, *, watched: bool = True
    ) -> list[int]:
        """Let time pass until ``ready()`` is not empty or the timeout is over.

        With ``watched`` the watchdog looks meanwhile, as it does in a thread of its own.
        """
        until = self.machine + max(0.0, timeout)
        while True:
            if self.over:
                raise Ended
            if found := ready():
                return found
            if self.machine >= until:
                return []
            self._pass(until, watched)

    def poll(self, fds: Sequence[int], timeout: float) -> list[int]:
        """Sleep until a descriptor is readable, as ``select.poll`` does."""
        return self.sleep(timeout, lambda: readable(fds) + self.fakes(fds))

    def leave(self) -> None:
        """The process of the worker is gone: give control to the test for ever."""
        while not self.over:
            self._test.switch()
        raise Ended

    def _pass(self, until: float, watched: bool) -> None:
        """Jump to the next event, the next look of the watchdog, or ``until``."""
        looks = [look() for look in self.looks] if watched else []
        at, look = min(looks, key=lambda each: each[0], default=(math.inf, None))
        event = self._events[0][0] if self._events else math.inf
        moment = max(self.machine, min(until, at, event))
        if moment > self._horizon:
            self.machine = self._horizon
            self._test.switch()
            return
        self._at_once = self._at_once + 1 if moment == self.machine else 0
        if self._at_once > MOST_AT_ONCE:
            raise AssertionError(f"the worker never sleeps at {self.machine:.3f}")
        self.machine = moment
        if event <= moment:
            heapq.heappop(self._events)[2]()
        elif look is not None and at <= moment:
            look()
        if self._wanted is not None and self._wanted():
            self._test.switch()


def readable(fds: Iterable[int]) -> list[int]:
    """The real descriptors that are readable now."""
    real: Sequence[int] = [fd for fd in fds if fd < FAKE]
    return list(select.select(real, [], [], 0)[0]) if real else []


FAKE = 1_000_000
"""Descriptors from here on belong to simulated processes."""
