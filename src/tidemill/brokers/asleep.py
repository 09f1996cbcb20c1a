"""Who is in the wait of an owner: its place to sleep is closed once all of them have left.

An owner elsewhere is given up, or leaves, while a thread of its server sleeps for it. Closed under
that, a descriptor would be another's a moment later, and the thread would sleep on that one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from tidemill.deferral import Deferred
from tidemill.locks import Condition

__all__ = ["Asleep"]

_PATIENCE, _AGAIN = 5.0, 0.1
"""Seconds that all have to leave in, and until who has not is woken once more."""


class Asleep:
    """The threads in one owner's wait."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._many = 0
        self._over = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[bool]:
        """Be in the wait; False when it is over: there is no place to sleep any more.

        Signal handlers are put off inside, but for what the caller does as ``Waiting``.
        """
        with Deferred():
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
        """Let nobody in any more, unless somebody is there."""
        with self._changed:
            self._over = self._over or not self._many
            return self._over and not self._many

    def end(self, wake: Callable[[], None]) -> None:
        """Let nobody in any more, and have all leave; ``wake`` ends their sleep.

        Not for ever: who closes may have interrupted the sleeper, and be above it on the stack.
        """
        until = time.monotonic() + _PATIENCE
        with self._changed:
            self._over = True
            while self._many and time.monotonic() < until:
                wake()
                self._changed.wait(_AGAIN)
