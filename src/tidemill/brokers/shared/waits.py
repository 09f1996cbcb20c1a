"""Waits of owners: a wait as a generator, and the threads in the wait of one owner.

With generators, a few threads can serve thousands of waits. The generator yields the descriptors
and the end of its sleep. It receives the ready descriptors, or none when the time is over. At its
end it returns the result of ``Broker.wait``. During a sleep the wait needs no thread. A step of the
generator may block, like any call of a broker. Several threads may take turns at the steps, but
then the main thread may take no step.

A remote owner may leave or be given up while a thread of its server sleeps on the owner's
descriptor. If the descriptor were closed at once, another file could get its number, and the thread
would sleep on this file. So the descriptor is closed when all threads have left.
"""

from __future__ import annotations

import contextlib
import math
import select
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from tidemill.core.locks import Condition
from tidemill.core.signals import InterruptibleWait, SignalsDeferred

_LONG = 86400.0


class Until(NamedTuple):
    """The end of a sleep: readable ``fds``, a hang-up of ``watched`` descriptors, or the time."""

    seconds: float
    fds: Sequence[int]
    watched: Sequence[int] = ()


Parked = Generator[Until, list[int], list[int]]


@runtime_checkable
class Parking(Protocol):
    """A broker whose waits can run as generators."""

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        """The wait of :meth:`Broker.wait` as a generator."""
        ...


def ready_of(until: Until, seconds: float | None = None) -> list[int]:
    """Sleep, for ``seconds`` if given; return the ready descriptors."""
    poll = select.poll()
    for fd in until.fds:
        poll.register(fd, select.POLLIN)
    for fd in until.watched:
        poll.register(fd, 0)  # ``poll`` always reports a hang-up
    left = until.seconds if seconds is None else seconds
    millis = None if left > _LONG else max(0, math.ceil(left * 1000))
    with InterruptibleWait():
        return [fd for fd, _ in poll.poll(millis)]


def sleep(parked: Parked) -> list[int]:
    with contextlib.closing(parked):
        try:
            until = next(parked)
            while True:
                until = parked.send(ready_of(until))
        except StopIteration as end:
            return list(end.value)


_PATIENCE, _AGAIN = 5.0, 0.1  # seconds for all threads to leave, and between two wake-ups


class Asleep:
    """The threads in one owner's wait."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._many = 0
        self._over = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[bool]:
        """Enter the wait for a block; False when the wait is over and its descriptor is closed."""
        # Signal handlers are deferred inside, except in an ``InterruptibleWait`` of the caller.
        with SignalsDeferred():
            with self._changed:
                may = not self._over
                self._many += may
            try:
                yield may
            finally:
                with self._changed:
                    self._many -= may
                    self._changed.notify_all()

    def end_if_empty(self) -> bool:
        """Close the wait if no thread is in it; return True then."""
        with self._changed:
            self._over = self._over or not self._many
            return self._over and not self._many

    def end(self, wake: Callable[[], None]) -> None:
        """Close the wait, and wait for its threads to leave; ``wake`` ends their sleep."""
        # It waits a few seconds at most: the caller may be a signal handler inside the sleep.
        until = time.monotonic() + _PATIENCE
        with self._changed:
            self._over = True
            while self._many and time.monotonic() < until:
                wake()
                self._changed.wait(_AGAIN)
