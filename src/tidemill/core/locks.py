"""Locks, conditions and events that stay usable when a signal handler raises.

Python calls a signal's handler in the main thread between two bytecodes. A handler that raises
inside ``with lock:`` of the standard library may leave the lock taken. A handler that enqueues a
job may wait for a lock that its own thread holds. So no handler runs while the main thread holds a
lock of this module (:mod:`tidemill.core.signals`). While the main thread waits for a notification,
handlers run at once.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable
from time import monotonic as _now
from typing import Any

from tidemill.core.signals import (
    begin_interruptible_wait,
    defer_signals,
    end_interruptible_wait,
    resume_signals,
)


class RLock:
    """A reentrant lock for short sections: its thread may take the lock again."""

    __slots__ = ("_began", "_lock")

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self._began = False

    def __enter__(self) -> None:
        began = defer_signals()
        self._lock.acquire()
        self._began = began

    def __exit__(self, *_: object) -> None:
        began = self._began
        self._lock.release()
        if began:
            resume_signals()


class Lock(RLock):
    """A lock for short sections. It is not reentrant: its thread may not take the lock again."""

    __slots__ = ()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = False


class Condition(RLock):
    """A lock with waits for notification. Signal handlers may end a wait."""

    __slots__ = ("_turns",)

    def __init__(self) -> None:
        super().__init__()
        self._turns: collections.deque[threading.Lock] = collections.deque()

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep with the lock released; False when the time is over."""
        turn = threading.Lock()
        turn.acquire()
        self._turns.append(turn)
        began, told, came = self._began, False, False
        state = self._lock._release_save()
        try:
            begin_interruptible_wait()  # no inner try: a handler may raise before the try begins
            told = turn.acquire(timeout=-1 if timeout is None else _most(timeout))
            end_interruptible_wait()
            came = told
        finally:
            self._lock._acquire_restore(state)
            self._began = began
            if not came:
                self._leave(turn)
        return came

    def _leave(self, turn: threading.Lock) -> None:
        """End a wait without a notification: the time is over, or a handler has raised."""
        # If the notification came at this moment, pass it to another thread.
        try:
            self._turns.remove(turn)
        except ValueError:
            self.notify()

    def wait_for(self, holds: Callable[[], Any], timeout: float | None = None) -> Any:
        """Sleep until the function is true or the time is over; return its last result."""
        until = None if timeout is None else _now() + timeout
        while not (found := holds()):
            left = None if until is None else until - _now()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self) -> None:
        with contextlib.suppress(IndexError):
            self._turns.popleft().release()

    def notify_all(self) -> None:
        while self._turns:
            self._turns.popleft().release()


class Event:
    """An event that happens once."""

    __slots__ = ("_happened", "_told")

    def __init__(self) -> None:
        self._told = Condition()
        self._happened = False

    def is_set(self) -> bool:
        return self._happened

    def set(self) -> None:
        with self._told:
            self._happened = True
            self._told.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the event happens or the time is over; True when it has happened."""
        with self._told:
            if not self._happened:
                self._told.wait(timeout)
            return self._happened


class Stopping(Event):
    """An event for threads and event loops: the worker is about to stop."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._wakers: dict[int, Callable[[], object]] = {}

    def set(self) -> None:
        """Wake all waiting threads and tasks."""
        with self._lock:
            super().set()
            wakers = list(self._wakers.values())
        for wake in wakers:
            with contextlib.suppress(RuntimeError):  # raised when the event loop is closed
                wake()

    async def await_set(self, timeout: float | None = None) -> bool:
        """Wait as ``wait`` does, without blocking the event loop."""
        import asyncio

        woken = asyncio.Event()
        loop = asyncio.get_running_loop()
        with self._lock:
            if self.is_set():
                return True
            self._wakers[id(woken)] = functools.partial(loop.call_soon_threadsafe, woken.set)
        try:
            await asyncio.wait_for(woken.wait(), timeout)
        except TimeoutError:
            pass
        finally:
            with self._lock:
                del self._wakers[id(woken)]
        return self.is_set()


NEVER = Stopping()  # the event of jobs that run outside a worker


class LongLock:
    """A lock that is held during calls to a server. A signal handler may end a wait."""

    __slots__ = ("_began", "_changed", "_taken")

    def __init__(self) -> None:
        self._changed = Condition()
        self._taken = self._began = False

    def __enter__(self) -> None:
        began = defer_signals()
        try:
            with self._changed:
                while self._taken:
                    self._changed.wait()
                self._taken, self._began = True, began
        except BaseException:  # a signal handler has raised
            if began:
                resume_signals()
            raise

    def __exit__(self, *_: object) -> None:
        with self._changed:
            began, self._taken = self._began, False
            self._changed.notify()
        if began:
            resume_signals()


def _most(timeout: float) -> float:
    return max(0.0, min(timeout, threading.TIMEOUT_MAX))
