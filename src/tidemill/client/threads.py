"""Make blocking calls for event loops, in daemon threads of the app.

The default pool of an event loop is small and belongs to the user. The threads are daemons, so a
program can end while a thread waits for a job. An app has two pools: one for calls that wait, and
one for calls that act. So waits never delay other calls.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from tidemill.brokers.shared.event_loops import WAITING_LOOP
from tidemill.core.locks import Condition

if TYPE_CHECKING:
    import asyncio

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

ACTING, WAITING = 64, 256  # the largest numbers of threads in an app's two pools


class Threads:
    """Up to ``most`` threads, started when needed. Further calls wait for a free thread."""

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
        """Make the call in a thread; a call that still waits for a thread can be cancelled."""
        return await self.begin(function, *args)

    async def in_transaction(self, txn: Any, put: Callable[[], T]) -> T:
        """Make a put in the caller's transaction.

        A synchronous transaction is used in the calling thread, an async one in a thread of the
        pool. A cancelled call still waits until this thread has ended its work.
        """
        execute = getattr(type(txn), "execute", None)
        if execute is None or not inspect.iscoroutinefunction(inspect.unwrap(execute)):
            return put()
        import asyncio

        future = self.begin(put)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    def begin(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Make the call in a thread, unless the future is cancelled before its turn comes."""
        import asyncio

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
                if isinstance(error, StopIteration):  # a future cannot raise StopIteration
                    error = RuntimeError(f"{type(error).__name__}: {error}")
                answer = future.set_exception, error
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_answer, future, *answer)

        self.start(call)
        return future

    def start(self, call: Callable[[], object]) -> None:
        """Make a call without a future."""
        if self._pid != os.getpid():  # a forked child has none of the parent's threads
            self._reset()
        with self._changed:
            self._calls.append(call)
            # A notified thread still counts as idle until it wakes up and takes its call.
            if len(self._calls) <= self._idle:
                self._changed.notify()
            elif len(self._threads) < self.most:
                self._start_thread()

    def _start_thread(self) -> None:
        """Start another thread. If that fails and the pool has no thread, drop the latest call."""
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
    def is_full(self) -> bool:
        """True while a further call would have to wait for a free thread."""
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
            del call  # an idle thread must not keep the call's values alive

    def close(self, patience: float = 5.0) -> None:
        """End the threads after their calls; wait up to ``patience`` seconds for each thread."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(patience)


def in_thread(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """The async twin of a method, which makes the call in a thread of the app.

    ``acancel = in_thread(cancel)`` stands below ``cancel``. The class has a ``_runtime``.
    The twin of a subclass calls the method of the subclass.
    """
    name = method.__name__

    @functools.wraps(method)
    async def twin(self: Any, /, *args: Any, **kwargs: Any) -> T:
        call: Callable[[], T] = functools.partial(getattr(self, name), *args, **kwargs)
        answer: T = await self._runtime.threaded(call)
        return answer

    twin.__name__ = f"a{name}"
    twin.__qualname__ = method.__qualname__.removesuffix(name) + twin.__name__
    twin.__doc__ = f"As ``{name}``, without blocking the event loop."
    return twin


def is_in_event_loop() -> bool:
    """True when this thread runs an event loop, which a blocking call would stop."""
    if "asyncio" not in sys.modules:
        return False
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def cancel_later() -> None:
    """Cancel the current task at its next ``await``: this ``await`` has already succeeded.

    Nothing happens if the cancellation was taken back by then, as ``asyncio.timeout`` does at its
    end. The count of ``Task.cancelling`` does not change.
    """
    import asyncio

    task = asyncio.current_task()
    assert task is not None

    def cancel(task: asyncio.Task[Any]) -> None:
        if not task.done() and task.cancelling():
            task.uncancel()
            task.cancel()

    asyncio.get_running_loop().call_soon(cancel, task)


def _answer(future: asyncio.Future[Any], set_answer: Callable[[Any], None], answer: Any) -> None:
    if not future.cancelled():
        set_answer(answer)
