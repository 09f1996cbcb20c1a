"""Count the threads in the wait of an owner, and close its descriptor once all have left.

A remote owner may leave or be given up while a thread of its server sleeps for it. If its
descriptor were closed then, the number could belong to another file a moment later, and the thread
would sleep on that file.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from tidemill.core.locks import Condition
from tidemill.core.signals import SignalsDeferred

__all__ = ["Asleep"]

_PATIENCE, _AGAIN = 5.0, 0.1
"""Seconds for all threads to leave, and seconds between wake-ups of the others."""


class Asleep:
    """The threads in one owner's wait."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._many = 0
        self._over = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[bool]:
        """Enter the wait; False when the wait is over and its descriptor closed.

        Signal handlers are deferred inside, except in an ``InterruptibleWait`` of the caller.
        """
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
        """Close the wait if no thread is in it; True if that happened."""
        with self._changed:
            self._over = self._over or not self._many
            return self._over and not self._many

    def end(self, wake: Callable[[], None]) -> None:
        """Close the wait, and wait for its threads to leave; ``wake`` ends their sleep.

        The wait is bounded: the closing code may be a signal handler above the sleeper's frame.
        """
        until = time.monotonic() + _PATIENCE
        with self._changed:
            self._over = True
            while self._many and time.monotonic() < until:
                wake()
                self._changed.wait(_AGAIN)
