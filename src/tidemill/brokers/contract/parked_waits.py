"""The wait of an owner as a generator, so that a few threads can serve thousands of waits.

The generator yields the descriptors and the end of its sleep. It receives the ready descriptors, or
none when the time is over. At its end it returns the result of ``Broker.wait``. During a sleep the
wait needs no thread. A step of the generator may block, like any call of a broker. Several threads
may take turns at the steps, but then the main thread may take no step.
"""

from __future__ import annotations

import contextlib
import math
import select
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from tidemill.core.signals import InterruptibleWait

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
    """Wait in this thread."""
    with contextlib.closing(parked):
        try:
            until = next(parked)
            while True:
                until = parked.send(ready_of(until))
        except StopIteration as end:
            return list(end.value)
