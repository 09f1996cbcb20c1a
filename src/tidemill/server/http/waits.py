"""Waits for jobs to end and for room in queues: thousands of callers, and few threads.

A watch is one thread that waits for many callers. For jobs there are at most 64 watches. The
store's hint that a job has ended carries a checksum of the job's id, with 64 possible values. The
same checksum assigns each job to a watch, so the end of a job wakes one watch.

For room there is one watch for each queue. When callers wait for more than ``QUEUES`` queues at
once, the threads watch the queues in turn.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from tidemill.brokers.contract.rpc import LONGEST
from tidemill.brokers.contract.store import Store
from tidemill.brokers.shared.job_watch import Alarm, Ends, Watched

SHARDS = 64
"""The watches for jobs."""

QUEUES = 32
"""Queues that are watched at a time."""

LONG_LOOK, SHORT_LOOK = 1.0, 0.1
"""Seconds of one look at a queue: while each queue has a thread, and while queues take turns."""

FIRST_BATCH = 8
"""Callers woken when a queue gets room; the number doubles while the queue still has room."""

PAUSE = 0.02
"""Seconds in which the woken callers put their jobs, before other callers are woken."""


async def until_first(
    gone: Awaitable[object],
    stopping: asyncio.Event,
    work: asyncio.Future[Any] | None = None,
    timeout: float | None = None,
) -> bool:
    """Wait until the client has ``gone``, the server stops, the work is done or the time is over.

    Returns whether the client has gone. The work goes on.
    """
    ends = [asyncio.ensure_future(gone), asyncio.ensure_future(stopping.wait())]
    try:
        either = [*ends, work] if work is not None else ends
        await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return ends[0].done()
    finally:
        for end in ends:
            end.cancel()


class _Wait:
    """The wait of one caller, until ``left`` more of its jobs have ended, or its queue has room.

    The result is False when the server ends the wait.
    """

    __slots__ = ("future", "left")

    def __init__(self, left: int = 1) -> None:
        self.future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.left = left

    def happened(self) -> None:
        """Count one job that has ended, or the room in the queue."""
        self.left -= 1
        if self.left <= 0:
            self.end(True)

    def end(self, result: bool | Exception) -> None:
        """End the wait."""
        if self.future.done():
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


class _Watch:
    """The callers of one thread: for each job or queue, the longest waiting caller first."""

    def __init__(self) -> None:
        self.waits: dict[str, dict[_Wait, None]] = {}
        self._watching: asyncio.Task[None] | None = None

    def add(self, name: str, wait: _Wait) -> None:
        """Wait for a job or a queue."""
        is_new = name not in self.waits
        self.waits.setdefault(name, {})[wait] = None
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        elif is_new:
            self.interrupt()

    def drop(self, name: str, wait: _Wait) -> None:
        """Wait no more; does nothing when the wait is over."""
        waits = self.waits.get(name, {})
        if wait in waits:
            del waits[wait]
            if not waits:
                del self.waits[name]
                if not self.waits:
                    self.interrupt()

    async def _watch(self) -> None:
        try:
            while self.waits:
                await self.look()
        except Exception as error:
            self._end_all(error)
        finally:
            self._watching = None
            self.ended()

    async def look(self) -> None:
        """Watch for a while, and wake the callers for whom something has happened."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """End the current look early, if the watch can do so."""

    def ended(self) -> None:
        """Called when nobody waits any more."""

    def _end_all(self, result: bool | Exception) -> None:
        for wait in [wait for waits in self.waits.values() for wait in waits]:
            wait.end(result)
        self.waits.clear()

    async def close(self) -> None:
        """End all waits, and the current look."""
        watching = self._watching
        self._end_all(False)
        self.interrupt()
        if watching is not None:
            await asyncio.wait([watching])


class _JobWatch(_Watch):
    """The callers that wait for a part of the jobs."""

    def __init__(self, ends: Ends, threads: Executor) -> None:
        super().__init__()
        self._ends = ends
        self._threads = threads
        self._alarm = Alarm()

    def interrupt(self) -> None:
        self._alarm.ring()

    async def look(self) -> None:
        self._alarm.clear()
        loop, ids = asyncio.get_running_loop(), list(self.waits)
        ended = await loop.run_in_executor(
            self._threads, self._ends.ended, ids, LONGEST, self._alarm
        )
        for job_id in itertools.compress(ids, ended):
            for wait in self.waits.pop(job_id, ()):
                wait.happened()

    async def close(self) -> None:
        await super().close()
        self._alarm.close()


class _QueueWatch(_Watch):
    """The callers that wait for room in one queue."""

    def __init__(
        self,
        queue: str,
        wait_space: Callable[[str], Awaitable[bool]],
        forget: Callable[[str], object],
    ) -> None:
        super().__init__()
        self._queue = queue
        self._forget = forget
        self._wait_space = wait_space
        self._count = FIRST_BATCH

    async def look(self) -> None:
        if not await self._wait_space(self._queue):
            self._count = FIRST_BATCH
            return
        for wait in list(itertools.islice(self.waits.get(self._queue, ()), self._count)):
            self.drop(self._queue, wait)
            wait.happened()
        self._count *= 2
        await asyncio.sleep(PAUSE)

    def ended(self) -> None:
        self._forget(self._queue)


class Waits:
    """The waits for jobs and for room of one broker. Used in one event loop."""

    def __init__(self, broker: Store) -> None:
        self._broker = broker
        self._ends = broker.waits if isinstance(broker, Watched) else None
        self._jobs: dict[int, _JobWatch] = {}
        self._queues: dict[str, _QueueWatch] = {}
        self._job_threads = ThreadPoolExecutor(SHARDS, "server-ends")
        self._queue_threads = ThreadPoolExecutor(QUEUES, "server-space")
        self._closed = False

    @property
    def can_watch(self) -> bool:
        """Whether one call of the broker can watch many jobs; else each wait needs a thread."""
        return self._ends is not None

    async def until_ended(self, ids: Sequence[str], timeout: float, *, first: bool = False) -> None:
        """Wait until all jobs have ended (with ``first``, one job), at most ``timeout`` seconds."""
        if self._closed or not ids:
            return
        watches = {job_id: self._watch_of(job_id) for job_id in ids}
        await self._until(_Wait(1 if first else len(watches)), watches, timeout)

    async def until_room(self, queue: str, timeout: float) -> bool:
        """Wait until the queue has room; False when the time is over."""
        watch = self._queues.get(queue)
        if watch is None or timeout <= 0:
            if await asyncio.to_thread(self._broker.wait_space, queue, 0.0):
                return True
            if timeout <= 0 or self._closed:
                return False
            watch = self._queues.get(queue)
            if watch is None:
                watch = _QueueWatch(queue, self._wait_space, self._queues.pop)
                self._queues[queue] = watch
        return await self._until(_Wait(), {queue: watch}, timeout)

    async def _until(self, wait: _Wait, watches: Mapping[str, _Watch], timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                for name, watch in watches.items():
                    watch.add(name, wait)
                return await wait.future
        except TimeoutError:
            return False
        finally:
            for name, watch in watches.items():
                watch.drop(name, wait)

    def _watch_of(self, job_id: str) -> _JobWatch:
        number = zlib.crc32(job_id.encode("utf-8", "surrogatepass")) % SHARDS
        watch = self._jobs.get(number)
        if watch is None:
            assert self._ends is not None
            watch = self._jobs[number] = _JobWatch(self._ends, self._job_threads)
        return watch

    async def _wait_space(self, queue: str) -> bool:
        """Look at a queue in a thread, until it has room or another queue has its turn."""
        seconds = LONG_LOOK if len(self._queues) <= QUEUES else SHORT_LOOK
        loop, ask = asyncio.get_running_loop(), self._broker.wait_space
        return await loop.run_in_executor(self._queue_threads, ask, queue, seconds)

    async def close(self) -> None:
        """End all waits as if their time were over."""
        self._closed = True
        jobs, self._jobs = self._jobs, {}  # a second close must not close their descriptors again
        await asyncio.gather(*[watch.close() for watch in jobs.values()])
        self._job_threads.shutdown(wait=False)
        self._queue_threads.shutdown(wait=False)
        await asyncio.gather(*[watch.close() for watch in list(self._queues.values())])
