"""Blocking calls made from event loops: in daemon threads of the app's own.

Not in the loop's default pool, which is small and is the user's. And daemons, because nobody should
have to wait at the end of a program for a thread that waits for a job. An app has two pools: calls
that wait for something to happen may fill theirs, and those that act still find a thread.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["ACTING", "WAITING", "Threads"]

T = TypeVar("T")

ACTING, WAITING = 64, 256
"""Threads of the two pools of an app, at most."""


class Threads:
    """Up to ``most`` threads, started when needed; more calls wait for their turn."""

    def __init__(self, name: str, most: int) -> None:
        self.name = name
        self.most = most
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._over = False

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """The value of the call; made not at all when cancelled before its turn came."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()

        def call() -> None:
            if future.cancelled():
                return
            try:
                answer: tuple[Callable[[Any], None], Any]
                answer = future.set_result, context.run(function, *args)
            except BaseException as error:
                if isinstance(error, StopIteration):  # which no future may carry
                    error = RuntimeError(f"{type(error).__name__}: {error}")
                answer = future.set_exception, error
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_tell, future, *answer)

        self.start(call)
        return await future

    def start(self, call: Callable[[], object]) -> None:
        """Make a call that nobody waits for."""
        if self._pid != os.getpid():  # a forked child: those threads stayed with the parent
            self._reset()
        with self._changed:
            self._calls.append(call)
            # An idle thread that was notified but is not up yet still counts, and so does its call.
            if len(self._calls) <= self._idle:
                self._changed.notify()
            elif len(self._threads) < self.most:
                name = f"tidemill-{self.name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    @property
    def crowded(self) -> bool:
        """True while one call more would have to wait for its turn."""
        return len(self._threads) >= self.most and len(self._calls) >= self._idle

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._calls and not self._over:
                    self._changed.wait()
                self._idle -= 1
                if not self._calls:
                    return
                call = self._calls.popleft()
            call()
            del call  # what it holds is not ours to keep alive while idle

    def close(self, patience: float = 5.0) -> None:
        """End the threads; one that is in a call ends after it, and is not waited for long."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(patience)


def _tell(future: asyncio.Future[Any], say: Callable[[Any], None], answer: Any) -> None:
    if not future.cancelled():
        say(answer)
