"""Waits for room in a queue: thousands of callers, and one thread for each queue.

When callers wait for more than ``THREADS`` queues at once, the threads watch the queues in turn.
"""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import Executor, ThreadPoolExecutor

from tidemill.brokers.contract.store import Store

THREADS = 32
"""Queues that are watched at a time."""

LONG_LOOK, SHORT_LOOK = 1.0, 0.1
"""Seconds of one look at a queue: while each queue has a thread, and while queues take turns."""

FIRST_BATCH = 8
"""Callers woken when a queue gets room; the number doubles while the queue still has room."""

PAUSE = 0.02
"""Seconds in which the woken callers put their jobs, before other callers are woken."""


class _QueueWaits:
    """The callers that wait for room in one queue, the longest waiting first."""

    def __init__(self) -> None:
        self.waiting: dict[asyncio.Future[bool], None] = {}
        self.watching: asyncio.Task[None] | None = None

    def wake(self, count: int) -> None:
        """Wake ``count`` callers: the queue has room."""
        for future in list(itertools.islice(self.waiting, count)):
            del self.waiting[future]
            if not future.done():
                future.set_result(True)

    def fail(self, error: Exception) -> None:
        """Give an error to all callers."""
        waiting, self.waiting = self.waiting, {}
        for future in waiting:
            if not future.done():
                future.set_exception(error)


class SpaceWaits:
    """The waits for room in the queues of one broker. Used in one event loop."""

    def __init__(self, broker: Store, threads: Executor) -> None:
        """``threads`` makes the calls that do not wait."""
        self._broker = broker
        self._short_calls = threads
        self._queues: dict[str, _QueueWaits] = {}
        self._threads = ThreadPoolExecutor(THREADS, "server-space")
        self._closed = False

    async def wait(self, queue: str, timeout: float) -> bool:
        """Wait until the queue has room; False when the time is over.

        Raises:
            TidemillError: the store cannot be asked.
        """
        if timeout <= 0 or queue not in self._queues:
            if await self._has_room(self._short_calls, queue, 0.0):
                return True
            if timeout <= 0 or self._closed:
                return False
        waits = self._queues.get(queue)
        if waits is None:
            waits = self._queues[queue] = _QueueWaits()
            waits.watching = asyncio.ensure_future(self._watch(queue, waits))
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waits.waiting[future] = None
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            return False
        finally:
            waits.waiting.pop(future, None)

    async def _watch(self, queue: str, waits: _QueueWaits) -> None:
        count = FIRST_BATCH
        try:
            while waits.waiting:
                seconds = LONG_LOOK if len(self._queues) <= THREADS else SHORT_LOOK
                if await self._has_room(self._threads, queue, seconds):
                    waits.wake(count)
                    count *= 2
                    await asyncio.sleep(PAUSE)
                else:
                    count = FIRST_BATCH
        except Exception as error:
            waits.fail(error)
        finally:
            del self._queues[queue]

    async def _has_room(self, threads: Executor, queue: str, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, self._broker.wait_space, queue, seconds)

    async def close(self) -> None:
        """End all waits as if their time were over."""
        self._closed = True
        queues = list(self._queues.values())
        for waits in queues:
            for future in waits.waiting:
                if not future.done():
                    future.set_result(False)
            waits.waiting.clear()
        self._threads.shutdown(wait=False)
        watching = [waits.watching for waits in queues if waits.watching is not None]
        if watching:
            await asyncio.wait(watching)
