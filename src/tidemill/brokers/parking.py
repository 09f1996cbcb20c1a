"""An owner's wait as a generator, so that a few threads can see to the waits of thousands.

The generator yields what the owner sleeps on, and is sent the descriptors that are ready, none when
the time is over. It returns what ``Broker.wait`` returns. Between two steps it needs no thread; one
step may block, as any call of a broker. The steps may be made by different threads, unless one of
them is the main thread.
"""

from __future__ import annotations

import contextlib
import math
import select
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from tidemill.deferral import Waiting

__all__ = ["Parked", "Parking", "Until", "ready_of", "sleep"]

_LONG = 86400.0


class Until(NamedTuple):
    """What ends a sleep: a readable descriptor, the hang-up of a ``watched`` one, or the time."""

    seconds: float
    fds: Sequence[int]
    watched: Sequence[int] = ()


Parked = Generator[Until, list[int], list[int]]


@runtime_checkable
class Parking(Protocol):
    """A broker whose owners can wait so."""

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        """See :meth:`Broker.wait`."""
        ...


def ready_of(until: Until, seconds: float | None = None) -> list[int]:
    """Sleep, for so many seconds if they are given; the descriptors that are ready."""
    poll = select.poll()
    for fd in until.fds:
        poll.register(fd, select.POLLIN)
    for fd in until.watched:
        poll.register(fd, 0)  # it hangs up
    left = until.seconds if seconds is None else seconds
    millis = None if left > _LONG else max(0, math.ceil(left * 1000))
    with Waiting():
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
