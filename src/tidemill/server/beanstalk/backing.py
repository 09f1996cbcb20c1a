"""What all clients of a port share: the store behind it, numbers, tubes and counters."""

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
from tidemill.brokers.naming import naming
from tidemill.clock import new_id, wall_time
from tidemill.job import Lease, Owner
from tidemill.server.beanstalk.client import Client, Hold
from tidemill.server.beanstalk.numbers import Numbers
from tidemill.server.beanstalk.tubes import Tubes
from tidemill.server.desk import Desk, Pledge

__all__ = ["Backing", "Tally"]

T = TypeVar("T")

TALLIES = 100_000
"""Jobs whose counters are kept: those something happened to last."""


class Tally(msgspec.Struct, gc=False):
    """What happened to a job here since the port began; the store keeps no such counters."""

    reserves: int = 0
    timeouts: int = 0
    releases: int = 0
    buries: int = 0
    kicks: int = 0
    delay: int = -1  # of the latest release


class Backing:
    """One for each port. Made in its event loop, when the store can be reached."""

    def __init__(self, mill: Tidemill, *, tasks: bool, max_job_size: int) -> None:
        host, pid = socket.gethostname(), os.getpid()
        self.mill = mill
        self.broker = mill.broker
        self.naming = naming(mill.broker, "--beanstalk")
        self.tasks = tasks
        self.max_job_size = max_job_size
        self.owner = Owner(
            id=new_id(),
            kind="consumer",
            name=f"beanstalk {host}:{pid}",
            host=host,
            pid=pid,
            started=wall_time(),
        )
        self.desk = Desk(self.broker, self.owner, tasks=tasks, broken=self._broken)
        self.numbers = Numbers(lambda count: self.run(self.naming.numbers, count))
        self.tubes = Tubes()
        self.clients: set[Client] = set()
        self.draining = False
        self.begun = time.monotonic()
        self.instance = os.urandom(8).hex()
        self.connections = 0  # ever
        self.counts: collections.Counter[str] = collections.Counter()  # by verb
        self.timeouts = 0
        self._tallies: collections.OrderedDict[int, Tally] = collections.OrderedDict()

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """A call that blocks."""
        return await self.mill.threaded(function, *args)

    def come_due(self) -> None:
        """Have the store move what has come due, as it does when anything is leased."""
        self.naming.lease_named(self.owner.id, [])

    def take_named(self, job_id: str) -> Lease | None:
        """Lease a job by its id. Tasks are for workers, unless the port was told to serve tasks."""
        if not self.tasks:
            record = self.broker.get(job_id)
            if record is not None and record.envelope.task:
                return None
        return self.naming.lease_named(self.owner.id, [job_id])[0]

    async def lease_named(self, job_id: str) -> Lease | None:
        """Lease a job by its id; when the client goes meanwhile, it is given back."""
        call = asyncio.ensure_future(self.run(self.take_named, job_id))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(self._give_back)
            raise

    def _give_back(self, call: asyncio.Future[Lease | None]) -> None:
        if not call.cancelled() and call.exception() is None and (lease := call.result()):
            self.desk.give_back(lease.token)

    # -- clients ----------------------------------------------------------------------------------

    def enter(self, hang_up: Callable[[], None]) -> Client:
        """Somebody has connected."""
        client = Client(self.tubes, self._timed_out, hang_up)
        self.clients.add(client)
        self.connections += 1
        return client

    def leave(self, client: Client) -> None:
        """It has gone: others may have at once what it held."""
        self.clients.discard(client)
        for hold in client.close():
            if hold.ttr:
                self.desk.give_back(hold.token, hold.pledge)

    def _broken(self, pledge: Pledge) -> None:
        """Jobs are lost that some have: they are to know that, as if the server had been killed."""
        for client in list(self.clients):
            if any(hold.pledge is pledge for hold in client.holds.values()):
                client.hang_up()

    def _timed_out(self, hold: Hold) -> None:
        self.timeouts += 1
        self.tally(hold.number).timeouts += 1

    def end_late(self) -> None:
        """Count the jobs whose time is over."""
        for client in self.clients:
            client.end_late()

    def pause(self, tube: str, seconds: int) -> None:
        """Hand out nothing of a tube for so long."""
        paused = self.tubes[tube]
        paused.paused_for = seconds
        paused.paused_until = time.monotonic() + seconds
        paused.pauses += 1
        for client in self.clients:
            if client.waiting and tube in client.watch:
                client.interrupt()

    # -- counters ---------------------------------------------------------------------------------

    def tally(self, number: int) -> Tally:
        """The counters of a job."""
        tally = self._tallies.get(number)
        if tally is None:
            tally = self._tallies[number] = Tally()
            if len(self._tallies) > TALLIES:
                self._tallies.popitem(last=False)
        else:
            self._tallies.move_to_end(number)
        return tally

    def deleted(self, number: int, tube: str) -> None:
        """A job is gone, by the word of a client."""
        self._tallies.pop(number, None)
        self.tubes[tube].deletes += 1
