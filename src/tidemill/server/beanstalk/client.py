"""The state of one client: the tube that it uses, its watched tubes, and its reservations."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tidemill.server.beanstalk.tubes import Tube, Tubes
from tidemill.server.waiters import PendingCommit

MARGIN = 1.0
"""In the last ``MARGIN`` seconds of a ttr, a client gets DEADLINE_SOON."""

_NEVER = float("inf")


class Reservation(msgspec.Struct, gc=False):
    """A job that a client has reserved.

    ``hands_on`` is the id of a task whose result other jobs wait for, else empty.
    ``deadline`` is monotonic time; infinity for a job with ttr 0, which is already acknowledged.
    """

    number: int
    tube: str
    token: int
    ttr: float
    leased: float
    deadline: float
    commit: PendingCommit | None = None
    hands_on: str = ""


class Client:
    """The state of one connection.

    ``interrupt`` ends a wait, so that the client asks for a job again; ``hang_up`` closes the
    connection at once.
    """

    def __init__(
        self, tubes: Tubes, timed_out: Callable[[Reservation], None], hang_up: Callable[[], None]
    ) -> None:
        self._tubes = tubes
        self._timed_out = timed_out
        self.hang_up = hang_up
        self.use = tubes["default"]
        self.watch: dict[str, Tube] = {"default": self.use}
        self.use.using += 1
        self.use.watching += 1
        self.reservations: dict[int, Reservation] = {}
        self._first: float | None = None  # the earliest deadline; None: unknown
        self.produces = self.works = False
        self.waiting = False
        self.has_ended = False  # the client sends nothing more
        self.has_left = False  # the connection is closed
        self.interrupt: Callable[[], None] = _nothing

    def close(self) -> list[Reservation]:
        """Leave all tubes; return the reservations that are left."""
        self.use.using -= 1
        for tube in self.watch.values():
            tube.watching -= 1
        self.watch = {}
        return list(self.reservations.values())

    # -- tubes ------------------------------------------------------------------------------------

    def use_tube(self, name: str) -> None:
        """Use a tube for puts and peeks."""
        self.use.using -= 1
        self.use = self._tubes[name]
        self.use.using += 1

    def watch_tube(self, name: str) -> None:
        """Add a tube to the watched tubes."""
        if name not in self.watch:
            tube = self.watch[name] = self._tubes[name]
            tube.watching += 1

    def ignore_tube(self, name: str) -> bool:
        """Stop watching a tube; False when it is the only watched tube."""
        if name in self.watch:
            if len(self.watch) == 1:
                return False
            self.watch.pop(name).watching -= 1
        return True

    def wait(self, waiting: bool) -> None:
        """Set whether the client waits for a job."""
        if waiting != self.waiting:
            self.waiting = waiting
            for tube in self.watch.values():
                tube.waiting += 1 if waiting else -1

    # -- jobs -------------------------------------------------------------------------------------

    def keep(self, reservation: Reservation) -> None:
        """Add a reservation, or update its deadline."""
        self.reservations[reservation.number] = reservation
        self._first = None

    def reservation(self, number: int) -> Reservation | None:
        """The client's reservation of a job; None when there is none, or its ttr is over."""
        reservation = self.reservations.get(number)
        if reservation is not None and reservation.deadline <= time.monotonic():
            self.end_late()
            return None
        return reservation

    def drop(self, reservation: Reservation) -> None:
        """Remove a reservation."""
        if (
            self.reservations.pop(reservation.number, None) is not None
            and reservation.deadline == self._first
        ):
            self._first = None

    def end_late(self) -> None:
        """Remove reservations whose ttr is over: the store gives their jobs to other clients."""
        now = time.monotonic()
        if self._earliest() > now:
            return
        for reservation in [
            reservation for reservation in self.reservations.values() if reservation.deadline <= now
        ]:
            self.drop(reservation)
            self._timed_out(reservation)

    def soonest(self) -> float:
        """The time at which the client must get DEADLINE_SOON; infinity for never."""
        self.end_late()
        return self._earliest() - MARGIN

    def _earliest(self) -> float:
        if self._first is None:
            self._first = min(
                (reservation.deadline for reservation in self.reservations.values()), default=_NEVER
            )
        return self._first


def _nothing() -> None: ...
