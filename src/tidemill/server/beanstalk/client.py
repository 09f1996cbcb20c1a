"""The tubes of a port, and the state of one client: its tubes and its reservations.

A tube exists while a client of the port uses or watches it, or while the store has jobs in it.
A pause applies to the clients of this port, and ends when the port closes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tidemill.server.waiters import PendingCommit

MARGIN = 1.0
"""In the last ``MARGIN`` seconds of a ttr, a client gets DEADLINE_SOON."""

KEPT = 10_000
"""The number of tubes above which unused tubes and their counters are forgotten."""

_NEVER = float("inf")


class Tube:
    """One tube. Times are monotonic."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.using = self.watching = self.waiting = 0
        self.deletes = self.pauses = 0
        self.paused_for = 0
        self.paused_until = 0.0

    @property
    def is_in_use(self) -> bool:
        """Whether a client uses or watches the tube."""
        return bool(self.using or self.watching)

    def pause_left(self) -> float:
        """Seconds until the end of the pause."""
        if not self.paused_for:
            return 0.0
        left = self.paused_until - time.monotonic()
        if left <= 0:
            self.paused_for = 0
        return max(0.0, left)


class Tubes:
    """All tubes of a port, by name."""

    def __init__(self) -> None:
        self._tubes: dict[str, Tube] = {"default": Tube("default")}  # in order of creation
        self._most = KEPT

    def __getitem__(self, name: str) -> Tube:
        tube = self._tubes.get(name)
        if tube is None:
            if len(self._tubes) > self._most:
                self._forget()
            tube = self._tubes[name] = Tube(name)
        return tube

    def _forget(self) -> None:
        """Forget unused tubes. The next call comes when there are twice as many tubes as now."""
        idle = [n for n, t in self._tubes.items() if not t.is_in_use and not t.pause_left()]
        for name in idle:
            if name != "default":
                del self._tubes[name]
        self._most = max(KEPT, 2 * len(self._tubes))

    def places(self) -> dict[str, int]:
        """The tubes by name, numbered in order of creation."""
        return {name: place for place, name in enumerate(self._tubes)}

    def is_in_use(self, name: str) -> bool:
        """Whether a tube exists even without jobs in the store."""
        tube = self._tubes.get(name)
        return name == "default" or (tube is not None and tube.is_in_use)

    def in_use(self) -> list[str]:
        """The tubes that exist even without jobs in the store."""
        return [name for name in self._tubes if self.is_in_use(name)]


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
