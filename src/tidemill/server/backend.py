"""What the endpoints act on: the app on its broker, puts that share commits, the end of it all."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tidemill.app import Tidemill
from tidemill.brokers.base import Feature, Reply, Step
from tidemill.errors import StoreFull, StoreMoved
from tidemill.handle import Job
from tidemill.job import Envelope, Note, Outcome, Owner, Put, Verdict
from tidemill.server.desk import Desk
from tidemill.server.polling import Polls
from tidemill.server.problems import Problem
from tidemill.server.receipts import Receipt, new_owner_id
from tidemill.server.settings import Settings
from tidemill.server.settled import Settled
from tidemill.server.silence import count_silence
from tidemill.server.snapshots import Snapshots
from tidemill.server.task_desks import TaskDesks
from tidemill.server.waits import Waits

__all__ = ["Backend"]

T = TypeVar("T")

_HOW = {
    Outcome.SUCCESS: "acknowledged",
    Outcome.RETRY: "failed with an error",
    Outcome.RELEASE: "released",
    Outcome.FAIL: "failed for good",
    Outcome.CANCELLED: "stopped, as was asked",
}

LEASE = 30.0
"""Seconds after which a server is forgotten that was killed, or whose clients held something at its
end and hold it no more."""


REFUSED = 10.0
"""Seconds for which a refused put tells that others are refused, too."""


class Backend:
    """One for each server. Made in its event loop."""

    def __init__(self, mill: Tidemill, settings: Settings) -> None:
        self.mill = mill
        self.settings = settings
        self.started = time.time()
        self.queue = functools.lru_cache(1000)(mill.queue)
        self.stopping = asyncio.Event()
        self.large = asyncio.Lock()  # of whoever makes something of a large body
        self.polls = Polls()
        self.settled = Settled()
        self._waits: Waits | None = None
        self.snapshots = Snapshots(mill, ended=self.stopping.is_set)
        self.tasks = TaskDesks(self._new_desk)
        self._refused = "", 0.0  # the latest put, and when
        self._desk: Desk | None = None
        self._counting: asyncio.Future[None] | None = None

    async def put(self, envelopes: Sequence[Envelope]) -> list[Put]:
        """Store jobs, all or none, in a commit shared with others who put meanwhile."""
        try:
            if len(envelopes) == 1:
                puts = [await self.mill.gathered.put(envelopes[0])]
            else:
                puts = await self.mill.threaded(self.mill.broker.put, envelopes)
        except (StoreFull, StoreMoved) as error:
            self._refused = str(error), time.monotonic()
            raise
        self._refused = "", 0.0
        return puts

    def refusal(self, facts: Mapping[str, Any]) -> str:
        """Why puts are refused, by facts of the store or the latest put; empty: they are not."""
        if facts.get("moves_to"):
            return f"all of this store goes to {facts['moves_to']}"
        if facts.get("puts_refused"):
            return str(facts["puts_refused"])
        error, when = self._refused
        return error if time.monotonic() - when < REFUSED else ""

    async def settle(self, receipt: Receipt, said: Verdict) -> bool:
        """Say what became of a job, also once more; False when it was lost.

        Raises:
            Problem: the receipt settled the job otherwise before.
        """
        desk = self._desk_of(receipt)
        if desk is not None:
            done = await desk.settle(said)
        else:
            step = Step(receipt.owner, [said], behalf=True)
            done = (await self._of_another(step)).settled == [True]
        if done:
            self.settled.add(receipt, said.outcome)
            return True
        before = self.settled.outcome(receipt)
        if before not in (None, said.outcome):
            raise self._settled_before(before)
        return before is not None

    @staticmethod
    def _settled_before(outcome: Outcome) -> Problem:
        return Problem(
            "already-settled",
            f"this receipt has settled the job before: {_HOW[outcome]}; nothing was changed",
        )

    async def touch(self, receipt: Receipt, seconds: float, notes: Sequence[Note] = ()) -> bool:
        """More time for a job, and its progress and log; False when it was lost.

        Raises:
            Problem: the receipt has settled the job.
        """
        desk = self._desk_of(receipt)
        if desk is not None:
            done = await desk.touch(receipt.token, seconds, notes=notes)
        else:
            step = Step(
                receipt.owner, touch=[(receipt.token, seconds)], notes=notes, behalf=True
            )
            done = (await self._of_another(step)).touched == [True]
        before = self.settled.outcome(receipt)
        if not done and before is not None:
            raise self._settled_before(before)
        return done

    def _desk_of(self, receipt: Receipt) -> Desk | None:
        """The desk of this server that handed the job out, if it is open."""
        if receipt.owner == self.desk.owner.id:
            return self.desk
        return self.tasks.of_owner(receipt.owner)

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
        self._waits = Waits(broker)
        self._desk = self._new_desk()
        await self._desk.open()
        if Feature.ELSEWHERE in broker.features:
            self._counting = asyncio.ensure_future(count_silence(broker, self.stopping))

    def _new_desk(self, tasks: Sequence[str] = ()) -> Desk:
        """A desk for messages, or for these tasks; it is not open yet."""
        host, pid = socket.gethostname(), os.getpid()
        owner = Owner(
            id=new_owner_id(),
            kind="consumer",
            name=f"server {host}:{pid}",
            host=host,
            pid=pid,
            started=time.time() if tasks else self.started,
        )
        broker = self.mill.broker
        # What clients hold is theirs, and not lost with the server: until its ttr is over, or the
        # next server hears nothing of it for so long.
        stays = Feature.ELSEWHERE in broker.features
        if stays:
            owner.lease = LEASE
        return Desk(broker, owner, knows=tasks, stays=stays)

    @property
    def waits(self) -> Waits:
        """Who waits for jobs to end."""
        assert self._waits is not None, "not open"
        return self._waits

    async def await_state(self, job: Job[Any], seconds: float) -> None:
        """Wait until a job has ended.

        Raises:
            ResultTimeout: it has not; JobNotFound: it is not there.
        """
        if not self.waits.can_watch:
            await job.await_state(seconds)
            return
        await self.waits.until_ended([job.id], seconds)
        await self.run(job.wait, 0)

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
        if self._waits is not None:
            await self._waits.close()
        await self.tasks.close()
        if self._desk is not None:
            await self._desk.close()
