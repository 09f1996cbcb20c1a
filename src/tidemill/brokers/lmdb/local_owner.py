"""One owner of this process in the store, and its sleep."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.contract.parked_waits import Until
from tidemill.brokers.lmdb.wakeup import Sleeper, WakeUps
from tidemill.core.job import Owner

__all__ = ["LocalOwner"]

_Ended = tuple[list[int], bool]


class LocalOwner:
    """An owner of this process: its number, and its place to sleep."""

    __slots__ = (
        *("asked", "wakeups", "epoch", "last_queue", "near", "number", "owner", "sleeper"),
        *("told", "watched", "watched_fds"),
    )

    def __init__(self, owner: Owner, number: int, wakeups: WakeUps, sleeper: Sleeper) -> None:
        self.owner = owner
        self.number = number
        self.wakeups = wakeups
        self.sleeper = sleeper
        self.asked: Want | None = None  # the want that the owner left when it went to sleep
        self.told = 0  # the highest token that the owner may know
        self.epoch: object = None  # the state of the list when the owner chose its neighbours
        self.watched: list[int] = []
        self.watched_fds: list[int] = []
        self.last_queue = 0  # the last queue that a fair want took from
        self.near = False  # its caller is in this process, so steps need no serials

    def parked(self, timeout: float, fds: Sequence[int]) -> Generator[Until, list[int], _Ended]:
        """Wait for a hint, a wake, a death, a readable descriptor or the timeout.

        Returns the readable descriptors, and True when a watched owner has died.
        """
        if self.owner.lease:
            timeout = min(timeout, self.owner.lease / 3)
        self.wakeups.set_waiting(self.sleeper, True)
        try:
            ready = yield Until(timeout, [self.sleeper.fd, *self.watched_fds, *fds])
        finally:
            self.wakeups.set_waiting(self.sleeper, False)
        if self.sleeper.fd in ready:
            self.sleeper.drain()
        died = not set(ready).isdisjoint(self.watched_fds)
        return [fd for fd in ready if fd in fds], died

    def wake(self) -> None:
        """End the sleep of the owner, from any thread."""
        self.sleeper.wake()

    def end_wait(self) -> None:
        """End all waits of the owner, before its place to sleep is given up."""
        self.sleeper.asleep.end(self.sleeper.wake)
