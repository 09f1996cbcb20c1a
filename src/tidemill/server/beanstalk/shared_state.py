"""The state that all clients of a beanstalk port share: the store, numbers, tubes and counters."""

from __future__ import annotations

import asyncio
import collections
import os
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.job_numbers import with_job_numbers
from tidemill.core.clock import clock, new_id
from tidemill.core.job import Lease, Owner
from tidemill.server.beanstalk.client import Client, Reservation, Tubes
from tidemill.server.beanstalk.job_numbers import JobNumbers
from tidemill.server.shared_owner import SharedOwner
from tidemill.server.waiters import PendingCommit

T = TypeVar("T")

TALLIES = 100_000
"""The number of jobs whose counters are kept: the jobs with the latest events."""


class JobCounters(msgspec.Struct, gc=False):
    """Counters of one job since the port was opened; the store does not keep them."""

    reserves: int = 0
    timeouts: int = 0
    releases: int = 0
    buries: int = 0
    kicks: int = 0
    delay: int = -1  # seconds, of the latest release; -1 without a release


class PortState:
    """The state of one port. Made in its event loop, when the store is open."""

    def __init__(self, mill: Tidemill, *, tasks: bool, max_job_size: int) -> None:
        host, pid = socket.gethostname(), os.getpid()
        self.mill = mill
        self.broker = mill.broker
        self.store_numbers = with_job_numbers(mill.broker, "--beanstalk")
        self.tasks = tasks
        self.max_job_size = max_job_size
        self.owner = Owner(
            id=new_id(),
            kind="consumer",
            name=f"beanstalk {host}:{pid}",
            host=host,
            pid=pid,
            started=clock.wall(),
        )
        self.shared_owner = SharedOwner(
            self.broker, self.owner, tasks=tasks, on_lost_commit=self._on_lost_commit
        )
        self.numbers = JobNumbers(lambda count: self.run(self.store_numbers.numbers, count))
        self.tubes = Tubes()
        self.clients: set[Client] = set()
        self.draining = False
        self.begun = time.monotonic()
        self.instance = os.urandom(8).hex()
        self.connections = 0  # since the port was opened
        self.counts: collections.Counter[str] = collections.Counter()  # by verb
        self.timeouts = 0
        self._counters: collections.OrderedDict[int, JobCounters] = collections.OrderedDict()

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Make a blocking call in a thread."""
        return await self.mill.runtime.threaded(function, *args)

    def come_due(self) -> None:
        """Make the store move jobs that have come due, as it does before a lease."""
        self.store_numbers.lease_named(self.owner.id, [])

    def take_named(self, job_id: str) -> Lease | None:
        """Lease a job by its id. A task is leased only if the port serves tasks."""
        if not self.tasks:
            record = self.broker.get(job_id)
            if record is not None and record.envelope.task:
                return None
        return self.store_numbers.lease_named(self.owner.id, [job_id])[0]

    async def lease_named(self, job_id: str) -> Lease | None:
        """Lease a job by its id; give it back when the client leaves meanwhile."""
        call = asyncio.ensure_future(self.run(self.take_named, job_id))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(self._give_back)
            raise

    def _give_back(self, call: asyncio.Future[Lease | None]) -> None:
        if not call.cancelled() and call.exception() is None and (lease := call.result()):
            self.shared_owner.give_back(lease.token)

    # -- clients ----------------------------------------------------------------------------------

    def enter(self, hang_up: Callable[[], None]) -> Client:
        """Add a client that has connected."""
        client = Client(self.tubes, self._timed_out, hang_up)
        self.clients.add(client)
        self.connections += 1
        return client

    def leave(self, client: Client) -> None:
        """Remove a client that has left, and give back its jobs."""
        self.clients.discard(client)
        for reservation in client.close():
            if reservation.ttr:
                self.shared_owner.give_back(reservation.token, reservation.commit)

    def _on_lost_commit(self, commit: PendingCommit) -> None:
        """Hang up on clients whose jobs were lost with a commit, as if the server was killed."""
        for client in list(self.clients):
            if any(reservation.commit is commit for reservation in client.reservations.values()):
                client.hang_up()

    def _timed_out(self, reservation: Reservation) -> None:
        self.timeouts += 1
        self.counters_of(reservation.number).timeouts += 1

    def end_late(self) -> None:
        """Remove and count all reservations whose time is over."""
        for client in self.clients:
            client.end_late()

    def pause(self, tube: str, seconds: int) -> None:
        """Deliver no jobs of a tube for ``seconds``."""
        paused = self.tubes[tube]
        paused.paused_for = seconds
        paused.paused_until = time.monotonic() + seconds
        paused.pauses += 1
        for client in self.clients:
            if client.waiting and tube in client.watch:
                client.interrupt()

    # -- counters ---------------------------------------------------------------------------------

    def counters_of(self, number: int) -> JobCounters:
        counters = self._counters.get(number)
        if counters is None:
            counters = self._counters[number] = JobCounters()
            if len(self._counters) > TALLIES:
                self._counters.popitem(last=False)
        else:
            self._counters.move_to_end(number)
        return counters

    def deleted(self, number: int, tube: str) -> None:
        """Count a job that a client has deleted."""
        self._counters.pop(number, None)
        self.tubes[tube].deletes += 1
