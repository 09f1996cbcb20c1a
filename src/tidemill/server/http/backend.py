"""The backend of the endpoints: the app, the shared owners, and all waits of a server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import OrderedDict
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar

from tidemill.app import Tidemill
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.features import Feature
from tidemill.client.job_handle import Job
from tidemill.client.messages import consumer_here
from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope
from tidemill.core.job import Note, Outcome, Put, Verdict
from tidemill.errors import StoreFull, StoreMoved
from tidemill.server.http.exchange import ClientGone, Exchange
from tidemill.server.http.problems import Problem
from tidemill.server.http.receipts import KEPT, PutsById, Receipt, new_owner_id
from tidemill.server.http.stats_stream import StatsStream
from tidemill.server.http.waits import Waits, give_up_silent_owners, until_first
from tidemill.server.settings import Settings
from tidemill.server.shared_owner import SharedOwner

T = TypeVar("T")

_OUTCOMES = {
    Outcome.SUCCESS: "acknowledged",
    Outcome.RETRY: "failed with an error",
    Outcome.RELEASE: "released",
    Outcome.FAIL: "failed for good",
    Outcome.CANCELLED: "stopped after a request to cancel",
}

LEASE = 30.0
"""Seconds of silence after which the store gives up the shared owner of a server.

A shared owner stays in the store when its server is killed, or ends while clients hold jobs.
"""


REFUSED = 10.0  # seconds after a refused put in which the server reports that puts are refused


# -- shared owners of workers that speak HTTP ------------------------------------------------------


MAX_OWNERS = 100  # shared owners at a time. Each has a thread, and is an owner in the store.
IDLE = 60.0  # seconds after which a shared owner without clients is closed


class _Entry:
    """A shared owner, and the number of requests that use it now."""

    def __init__(self, shared_owner: SharedOwner) -> None:
        self.shared_owner = shared_owner
        self.opened = asyncio.ensure_future(shared_owner.open())
        self.clients = 0
        self.closing: asyncio.TimerHandle | None = None


class TaskOwners:
    """The shared owners of a server by their tasks. ``make`` makes an owner without opening it.

    All clients of such an owner know the same tasks, so each may get any task that it leases.
    """

    def __init__(self, make: Callable[[Sequence[str]], SharedOwner]) -> None:
        self._make = make
        self._entries: dict[tuple[str, ...], _Entry] = {}
        self._ending: set[asyncio.Future[None]] = set()

    def of_owner(self, owner_id: str) -> SharedOwner | None:
        owners = (entry.shared_owner for entry in self._entries.values())
        return next((it for it in owners if it.owner.id == owner_id), None)

    @contextlib.asynccontextmanager
    async def use(self, tasks: Sequence[str]) -> AsyncIterator[SharedOwner]:
        """The shared owner for these tasks; it stays open while the context lasts."""
        names = tuple(sorted(set(tasks)))
        entry = self._entries.get(names) or self._open(names)
        entry.clients += 1
        if entry.closing is not None:
            entry.closing.cancel()
            entry.closing = None
        try:
            await asyncio.shield(entry.opened)
            yield entry.shared_owner
        finally:
            entry.clients -= 1
            if not entry.clients:
                self._leave(names, entry)

    def _open(self, names: tuple[str, ...]) -> _Entry:
        if len(self._entries) >= MAX_OWNERS:
            raise Problem(
                "too-many-requests",
                f"workers of this server already use {MAX_OWNERS} different sets of tasks; name "
                f"the same tasks in each request, or wait {IDLE:g} s",
                headers={"retry-after": f"{IDLE:.0f}"},
            )
        entry = self._entries[names] = _Entry(self._make(names))
        return entry

    def _leave(self, names: tuple[str, ...], entry: _Entry) -> None:
        if self._entries.get(names) is not entry:
            return
        if entry.opened.done() and (entry.opened.cancelled() or entry.opened.exception()):
            del self._entries[names]
            return
        loop = asyncio.get_running_loop()
        entry.closing = loop.call_later(IDLE, self._close, names)

    def _close(self, names: tuple[str, ...]) -> None:
        ending = asyncio.ensure_future(self._entries.pop(names).shared_owner.close())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        for names, entry in list(self._entries.items()):
            if entry.closing is not None:
                entry.closing.cancel()
            with contextlib.suppress(Exception):
                await entry.opened
            self._close(names)
        if self._ending:
            await asyncio.wait(self._ending)


class Backend:
    """The parts that the endpoints of one server share. Made in its event loop."""

    def __init__(self, mill: Tidemill, settings: Settings) -> None:
        self.mill = mill
        mill.runtime.imports_tasks = False
        self.settings = settings
        self.started = clock.wall()
        self.queue = functools.lru_cache(1000)(mill.queue)
        self.stopping = asyncio.Event()
        self.large_body = asyncio.Lock()  # one large body is handled at a time
        self.settled: OrderedDict[Receipt, Outcome] = OrderedDict()  # by the latest receipts
        self.puts_by_id = PutsById()
        self.snapshots = StatsStream(mill, ended=self.stopping.is_set)
        self.task_owners = TaskOwners(self._new_shared_owner)
        self._parts = contextlib.AsyncExitStack()  # what close() closes
        self._refused = "", 0.0  # the error and the time of the latest refused put

    async def put(self, envelopes: Sequence[Envelope]) -> list[Put]:
        """Store jobs, all or none, in one commit. Jobs of other clients may share the commit."""
        with self._noting_refusals():
            if len(envelopes) == 1:
                return [await self.mill.runtime.put_batching.put(envelopes[0])]
            return await self.mill.runtime.threaded(self.mill.broker.put, envelopes)

    async def publish(
        self, topic: str, body: Any, mandatory: bool, options: Mapping[str, Any]
    ) -> list[Job[Any]]:
        """Put a copy of a message into each queue that is bound to the topic, in one commit."""
        with self._noting_refusals():
            return await self.mill.apublish(topic, body, mandatory=mandatory, **options)

    @contextlib.contextmanager
    def _noting_refusals(self) -> Iterator[None]:
        """Remember whether the store accepted the jobs of a block."""
        try:
            yield
        except (StoreFull, StoreMoved) as error:
            self._refused = str(error), time.monotonic()
            raise
        self._refused = "", 0.0

    async def read_declarations(self, tasks: Iterable[str | None]) -> None:
        """Read the declared options of tasks in a thread, before envelopes are made."""
        declarations = self.mill.runtime.declarations
        if stale := declarations.stale(task for task in tasks if task):
            await self.run(declarations.read, stale)

    def refusal(self, facts: Mapping[str, Any]) -> str:
        """The reason why the store refuses puts; empty when it accepts them."""
        if facts.get("moves_to"):
            return f"this store moves to {facts['moves_to']}"
        if facts.get("puts_refused"):
            return str(facts["puts_refused"])
        error, when = self._refused
        return error if time.monotonic() - when < REFUSED else ""

    async def settle(self, receipt: Receipt, verdict: Verdict) -> bool:
        """Settle a job; False when its lease was lost. A repeated request gets the same answer."""
        shared_owner = self._shared_owner_of(receipt)
        if shared_owner is not None:
            done = await shared_owner.settle(verdict)
        else:
            step = Step(receipt.owner, [verdict], behalf=True)
            done = (await self._exchange_for_another_server(step)).settled == [True]
        if done:
            self.settled[receipt] = Outcome(verdict.outcome)
            if len(self.settled) > KEPT:
                self.settled.popitem(last=False)
            return True
        before = self.settled.get(receipt)
        if before not in (None, verdict.outcome):
            raise self._already_settled(before)
        return before is not None

    @staticmethod
    def _already_settled(outcome: Outcome) -> Problem:
        return Problem(
            "already-settled",
            f"this receipt has already settled the job ({_OUTCOMES[outcome]}); nothing was changed",
        )

    async def touch(self, receipt: Receipt, seconds: float, notes: Sequence[Note] = ()) -> bool:
        """Restart a job's ttr, and store its progress and log; False when its lease was lost."""
        shared_owner = self._shared_owner_of(receipt)
        if shared_owner is not None:
            done = await shared_owner.touch(receipt.token, seconds, notes=notes)
        else:
            step = Step(receipt.owner, touch=[(receipt.token, seconds)], notes=notes, behalf=True)
            done = (await self._exchange_for_another_server(step)).touched == [True]
        before = self.settled.get(receipt)
        if not done and before is not None:
            raise self._already_settled(before)
        return done

    def _shared_owner_of(self, receipt: Receipt) -> SharedOwner | None:
        """The shared owner that reserved the job; None when another server reserved it."""
        if receipt.owner == self.shared_owner.owner.id:
            return self.shared_owner
        return self.task_owners.of_owner(receipt.owner)

    async def _exchange_for_another_server(self, step: Step) -> Reply:
        """Take a step for a shared owner of another server, or of this server before a restart."""
        if Feature.REMOTE_OWNERS not in self.mill.broker.features:
            return Reply()
        return await self.run(self.mill.broker.exchange, step)

    def stop(self) -> None:
        """Begin to shut down: answer all requests that wait."""
        self.stopping.set()
        self._last_events = asyncio.ensure_future(self.snapshots.wake())

    async def run(self, function: Callable[..., T], *args: object) -> T:
        return await self.mill.runtime.threaded(function, *args)

    async def open(self) -> None:
        broker = await asyncio.to_thread(lambda: self.mill.broker)
        self.shared_owner = self._new_shared_owner()  # for messages
        self.waits = Waits(broker)
        for part in (self.shared_owner, self.task_owners, self.waits):  # the last is closed first
            self._parts.push_async_callback(part.close)
        await self.shared_owner.open()
        if Feature.REMOTE_OWNERS in broker.features:
            counting = asyncio.ensure_future(give_up_silent_owners(broker, self.stopping))
            self._parts.push_async_callback(asyncio.wait, [counting])

    def _new_shared_owner(self, tasks: Sequence[str] = ()) -> SharedOwner:
        """A shared owner for messages, or for these tasks; it is not open yet."""
        owner = consumer_here(new_owner_id(), "server ")
        if not tasks:
            owner.started = self.started
        broker = self.mill.broker
        # Clients keep their jobs when the server ends. They lose a job when its ttr is over. They
        # also lose their jobs when the next server finds that this owner was silent for its lease.
        stays = Feature.REMOTE_OWNERS in broker.features
        if stays:
            owner.lease = LEASE
        return SharedOwner(broker, owner, knows=tasks, stays=stays)

    async def poll(self, exchange: Exchange, work: Coroutine[Any, Any, T], late: T) -> T:
        """The result of work that waits; ``late`` when the server ends first."""
        working = asyncio.ensure_future(work)
        try:
            await until_first(asyncio.shield(exchange.leaving()), self.stopping, working)
            working.cancel()  # does nothing when the work is done
            await asyncio.wait([working])
            if not working.cancelled():
                return working.result()
            if exchange.has_left:
                raise ClientGone
            return late
        finally:
            working.cancel()

    async def await_end(self, job: Job[Any], seconds: float) -> None:
        """Wait until a job has ended; ResultTimeout if it has not ended in time."""
        if not self.waits.can_watch:
            await job.await_end(seconds)
            return
        await self.waits.until_ended([job.id], seconds)
        await self.run(job.wait, 0)

    async def close(self) -> None:
        """Close everything but the app, which the caller closes."""
        self.stopping.set()
        await self._parts.aclose()
