"""An event for threads and event loops: the worker is about to stop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable

from tidemill.core.locks import Event, Lock


class Stopping:
    """Set once, when the worker is asked to stop."""

    def __init__(self) -> None:
        self._event = Event()
        self._lock = Lock()
        self._wakers: dict[int, Callable[[], object]] = {}

    def set(self) -> None:
        """Wake all waiting threads and tasks."""
        with self._lock:
            self._event.set()
            wakers = list(self._wakers.values())
        for wake in wakers:
            with contextlib.suppress(RuntimeError):  # raised when the event loop is closed
                wake()

    def is_set(self) -> bool:
        """True once the event is set."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the event is set or the time is over; True when it is set."""
        return self._event.wait(timeout)

    async def await_set(self, timeout: float | None = None) -> bool:
        """Wait as ``wait`` does, without blocking the event loop."""
        woken = asyncio.Event()
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._event.is_set():
                return True
            self._wakers[id(woken)] = functools.partial(loop.call_soon_threadsafe, woken.set)
        try:
            await asyncio.wait_for(woken.wait(), timeout)
        except TimeoutError:
            pass
        finally:
            with self._lock:
                del self._wakers[id(woken)]
        return self._event.is_set()


NEVER = Stopping()
"""The event of jobs that run outside a worker."""
