"""Parked waits: remote owners sleep while the event loop waits for their wake-ups.

A few threads take the steps of a wait, which may block
(:mod:`tidemill.brokers.shared.waits`).

A sleeping owner sends a request. The server answers when something may have happened, or when the
time is over. The request stays open while the owner works, so a hint between two sleeps answers the
request at once. A hint whose answer nobody received is kept until the owner's next exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.rpc import LONGEST
from tidemill.brokers.shared.waits import Parked, Parking, Until, ready_of
from tidemill.errors import TidemillError
from tidemill.server.http.waits import until_first

MAX_SLEEPERS = 2000
"""Owners that sleep at a time; further owners poll every second."""

THREADS = 16
"""Waits whose steps may run at the same time."""

_PAUSE = 0.2
"""Seconds before an early answer, so that the owner does not ask in a busy loop."""


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
        """True as soon as something may have happened, False when the time is over.

        ``gone`` returns when the client has left.
        """
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
        """End all waits."""
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
