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

from tidemill.brokers.loops import WAITING_LOOP
from tidemill.locks import Condition

__all__ = ["ACTING", "WAITING", "Threads", "cancel_later"]

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
        self._changed = Condition()
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._over = False

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """The value of the call; made not at all when cancelled before its turn came."""
        return await self.begin(function, *args)

    async def inside(self, txn: Any, put: Callable[[], T]) -> T:
        """Put in a caller's transaction, which belongs to this thread, or to this loop.

        One that is the loop's is used from a thread, and for no longer than this call.
        """
        if not hasattr(type(txn), "__aenter__"):
            return put()
        future = self.begin(put)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    def begin(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Make the call in a thread, unless the future is cancelled before its turn comes."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()
        context.run(WAITING_LOOP.set, loop)

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
        return future

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
                self._start_thread()

    def _start_thread(self) -> None:
        """Start one thread more; without any, the latest call is not made.

        Raises:
            RuntimeError: the system has no thread for us, and none is here to make the call.
        """
        name = f"tidemill-{self.name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except BaseException:
            if not self._threads:
                self._calls.pop()
                raise
        else:
            self._threads.append(thread)

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


def cancel_later() -> None:
    """Cancel the current task at its next ``await``, for a cancellation that came too late.

    Nothing happens when somebody has taken the cancellation back by then, as ``asyncio.timeout``
    does at its end. The count of ``Task.cancelling`` stays as it is.
    """
    task = asyncio.current_task()
    assert task is not None

    def cancel(task: asyncio.Task[Any]) -> None:
        if not task.done() and task.cancelling():
            task.uncancel()
            task.cancel()

    asyncio.get_running_loop().call_soon(cancel, task)


def _tell(future: asyncio.Future[Any], say: Callable[[Any], None], answer: Any) -> None:
    if not future.cancelled():
        say(answer)
