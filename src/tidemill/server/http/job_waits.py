"""Waits for jobs to end: thousands of callers, and at most 64 threads.

A shard watches the jobs of many callers in one thread. The store's hint that a job has ended
carries a checksum of the job's id, with 64 possible values. The same checksum assigns each job to a
shard, so the end of a job wakes one shard.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.rpc import LONGEST
from tidemill.brokers.shared.job_watch import Alarm, Ends, Watched

SHARDS = 64


class _Wait:
    """The wait of one caller, until ``left`` more of its jobs have ended."""

    __slots__ = ("future", "left")

    def __init__(self, future: asyncio.Future[None], left: int) -> None:
        self.future = future
        self.left = left

    def ended(self) -> None:
        """Count one job that has ended."""
        self.left -= 1
        if self.left <= 0 and not self.future.done():
            self.future.set_result(None)


class _Shard:
    """A part of the jobs, and the thread that watches them."""

    def __init__(self, ends: Ends, threads: ThreadPoolExecutor) -> None:
        self._ends = ends
        self._threads = threads
        self._alarm = Alarm()
        self._waits: dict[str, list[_Wait]] = {}
        self._watching: asyncio.Task[None] | None = None

    def add(self, job_id: str, wait: _Wait) -> None:
        """Watch a job for a caller."""
        waits = self._waits.get(job_id)
        if waits is not None:
            waits.append(wait)
            return
        self._waits[job_id] = [wait]
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        else:
            self._alarm.ring()

    def drop(self, job_id: str, wait: _Wait) -> None:
        """Stop watching a job for a caller."""
        waits = self._waits.get(job_id, [])
        if wait in waits:
            waits.remove(wait)
            if not waits:
                del self._waits[job_id]
                if not self._waits:
                    self._alarm.ring()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waits:
                self._alarm.clear()
                ids = list(self._waits)
                watch = loop.run_in_executor(
                    self._threads, self._ends.ended, ids, LONGEST, self._alarm
                )
                for job_id, has_ended in zip(ids, await watch, strict=True):
                    if has_ended:
                        for wait in self._waits.pop(job_id, ()):
                            wait.ended()
        except Exception as error:
            for wait in [wait for waits in self._waits.values() for wait in waits]:
                if not wait.future.done():
                    wait.future.set_exception(error)
            self._waits.clear()
        finally:
            self._watching = None

    async def close(self) -> None:
        """End all waits, and the thread's call."""
        watching = self._watching
        for wait in [wait for waits in self._waits.values() for wait in waits]:
            wait.left = 0
            wait.ended()
        self._waits.clear()
        if watching is not None:
            self._alarm.ring()
            await asyncio.wait([watching])
        self._alarm.close()


class JobEndWaits:
    """The waits for jobs of one broker. Used in one event loop."""

    def __init__(self, broker: Broker) -> None:
        self._ends = broker.waits if isinstance(broker, Watched) else None
        self._shards: dict[int, _Shard] = {}
        self._threads = ThreadPoolExecutor(SHARDS, "server-ends")
        self._closed = False

    @property
    def can_watch(self) -> bool:
        """Whether one call of the broker can watch many jobs; else each wait needs a thread."""
        return self._ends is not None

    async def until_ended(self, ids: Sequence[str], timeout: float, *, first: bool = False) -> None:
        """Wait until all jobs have ended (with ``first``, one job), at most ``timeout`` seconds.

        Raises:
            BrokerUnavailable: the store cannot be reached.
        """
        future = asyncio.get_running_loop().create_future()
        ids = list(dict.fromkeys(ids))
        if self._closed or not ids:
            return
        wait = _Wait(future, 1 if first else len(ids))
        try:
            async with asyncio.timeout(timeout):
                for job_id in ids:
                    self._shard(job_id).add(job_id, wait)
                await future
        except TimeoutError:
            pass
        finally:
            for job_id in ids:
                self._shard(job_id).drop(job_id, wait)

    def _shard(self, job_id: str) -> _Shard:
        number = zlib.crc32(job_id.encode("utf-8", "surrogatepass")) % SHARDS
        shard = self._shards.get(number)
        if shard is None:
            assert self._ends is not None
            shard = self._shards[number] = _Shard(self._ends, self._threads)
        return shard

    async def close(self) -> None:
        """End all waits as if their time were over."""
        self._closed = True
        for shard in self._shards.values():
            await shard.close()
        self._threads.shutdown(wait=False)
