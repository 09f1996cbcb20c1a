"""What the endpoints act on: the app on its broker, puts that share commits, the end of it all."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tidemill.app import Tidemill
from tidemill.brokers.base import Feature, Reply, Step
from tidemill.job import Envelope, Owner, Put, Verdict
from tidemill.server.desk import Desk
from tidemill.server.polling import Polls
from tidemill.server.problems import Problem
from tidemill.server.receipts import new_owner_id, parse
from tidemill.server.settings import Settings
from tidemill.server.silence import count_silence
from tidemill.server.snapshots import Snapshots

__all__ = ["Backend"]

T = TypeVar("T")

LEASE = 30.0
"""Seconds after which a server is forgotten that was killed, or whose clients held something at its
end and hold it no more."""


class Backend:
    """One for each server. Made in its event loop."""

    def __init__(self, mill: Tidemill, settings: Settings) -> None:
        self.mill = mill
        self.settings = settings
        self.started = time.time()
        self.queue = functools.lru_cache(1000)(mill.queue)
        self.stopping = asyncio.Event()
        self.polls = Polls()
        self.snapshots = Snapshots(mill, ended=self.stopping.is_set)
        self._desk: Desk | None = None
        self._counting: asyncio.Future[None] | None = None

    async def put(self, envelopes: Sequence[Envelope]) -> list[Put]:
        """Store jobs, all or none, in a commit shared with others who put meanwhile."""
        if len(envelopes) == 1:
            return [await self.mill.gathered.put(envelopes[0])]
        return await self.mill.threaded(self.mill.broker.put, envelopes)

    async def settle(self, receipt: str, verdict: Callable[[int], Verdict]) -> bool:
        """Say what became of a message; False when it was lost."""
        owner, token = parse(receipt)
        if owner == self.desk.owner.id:
            return await self.desk.settle(verdict(token))
        step = Step(owner, [verdict(token)], behalf=True)
        return (await self._of_another(step)).settled == [True]

    async def settle_all(
        self, receipts: Sequence[str], verdict: Callable[[int], Verdict]
    ) -> list[bool]:
        """The same of many, in order; what is no receipt is none that could be settled."""

        async def one(receipt: str) -> bool:
            try:
                return await self.settle(receipt, verdict)
            except Problem:
                return False

        return list(await asyncio.gather(*map(one, receipts)))

    async def touch(self, receipt: str, seconds: float) -> bool:
        """More time for a message; False when it was lost."""
        owner, token = parse(receipt)
        if owner == self.desk.owner.id:
            return await self.desk.touch(token, seconds)
        step = Step(owner, touch=[(token, seconds)], behalf=True)
        return (await self._of_another(step)).touched == [True]

    async def _of_another(self, step: Step) -> Reply:
        """What is said of another server's: one beside this, or this before it was restarted."""
        if Feature.ELSEWHERE not in self.mill.broker.features:
            return Reply()
        return await self.run(self.mill.broker.exchange, step)

    def stop(self) -> None:
        """Begin to end: what waits is answered."""
        self.stopping.set()
        self.polls.end()
        self._last_words = asyncio.ensure_future(self.snapshots.wake())

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """A call that blocks."""
        return await self.mill.threaded(function, *args)

    async def open(self) -> None:
        """Reach the store.

        Raises:
            BrokerUnavailable: it cannot be reached.
        """
        broker = await asyncio.to_thread(lambda: self.mill.broker)
        host, pid = socket.gethostname(), os.getpid()
        owner = Owner(
            id=new_owner_id(),
            kind="consumer",
            name=f"server {host}:{pid}",
            host=host,
            pid=pid,
            started=self.started,
        )
        # What clients hold is theirs, and not lost with the server: until its ttr is over, or the
        # next server hears nothing of it for so long.
        stays = Feature.ELSEWHERE in broker.features
        if stays:
            owner.lease = LEASE
        self._desk = Desk(broker, owner, stays=stays)
        await self._desk.open()
        if Feature.ELSEWHERE in broker.features:
            self._counting = asyncio.ensure_future(count_silence(broker, self.stopping))

    @property
    def desk(self) -> Desk:
        """Where messages are taken and settled."""
        assert self._desk is not None, "not open"
        return self._desk

    async def close(self) -> None:
        """Give up what this holds; the app is its owner's to close."""
        if self._counting is not None:
            self.stopping.set()
            await self._counting
        if self._desk is not None:
            await self._desk.close()
