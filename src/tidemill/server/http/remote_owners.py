"""Remote owners: when the store gives up the owners of other machines.

Consumers. A process keeps one request open for all its consumers (``present``). When the process
dies, its kernel closes the connection. If the process does not send the request again within
``GRACE``, the server releases its consumers. Each message that they hold gets a failed attempt, as
on the machine of the store.

A request whose time is over gets an answer. A process that does not send the request again may be
dead. The process may also be stopped, or hold its interpreter lock. So it gets the longer time
``LAPSE``.

A load balancer in front of several servers should send a client to the same server each time. A
server does not know the requests of another server.

All owners. The store counts a remote owner as dead when it is silent for its lease. The process
that receives the owner's calls must measure the silence, and this process is the server.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from tidemill.brokers.contract.store import Store
from tidemill.errors import TidemillError
from tidemill.server.http.waits import until_first

log = logging.getLogger("tidemill.server")

GRACE = 5.0
"""Seconds in which a process may send its request again after its connection broke."""

LAPSE = 60.0
"""Seconds in which a process may send its request again after an answer."""

_RETRY = 1.0
"""Seconds until the silence is measured again after an error of the store."""


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
        """Keep the consumers present until the client leaves or the time is over.

        Returns False: the client sends the request again.
        """
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
