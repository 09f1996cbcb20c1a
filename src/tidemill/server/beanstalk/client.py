"""What one client has: the tube it uses, those it watches, and the jobs it has reserved."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tidemill.server.asks import Pledge
from tidemill.server.beanstalk.tubes import Tube, Tubes

__all__ = ["MARGIN", "Client", "Hold"]

MARGIN = 1.0
"""Seconds before the end of a ttr from which on a client is told DEADLINE_SOON."""

_NEVER = float("inf")


class Hold(msgspec.Struct, gc=False):
    """A job that a client has reserved.

    ``deadline`` is monotonic time; infinity for a job with ttr 0, which is acknowledged already.
    """

    number: int
    tube: str
    token: int
    ttr: float
    leased: float
    deadline: float
    pledge: Pledge | None = None


class Client:
    """One connection's state.

    ``interrupt`` has it look again at what it waits for, ``hang_up`` ends the line at once.
    """

    def __init__(
        self, tubes: Tubes, timed_out: Callable[[Hold], None], hang_up: Callable[[], None]
    ) -> None:
        self._tubes = tubes
        self._timed_out = timed_out
        self.hang_up = hang_up
        self.use = tubes["default"]
        self.watch: dict[str, Tube] = {"default": self.use}
        self.use.using += 1
        self.use.watching += 1
        self.holds: dict[int, Hold] = {}
        self._first: float | None = None  # the earliest deadline of those; None: not known
        self.produces = self.works = False
        self.waiting = False
        self.has_ended = False  # it sends nothing more
        self.has_left = False  # its connection is closed: it is told nothing more
        self.interrupt: Callable[[], None] = _nothing

    def close(self) -> list[Hold]:
        """It has gone; what it held."""
        self.use.using -= 1
        for tube in self.watch.values():
            tube.watching -= 1
        self.watch = {}
        return list(self.holds.values())

    # -- tubes ------------------------------------------------------------------------------------

    def use_tube(self, name: str) -> None:
        """Put and look there from now on."""
        self.use.using -= 1
        self.use = self._tubes[name]
        self.use.using += 1

    def watch_tube(self, name: str) -> None:
        """Reserve from it, too."""
        if name not in self.watch:
            tube = self.watch[name] = self._tubes[name]
            tube.watching += 1

    def ignore_tube(self, name: str) -> bool:
        """Reserve from it no more; False when it is the only one."""
        if name in self.watch:
            if len(self.watch) == 1:
                return False
            self.watch.pop(name).watching -= 1
        return True

    def wait(self, waiting: bool) -> None:
        """Whether it waits for a job."""
        if waiting != self.waiting:
            self.waiting = waiting
            for tube in self.watch.values():
                tube.waiting += 1 if waiting else -1

    # -- jobs -------------------------------------------------------------------------------------

    def keep(self, hold: Hold) -> None:
        """It has reserved a job, or has more time for it."""
        self.holds[hold.number] = hold
        self._first = None

    def hold(self, number: int) -> Hold | None:
        """A job it has reserved, if its time is not over."""
        hold = self.holds.get(number)
        if hold is not None and hold.deadline <= time.monotonic():
            self.end_late()
            return None
        return hold

    def drop(self, hold: Hold) -> None:
        """It has the job no more."""
        if self.holds.pop(hold.number, None) is not None and hold.deadline == self._first:
            self._first = None

    def end_late(self) -> None:
        """Forget the jobs whose time is over: the store gives them to others."""
        now = time.monotonic()
        if self._earliest() > now:
            return
        for hold in [hold for hold in self.holds.values() if hold.deadline <= now]:
            self.drop(hold)
            self._timed_out(hold)

    def soonest(self) -> float:
        """When it has to be told that the time of a job is nearly over; infinity for never."""
        self.end_late()
        return self._earliest() - MARGIN

    def _earliest(self) -> float:
        if self._first is None:
            self._first = min((hold.deadline for hold in self.holds.values()), default=_NEVER)
        return self._first


def _nothing() -> None: ...
