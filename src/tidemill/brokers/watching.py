"""Watching many jobs in one thread: which of them have ended, until somebody rings.

``Broker.wait_for`` needs a thread for each caller. A server with thousands of callers watches the
jobs of many in one thread, and rings when another job comes to be watched.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

__all__ = ["Alarm", "Ends", "Watched"]


_numbers = itertools.count(1)


class Alarm:
    """Ends a watch from another thread. The descriptor ``fd`` is readable once it rings.

    A watch that cannot sleep on a descriptor sets ``tell``, which is called when it rings. The
    ``number`` tells the alarm from all others of this process.
    """

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        for fd in (self.fd, self._write):
            os.set_blocking(fd, False)
        self.number = next(_numbers)
        self.rings = False
        self.tell: Callable[[], None] = _nobody

    def ring(self) -> None:
        """End the watch under way, or else the next one at its begin."""
        if self.rings:
            return
        self.rings = True
        with contextlib.suppress(BlockingIOError):  # it is full of rings already
            os.write(self._write, b"x")
        self.tell()

    def clear(self) -> None:
        """Ring no more."""
        self.rings = False
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Give up the descriptors."""
        os.close(self.fd)
        os.close(self._write)


def _nobody() -> None: ...


class Ends(Protocol):
    """Where a store tells that jobs have ended."""

    def ended(self, ids: Sequence[str], timeout: float, alarm: Alarm) -> list[bool]:
        """Sleep until a job has ended, the alarm rings or the time is over; for each, if it has.

        A job that is not there has ended.
        """
        ...


@runtime_checkable
class Watched(Protocol):
    """A broker whose jobs can be watched so."""

    waits: Ends
