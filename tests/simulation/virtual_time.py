"""Virtual time: what happens when, and who waits for it.

Each thread of a supervisor is a greenlet, which runs until it sleeps. Then the next one runs. If
all sleep, time jumps to the next event, or to the moment at which the test wants to look. So a test
waits for nothing, and runs the same way each time. With ``chance`` the order of what happens at one
moment is random, and a supervisor may wake late.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import select
from collections.abc import Callable, Iterable, Sequence

import greenlet

from tidemill.core.clock import clock

MOST_AT_ONCE = 5_000
"""The most steps at one moment. A worker that never sleeps would make the test endless."""

LATEST = 0.3
"""Seconds by which a supervisor wakes late at most, with ``chance``."""


class Ended(greenlet.GreenletExit):
    """Unwinds a supervisor whose process is dead: it must do nothing more."""


class Sleeper:
    """A thread of a supervisor that sleeps."""

    def __init__(self, until: float, ready: Callable[[], object]) -> None:
        self.until, self.ready = until, ready
        self.not_before = 0.0


class VirtualTime:
    """The clock of a simulation, its events in their order, and those who sleep."""

    def __init__(self) -> None:
        self.machine = 1000.0
        self.since_1970 = 1_800_000_000.0 - self.machine
        self.chance: random.Random | None = None
        self.over = False  # True when the simulation unwinds its workers
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._hub = greenlet.getcurrent()
        self._sleepers: dict[greenlet.greenlet, Sleeper] = {}
        self._dead: set[greenlet.greenlet] = set()
        self._before = clock.wall, clock.machine
        clock.wall, clock.machine = self.wall, lambda: self.machine

    def wall(self) -> float:
        """Seconds since 1970."""
        return self.machine + self.since_1970

    def close(self) -> None:
        """Give the process its own clock back."""
        clock.wall, clock.machine = self._before

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Have something happen in some seconds."""
        order = self.chance.random() if self.chance else 0.0
        heapq.heappush(self._events, (self.machine + seconds, order, next(self._number), act))

    # -- called by the test ---------------------------------------------------------------------

    def begin(self, run: Callable[[], None]) -> greenlet.greenlet:
        """Have a thread run, as soon as time passes."""
        thread = greenlet.greenlet(run, self._hub)
        self._sleepers[thread] = Sleeper(self.machine, list)
        return thread

    def run(self, seconds: float, wanted: Callable[[], object] = list) -> None:
        """Let time pass: some seconds, or until ``wanted()`` is true."""
        horizon, at_once = self.machine + seconds, 0
        while not wanted():
            if not self._wake_one():
                moment = max(self.machine, self._next())
                if moment > horizon:
                    self.machine = horizon
                    return
                at_once = 0 if moment > self.machine else at_once
                self.machine = moment
                if self._events and self._events[0][0] <= moment:
                    heapq.heappop(self._events)[-1]()
            at_once += 1
            if at_once > MOST_AT_ONCE:
                raise AssertionError(f"the worker never sleeps at {self.machine:.3f}")

    def _next(self) -> float:
        times = [event[0] for event in self._events[:1]]
        for sleeper in self._sleepers.values():
            late = sleeper.not_before > self.machine
            times.append(sleeper.not_before if late else sleeper.until)
        return min(times, default=math.inf)

    def _wake_one(self) -> bool:
        """Let one supervisor run that has a reason to; False when all sleep on."""
        now = self.machine
        awake = [
            (supervisor, sleeper)
            for supervisor, sleeper in self._sleepers.items()
            if now >= sleeper.not_before and (now >= sleeper.until or sleeper.ready())
        ]
        if not awake:
            return False
        supervisor, sleeper = self.chance.choice(awake) if self.chance else awake[0]
        if self.chance and not sleeper.not_before and self.chance.random() < 0.3:
            sleeper.not_before = now + self.chance.random() * LATEST
            return True
        del self._sleepers[supervisor]
        supervisor.switch()
        return True

    def hold_up(self, supervisor: greenlet.greenlet, seconds: float) -> None:
        """Stop a supervisor for some seconds, as SIGSTOP does."""
        if supervisor in self._sleepers:
            self._sleepers[supervisor].not_before = self.machine + seconds

    def kill(self, supervisor: greenlet.greenlet) -> None:
        """Unwind a supervisor: from now on it calls nothing and sleeps no more."""
        self._dead.add(supervisor)
        self._sleepers.pop(supervisor, None)
        if supervisor:
            supervisor.throw(Ended)

    # -- called by a supervisor -----------------------------------------------------------------

    def sleep(self, timeout: float, ready: Callable[[], list[int]] = list) -> list[int]:
        """Let time pass until ``ready()`` is not empty or the timeout is over."""
        until = self.machine + max(0.0, timeout)
        while True:
            self.check()
            if found := ready():
                return found
            if self.machine >= until:
                return []
            self._sleepers[greenlet.getcurrent()] = Sleeper(until, ready)
            self._hub.switch()

    def check(self) -> None:
        """Raise ``Ended`` in a supervisor that is dead."""
        if self.over or greenlet.getcurrent() in self._dead:
            raise Ended

    def leave(self, threads: Iterable[greenlet.greenlet]) -> None:
        """The process of these threads, one of which calls this, is gone: none runs any more."""
        for thread in threads:
            self._dead.add(thread)
            self._sleepers.pop(thread, None)
        self._hub.switch()
        raise Ended


def readable(fds: Iterable[int]) -> list[int]:
    """The real descriptors that are readable now."""
    real: Sequence[int] = list(fds)
    return list(select.select(real, [], [], 0)[0]) if real else []
