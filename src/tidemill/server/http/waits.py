"""Waits of clients: for the ends of jobs, for room in queues, and for wake-ups of remote owners.

A watch is one thread that waits for many callers. The store's hint that a job has ended carries a
checksum of the job's id, with 64 possible values. The same checksum assigns each job to a watch, so
the end of a job wakes one watch. For room there is one watch for each queue. When callers wait for
more than ``QUEUES`` queues at once, the threads watch the queues in turn.

A process keeps one request open for all its consumers (:class:`Presence`). When its connection
breaks, and the process does not send the request again within ``GRACE``, the server releases its
consumers: each message that they hold gets a failed attempt, as on the machine of the store. After
an answer, the process may be stopped, so it gets the longer time ``LAPSE``. A server does not know
the requests of another server, so a load balancer should send a client to the same server.

A sleeping owner sends a request, too (:class:`ParkedWaits`). The request stays open while the owner
works, so a hint between two sleeps answers the request at once. A hint whose answer nobody received
is kept until the owner's next exchange.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import itertools
import logging
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.rpc import LONGEST
from tidemill.brokers.contract.store import Store
from tidemill.brokers.shared.job_watch import Alarm, Watched
from tidemill.brokers.shared.waits import Parked, Parking, Until, ready_of
from tidemill.errors import TidemillError

SHARDS = 64  # the watches for jobs
QUEUES = 32  # queues that are watched at a time

LONG_LOOK, SHORT_LOOK = 1.0, 0.1
"""Seconds of one look at a queue: while each queue has a thread, and while queues take turns."""

FIRST_BATCH = 8
"""Callers woken when a queue gets room; the number doubles while the queue still has room."""

PAUSE = 0.02  # seconds in which the woken callers put their jobs, before other callers are woken


async def until_first(
    gone: Awaitable[object],
    stopping: asyncio.Event,
    work: asyncio.Future[Any] | None = None,
    timeout: float | None = None,
) -> bool:
    """Wait for ``gone``, the server's stop, the work or the time; True if the client has gone."""
    ends = [asyncio.ensure_future(gone), asyncio.ensure_future(stopping.wait())]
    try:
        either = [*ends, work] if work is not None else ends
        await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return ends[0].done()
    finally:
        for end in ends:
            end.cancel()


class _Wait:
    """The wait for ``left`` jobs to end, or for room; False when the server ends it."""

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
        if self.future.done():
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


class _Watch:
    """The callers of one thread: for each job or queue, the longest waiting caller first.

    ``look`` watches for a while, and wakes the callers for whom something has happened. ``alarm``
    ends a look early. ``ended`` is called when nobody waits any more.
    """

    def __init__(
        self,
        look: Callable[[_Watch], Awaitable[None]],
        alarm: Alarm | None = None,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        self.waits: dict[str, dict[_Wait, None]] = {}
        self.alarm = alarm
        self.batch = FIRST_BATCH
        self._look = look
        self._ended = ended
        self._watching: asyncio.Task[None] | None = None

    def add(self, name: str, wait: _Wait) -> None:
        is_new = name not in self.waits
        self.waits.setdefault(name, {})[wait] = None
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        elif is_new:
            self._interrupt()

    def drop(self, name: str, wait: _Wait) -> None:
        """Wait no more; does nothing when the wait is over."""
        waits = self.waits.get(name, {})
        if wait in waits:
            del waits[wait]
            if not waits:
                del self.waits[name]
                if not self.waits:
                    self._interrupt()

    async def _watch(self) -> None:
        try:
            while self.waits:
                await self._look(self)
        except Exception as error:
            self._end_all(error)
        finally:
            self._watching = None
            self._ended()

    def _interrupt(self) -> None:
        if self.alarm is not None:
            self.alarm.ring()

    def _end_all(self, result: bool | Exception) -> None:
        for wait in [wait for waits in self.waits.values() for wait in waits]:
            wait.end(result)
        self.waits.clear()

    async def close(self) -> None:
        """End all waits, and the current look."""
        watching = self._watching
        self._end_all(False)
        self._interrupt()
        if watching is not None:
            await asyncio.wait([watching])
        if self.alarm is not None:
            self.alarm.close()


class Waits:
    """The waits for jobs and for room of one broker. Used in one event loop."""

    def __init__(self, broker: Store) -> None:
        self._broker = broker
        self._ends = broker.waits if isinstance(broker, Watched) else None
        self._jobs: dict[int, _Watch] = {}
        self._queues: dict[str, _Watch] = {}
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
                look = functools.partial(self._look_at_room, queue)
                watch = _Watch(look, ended=functools.partial(self._queues.pop, queue))
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

    def _watch_of(self, job_id: str) -> _Watch:
        number = zlib.crc32(job_id.encode("utf-8", "surrogatepass")) % SHARDS
        if number not in self._jobs:
            alarm = Alarm()
            self._jobs[number] = _Watch(functools.partial(self._look_at_jobs, alarm), alarm)
        return self._jobs[number]

    async def _look_at_jobs(self, alarm: Alarm, watch: _Watch) -> None:
        assert self._ends is not None
        alarm.clear()
        loop, ids = asyncio.get_running_loop(), list(watch.waits)
        look = functools.partial(self._ends.ended, ids, LONGEST, alarm)
        for job_id in itertools.compress(ids, await loop.run_in_executor(self._job_threads, look)):
            for wait in watch.waits.pop(job_id, ()):
                wait.happened()

    async def _look_at_room(self, queue: str, watch: _Watch) -> None:
        """Look at a queue in a thread, until it has room or another queue has its turn."""
        seconds = LONG_LOOK if len(self._queues) <= QUEUES else SHORT_LOOK
        loop, ask = asyncio.get_running_loop(), self._broker.wait_space
        if not await loop.run_in_executor(self._queue_threads, ask, queue, seconds):
            watch.batch = FIRST_BATCH
            return
        for wait in list(itertools.islice(watch.waits.get(queue, ()), watch.batch)):
            watch.drop(queue, wait)
            wait.happened()
        watch.batch *= 2
        await asyncio.sleep(PAUSE)

    async def close(self) -> None:
        """End all waits as if their time were over."""
        self._closed = True
        jobs, self._jobs = self._jobs, {}  # a second close must not close their descriptors again
        await asyncio.gather(*[watch.close() for watch in jobs.values()])
        self._job_threads.shutdown(wait=False)
        self._queue_threads.shutdown(wait=False)
        await asyncio.gather(*[watch.close() for watch in list(self._queues.values())])


# -- remote owners: when the store gives up the owners of other machines ---------------------------


log = logging.getLogger("tidemill.server")

GRACE = 5.0  # seconds in which a process may send its request again after its connection broke
LAPSE = 60.0  # seconds in which a process may send its request again after an answer
_RETRY = 1.0  # seconds until the silence is measured again after an error of the store


async def give_up_silent_owners(broker: Store, stopping: asyncio.Event) -> None:
    """Have the store count the silence of remote owners until the server stops."""
    while not stopping.is_set():
        try:
            seconds = await asyncio.to_thread(broker.count_silence)
        except TidemillError as error:
            log.warning("%s; trying again", error)
            seconds = _RETRY
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), seconds)


class Presence:
    """The consumers that are present, by the requests that their processes keep open."""

    def __init__(self, broker: Store, stopping: asyncio.Event) -> None:
        self._broker = broker
        self._stopping = stopping
        self._asked: collections.Counter[str] = collections.Counter()
        self._absent: dict[str, asyncio.TimerHandle] = {}
        self._releases: set[asyncio.Task[None]] = set()  # the loop keeps only weak references

    async def wait(
        self, owner_ids: Sequence[str], timeout: float, gone: Callable[[], Awaitable[None]]
    ) -> bool:
        """Keep the consumers present until the client leaves or the time is over; then False."""
        for owner_id in owner_ids:
            self._asked[owner_id] += 1
            if timer := self._absent.pop(owner_id, None):
                timer.cancel()
        patience = GRACE
        try:
            if not await until_first(gone(), self._stopping, timeout=timeout):
                patience = LAPSE
        finally:
            for owner_id in owner_ids:
                self._leave(owner_id, patience)
        return False

    def close(self) -> None:
        """Release no more consumers: their processes will send the request to another server."""
        for timer in self._absent.values():
            timer.cancel()
        self._absent.clear()

    def _leave(self, owner_id: str, patience: float) -> None:
        self._asked[owner_id] -= 1
        if self._asked[owner_id]:
            return
        del self._asked[owner_id]
        if not self._stopping.is_set():
            loop = asyncio.get_running_loop()
            self._absent[owner_id] = loop.call_later(patience, self._give_up, owner_id)

    def _give_up(self, owner_id: str) -> None:
        del self._absent[owner_id]
        if self._stopping.is_set():
            return
        task = asyncio.ensure_future(self._release(owner_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, owner_id: str) -> None:
        if owner_id in self._asked:
            return  # the consumer's process has sent the request again
        try:
            count = await asyncio.to_thread(self._release_consumer, owner_id)
        except TidemillError as error:  # the leases end later, by their ttr or the owner's silence
            log.warning("consumer %s has gone and cannot be given up: %s", owner_id, error)
            return
        if count:
            log.warning(
                "consumer %s has gone; %d messages go back to their queues", owner_id, count
            )

    def _release_consumer(self, owner_id: str) -> int:
        """Detach a consumer of another machine; return the number of messages that it held."""
        for owner in self._broker.owners():
            if owner.id == owner_id and owner.kind == "consumer" and owner.lease:
                return self._broker.release(owner_id, None)
        return 0


# -- parked waits: remote owners that sleep --------------------------------------------------------


MAX_SLEEPERS = 2000  # owners that sleep at a time; further owners poll every second
THREADS = 16  # waits whose steps may run at the same time
_PAUSE = 0.2  # seconds before an early answer, so that the owner does not ask in a busy loop


class _Sleeper:
    """The wait of one owner, and whether something has happened since its last exchange."""

    __slots__ = ("happened", "requests", "wait")

    def __init__(self) -> None:
        self.wait: asyncio.Future[bool] | None = None
        self.requests = 0  # only the latest request may still have a client
        self.happened = False


class ParkedWaits:
    """The sleeping owners of one server. Used in its event loop, except :meth:`exchanges`."""

    def __init__(self, broker: Broker, name: str, stopping: asyncio.Event) -> None:
        self._broker = broker
        self._name = name
        self._stopping = stopping
        self._sleepers: dict[str, _Sleeper] = {}
        self._asleep = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="server-wait")
        self._descriptor_waits = _DescriptorWaits()

    def exchanges(self, owner_id: str) -> None:
        """Forget earlier hints, since the owner exchanges now. Called from any thread."""
        sleeper = self._sleepers.get(owner_id)
        if sleeper is not None:
            sleeper.happened = False

    async def wait(
        self,
        owner_id: str,
        timeout: float,
        server: str,
        gone: Callable[[], Coroutine[Any, Any, object]],
    ) -> bool:
        """True as soon as something may have happened, False when the time is over."""
        if server != self._name:  # the owner's last exchange was with another server
            await asyncio.sleep(_PAUSE)
            return True
        if self._asleep >= MAX_SLEEPERS:
            await asyncio.sleep(1.0)
            return True
        sleeper = self._sleepers.setdefault(owner_id, _Sleeper())
        sleeper.requests += 1
        number = sleeper.requests
        while sleeper.wait is not None:  # an earlier request, whose client has left or asks again
            self._broker.wake(owner_id)
            await asyncio.wait([sleeper.wait])
        if sleeper.requests != number:
            return False
        if sleeper.happened or self._stopping.is_set():
            return True
        wait = sleeper.wait = asyncio.ensure_future(self._sleep(sleeper, owner_id, timeout))
        try:
            await until_first(gone(), self._stopping, wait)
            if not wait.done():
                self._broker.wake(owner_id)
            return await wait
        finally:
            self._forget_idle(sleeper, owner_id)

    async def _sleep(self, sleeper: _Sleeper, owner_id: str, timeout: float) -> bool:
        loop = asyncio.get_running_loop()
        timeout = min(timeout, LONGEST)
        until = loop.time() + timeout
        self._asleep += 1
        try:
            await self._park(owner_id, timeout)
        except TidemillError:
            sleeper.happened = True  # the owner gets the error with its next exchange
            await asyncio.sleep(_PAUSE)
        else:
            sleeper.happened |= loop.time() < until
        finally:
            sleeper.wait = None
            self._asleep -= 1
        return sleeper.happened

    async def _park(self, owner_id: str, timeout: float) -> None:
        """Take the steps of an owner's wait, until it is over."""
        assert isinstance(self._broker, Parking), self._broker.url
        loop = asyncio.get_running_loop()
        parked = self._broker.parked(owner_id, timeout)
        try:
            until = await loop.run_in_executor(self._threads, _step, parked)
            while until is not None:
                await self._descriptor_waits.wait(until)
                until = await loop.run_in_executor(self._threads, _step, parked, until)
        except BaseException:
            with contextlib.suppress(ValueError):  # a thread runs a step of the wait
                parked.close()
            raise

    def _forget_idle(self, sleeper: _Sleeper, owner_id: str) -> None:
        """Forget a sleeper without news, and all idle sleepers when dead owners left many."""
        if sleeper.wait is None and not sleeper.happened:
            self._sleepers.pop(owner_id, None)
        if len(self._sleepers) > 2 * MAX_SLEEPERS:
            self._sleepers = {
                owner_id: sleeper
                for owner_id, sleeper in self._sleepers.items()
                if sleeper.wait is not None
            }

    async def close(self) -> None:
        waits = [sleeper.wait for sleeper in self._sleepers.values() if sleeper.wait is not None]
        for owner_id in list(self._sleepers):
            with contextlib.suppress(TidemillError):
                self._broker.wake(owner_id)
        if waits:
            await asyncio.wait(waits)
        self._threads.shutdown(wait=False, cancel_futures=True)


def _step(parked: Parked, until: Until | None = None) -> Until | None:
    """The end of the next sleep of a wait, after this one; None when the wait is over."""
    try:
        return next(parked) if until is None else parked.send(ready_of(until, 0.0))
    except StopIteration:
        return None


class _DescriptorWaits:
    """The waits of one event loop for file descriptors. Several waits may share a descriptor."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}

    async def wait(self, until: Until) -> None:
        """Wait until a descriptor is readable or hangs up, or until the time is over."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        fds = {*until.fds, *until.watched}
        try:
            for fd in fds:
                waiting = self._waiting.setdefault(fd, [])
                waiting.append(future)
                if len(waiting) == 1:
                    loop.add_reader(fd, self._is_ready, fd)
            await asyncio.wait([future], timeout=max(0.0, until.seconds))
        finally:
            for fd in fds:
                self._drop(fd, future)

    def _drop(self, fd: int, future: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(fd, [])
        if future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._waiting[fd]
                asyncio.get_running_loop().remove_reader(fd)

    def _is_ready(self, fd: int) -> None:
        for future in self._waiting.get(fd, ()):
            if not future.done():
                future.set_result(None)
