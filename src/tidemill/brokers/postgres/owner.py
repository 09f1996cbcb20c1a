"""An owner attached in this process: its number, its repeated calls, its sleep."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Sequence

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.parked_waits import Until
from tidemill.brokers.network.repeated_calls import RepeatedCalls
from tidemill.brokers.postgres.handoff import HandOff
from tidemill.brokers.shared.wait_places import Asleep
from tidemill.core.locks import LongLock
from tidemill.core.owner import Owner
from tidemill.core.wake_pipe import WakePipe

_Ended = tuple[list[int], bool]


class AttachedOwner:
    """An owner attached in this process; ``send`` sends its steps to the store."""

    def __init__(
        self, send: Callable[[AttachedOwner, Step, int], Reply], owner: Owner, number: int
    ) -> None:
        self.owner = owner
        self.number = number
        self._send = functools.partial(send, self)
        self._calls = RepeatedCalls(self._send)
        self._alone = LongLock()
        self.hand_off = HandOff()
        self.renewed = time.monotonic()
        self.partial = False  # True when the last step took some jobs, but fewer than wanted
        self.near = False  # its caller is in this process, so steps need no serials
        self.hears = False  # this process gets the notifications of a remote owner
        self.asleep = Asleep()
        self._turn = 0
        self.seen = -1  # the number of changes of the list when the owner chose its neighbours
        self.watched: list[int] = []
        self.watched_fds: list[int] = []
        self._pipe = WakePipe()

    def exchange(self, step: Step) -> Reply:
        """Make one step. A caller with serials may repeat a step while the first call runs."""
        if step.behalf:
            return self._send(step, 0)
        if not step.serial:
            self.near = True
            return self._calls.exchange(step)
        with self._alone:
            return self._send(step, step.serial)

    def goes_on(self, owner: Owner) -> None:
        """Go on after the owner attached again."""
        self.owner, self._turn = owner, 0

    def turned(self, turn: int) -> None:
        """Store the turn of an answered step. Turns count the owner's steps in all processes."""
        if self._turn and turn != self._turn + 1:  # another process has made a step
            self.hears = False
        self._turn = turn

    def parked(self, timeout: float, fds: Sequence[int]) -> Generator[Until, list[int], _Ended]:
        """Wait for a hint, a wake, a death, a readable descriptor or the timeout.

        Return the readable descriptors, and True when a watched owner has died.
        """
        ready = set((yield Until(timeout, [self._pipe.fd, *fds], self.watched_fds)))
        if self._pipe.fd in ready:
            self._pipe.drain()
        return [fd for fd in fds if fd in ready], not ready.isdisjoint(self.watched_fds)

    def wake(self) -> None:
        """End the owner's sleep, from any thread."""
        self._pipe.wake()

    def close(self) -> None:
        """End the owner's sleep, and close its pipe."""
        self.asleep.end(self.wake)
        self._pipe.close()

    def after_fork_child(self) -> None:
        """Close the pipe, in a forked child, where nobody sleeps."""
        self._pipe.after_fork_child()
