"""Owners elsewhere that sleep: the event loop waits for what ends their sleep.

A few threads make the steps of the wait, which may block (:mod:`tidemill.brokers.parking`).

An owner asks, and is answered once something may have happened, or when the time is over. It asks
on while it is up, so a hint between two of its sleeps answers it at once; and what ended a wait
whose answer nobody took is kept until its next exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tidemill.brokers.base import Broker
from tidemill.brokers.calls import LONGEST
from tidemill.brokers.parking import Parked, Parking, Until, ready_of
from tidemill.errors import TidemillError
from tidemill.server.readers import Readers

__all__ = ["Sleeps"]

MOST = 2000
"""Owners that sleep at a time; more are told to look every second."""

THREADS = 16
"""Waits that make a step at a time."""

_STRANGE = 0.2
"""Seconds that an owner is held up that begins with another server: it shall not go round."""


class _Bed:
    """One owner's place: the wait that goes on, and whether something has happened since."""

    __slots__ = ("asked", "happened", "wait")

    def __init__(self) -> None:
        self.wait: asyncio.Future[bool] | None = None
        self.asked = 0  # how often; only the last question is still somebody's
        self.happened = False


class Sleeps:
    """The sleeping owners of one server. In its event loop, but for :meth:`exchanges`."""

    def __init__(self, broker: Broker, name: str, stopping: asyncio.Event) -> None:
        self._broker = broker
        self._name = name
        self._stopping = stopping
        self._beds: dict[str, _Bed] = {}
        self._asleep = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="server-wait")
        self._readers = Readers()

    def exchanges(self, owner_id: str) -> None:
        """An owner looks now: what happened before is no news. From any thread."""
        bed = self._beds.get(owner_id)
        if bed is not None:
            bed.happened = False

    async def wait(
        self,
        owner_id: str,
        timeout: float,
        server: str,
        gone: Callable[[], Coroutine[Any, Any, object]],
    ) -> bool:
        """True as soon as something may have happened, False when the time is over.

        ``gone`` returns when nobody wants to know any more.
        """
        if server != self._name:
            await asyncio.sleep(_STRANGE)
            return True
        if self._asleep >= MOST:
            await asyncio.sleep(1.0)
            return True
        bed = self._beds.setdefault(owner_id, _Bed())
        bed.asked += 1
        mine = bed.asked
        while bed.wait is not None:  # of somebody who has gone, or has asked again
            self._broker.wake(owner_id)
            await asyncio.wait([bed.wait])
        if bed.asked != mine:
            return False
        if bed.happened or self._stopping.is_set():
            return True
        wait = bed.wait = asyncio.ensure_future(self._sleep(bed, owner_id, timeout))
        others = [asyncio.ensure_future(gone()), asyncio.ensure_future(self._stopping.wait())]
        try:
            await asyncio.wait([wait, *others], return_when=asyncio.FIRST_COMPLETED)
            if not wait.done():
                self._broker.wake(owner_id)
            return await wait
        finally:
            for other in others:
                other.cancel()
            self._make(bed, owner_id)

    async def _sleep(self, bed: _Bed, owner_id: str, timeout: float) -> bool:
        loop = asyncio.get_running_loop()
        timeout = min(timeout, LONGEST)
        until = loop.time() + timeout
        self._asleep += 1
        try:
            await self._park(owner_id, timeout)
        except TidemillError:
            bed.happened = True  # it shall hear of it with its exchange
            await asyncio.sleep(_STRANGE)
        else:
            bed.happened |= loop.time() < until
        finally:
            bed.wait = None
            self._asleep -= 1
        return bed.happened

    async def _park(self, owner_id: str, timeout: float) -> None:
        """The wait of an owner."""
        assert isinstance(self._broker, Parking), self._broker.url
        loop = asyncio.get_running_loop()
        parked = self._broker.parked(owner_id, timeout)
        try:
            until = await loop.run_in_executor(self._threads, _begin, parked)
            while until is not None:
                await self._readers.wait(until)
                until = await loop.run_in_executor(self._threads, _go_on, parked, until)
        except BaseException:
            with contextlib.suppress(ValueError):  # a thread is in a step of it
                parked.close()
            raise

    def _make(self, bed: _Bed, owner_id: str) -> None:
        """Clear away what says nothing; and what was left by those who died, if it is much."""
        if bed.wait is None and not bed.happened:
            self._beds.pop(owner_id, None)
        if len(self._beds) > 2 * MOST:
            self._beds = {key: bed for key, bed in self._beds.items() if bed.wait is not None}

    async def close(self) -> None:
        """End all waits."""
        waits = [bed.wait for bed in self._beds.values() if bed.wait is not None]
        for owner_id in list(self._beds):
            with contextlib.suppress(TidemillError):
                self._broker.wake(owner_id)
        if waits:
            await asyncio.wait(waits)
        self._threads.shutdown(wait=False, cancel_futures=True)


def _begin(parked: Parked) -> Until | None:
    """What a wait sleeps on; None when it need not sleep."""
    return next(parked, None)


def _go_on(parked: Parked, until: Until) -> Until | None:
    """What a wait sleeps on next, after this; None when it is over."""
    try:
        return parked.send(ready_of(until, 0.0))
    except StopIteration:
        return None
