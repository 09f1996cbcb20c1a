"""Count the threads in the wait of an owner, and close its descriptor when all have left.

A remote owner may leave or be given up while a thread of its server sleeps on the owner's
descriptor. If the descriptor were closed at once, another file could get its number, and the thread
would sleep on this file.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from tidemill.core.locks import Condition
from tidemill.core.signals import SignalsDeferred

_PATIENCE, _AGAIN = 5.0, 0.1
"""Seconds for all threads to leave, and seconds between wake-ups of threads that stay."""


class Asleep:
    """The threads in one owner's wait."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._many = 0
        self._over = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[bool]:
        """Enter the wait for a block; False when the wait is over and its descriptor is closed.

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
        """Close the wait if no thread is in it; return True then."""
        with self._changed:
            self._over = self._over or not self._many
            return self._over and not self._many

    def end(self, wake: Callable[[], None]) -> None:
        """Close the wait, and wait for its threads to leave; ``wake`` ends their sleep.

        It waits a few seconds at most: the caller may be a signal handler inside the sleep.
        """
        until = time.monotonic() + _PATIENCE
        with self._changed:
            self._over = True
            while self._many and time.monotonic() < until:
                wake()
                self._changed.wait(_AGAIN)
