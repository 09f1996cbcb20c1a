"""Watch many jobs in one thread, until a job ends or an alarm rings.

``JobWaits.wait_for`` needs a thread for each caller. A server with thousands of callers watches all
their jobs in one thread, and rings the alarm when another job is to be watched.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

_numbers = itertools.count(1)


class Alarm:
    """Ends a watch from another thread. The descriptor ``fd`` is readable when the alarm rings.

    A watch that cannot sleep on a descriptor sets ``tell``, which ``ring`` calls. ``number`` is
    unique in this process.
    """

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        for fd in (self.fd, self._write):
            os.set_blocking(fd, False)
        self.number = next(_numbers)
        self.rings = False
        self.tell: Callable[[], None] = lambda: None

    def ring(self) -> None:
        """End the current watch. Without a current watch, the next watch ends at once."""
        if self.rings:
            return
        self.rings = True
        with contextlib.suppress(BlockingIOError):  # the pipe is full already
            os.write(self._write, b"x")
        self.tell()

    def clear(self) -> None:
        self.rings = False
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write)


class Ends(Protocol):
    """The waits of a store that report ended jobs."""

    def ended(self, ids: Sequence[str], timeout: float, alarm: Alarm) -> list[bool]:
        """Sleep until a job ends, the alarm rings or the time is over; True for each ended job.

        A missing job counts as ended.
        """
        ...


@runtime_checkable
class Watched(Protocol):
    """A broker whose jobs can be watched."""

    waits: Ends
