"""Waits for room in a queue: thousands of callers, and one thread for each queue they wait for.

When more than ``THREADS`` queues are waited for at once, the threads look at them in turn.
"""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import Executor, ThreadPoolExecutor

from tidemill.brokers.base import Broker

__all__ = ["THREADS", "Spaces"]

THREADS = 32
"""Queues that are watched at a time."""

LONG, SHORT = 1.0, 0.1
"""Seconds of one look: while each queue has a thread, and while they take turns."""

FIRST = 8
"""Callers that are told of room at first; twice as many each time there is still some."""

PAUSE = 0.02
"""Seconds that those who were told have to put, before others are told."""


class _Line:
    """Those who wait for room in one queue, the longest waiting first."""

    def __init__(self) -> None:
        self.waiting: dict[asyncio.Future[bool], None] = {}
        self.watching: asyncio.Task[None] | None = None

    def tell(self, count: int) -> None:
        """Tell so many that there is room."""
        for future in list(itertools.islice(self.waiting, count)):
            del self.waiting[future]
            if not future.done():
                future.set_result(True)

    def fail(self, error: Exception) -> None:
        """Tell all that nobody can look."""
        waiting, self.waiting = self.waiting, {}
        for future in waiting:
            if not future.done():
                future.set_exception(error)


class Spaces:
    """All that wait for room in queues of one broker. In the event loop that serves them."""

    def __init__(self, broker: Broker, looks: Executor) -> None:
        """``looks`` makes the calls that do not wait."""
        self._broker = broker
        self._looks = looks
        self._lines: dict[str, _Line] = {}
        self._threads = ThreadPoolExecutor(THREADS, "server-space")
        self._closed = False

    async def wait(self, queue: str, timeout: float) -> bool:
        """Until the queue has room; False when the time is over.

        Raises:
            TidemillError: the store cannot be asked.
        """
        if timeout <= 0 or queue not in self._lines:
            if await self._has_room(self._looks, queue, 0.0):
                return True
            if timeout <= 0 or self._closed:
                return False
        line = self._lines.get(queue)
        if line is None:
            line = self._lines[queue] = _Line()
            line.watching = asyncio.ensure_future(self._watch(queue, line))
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        line.waiting[future] = None
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            return False
        finally:
            line.waiting.pop(future, None)

    async def _watch(self, queue: str, line: _Line) -> None:
        count = FIRST
        try:
            while line.waiting:
                seconds = LONG if len(self._lines) <= THREADS else SHORT
                if await self._has_room(self._threads, queue, seconds):
                    line.tell(count)
                    count *= 2
                    await asyncio.sleep(PAUSE)
                else:
                    count = FIRST
        except Exception as error:
            line.fail(error)
        finally:
            del self._lines[queue]

    async def _has_room(self, threads: Executor, queue: str, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, self._broker.wait_space, queue, seconds)

    async def close(self) -> None:
        """End all waits as if their time were over."""
        self._closed = True
        lines = list(self._lines.values())
        for line in lines:
            for future in line.waiting:
                if not future.done():
                    future.set_result(False)
            line.waiting.clear()
        self._threads.shutdown(wait=False)
        watching = [line.watching for line in lines if line.watching is not None]
        if watching:
            await asyncio.wait(watching)
