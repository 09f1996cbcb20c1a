"""The state of a beanstalk port: numbers of jobs, tubes, clients with their reservations, counters.

Ids of beanstalkd are unsigned 64-bit integers, ids of tidemill are texts. A job that is put with
number 17 has the id ``#000000000017``. When a job with this id exists already, the number is
skipped. A job of another producer gets a number when a client of the port first sees the job. This
process remembers the number for a while.

A tube exists while a client of the port uses or watches it, or while the store has jobs in it.
A pause applies to the clients of this port, and ends when the port closes.
"""

from __future__ import annotations

import asyncio
import collections
import os
import re
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.job_numbers import with_job_numbers
from tidemill.client.messages import consumer_here
from tidemill.core.clock import new_id
from tidemill.core.job import Lease
from tidemill.server.shared_owner import SharedOwner
from tidemill.server.waiters import PendingCommit

T = TypeVar("T")

TALLIES = 100_000  # the number of jobs whose counters are kept: the jobs with the latest events


# -- numbers of jobs -------------------------------------------------------------------------------


BLOCK = 1000  # numbers taken from the store at once

FOREIGN = 100_000
"""The most jobs of other producers whose numbers stay in memory: the jobs seen last."""

_OWN = re.compile(r"#([0-9]{12}|[1-9][0-9]{12,19})")


def id_of(number: int) -> str:
    """The id of a job that is put with a number. Ids sort like their numbers."""
    return f"#{number:012d}"


def number_of(job_id: str) -> int | None:
    """The number in an id that :func:`id_of` made; None for any other id."""
    found = _OWN.fullmatch(job_id)
    number = int(found[1]) if found else 2**64
    return number if number < 2**64 else None


class JobNumbers:
    """The numbers of one port. ``reserve`` takes numbers from the store and returns the first."""

    def __init__(self, reserve: Callable[[int], Awaitable[int]]) -> None:
        self._reserve = reserve
        self._lock = asyncio.Lock()
        self._block = iter(range(0))
        self._ids: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._numbers: dict[str, int] = {}

    async def draw(self) -> int:
        async with self._lock:
            number = next(self._block, None)
            if number is None:
                number = await self._reserve(BLOCK)
                self._block = iter(range(number + 1, number + BLOCK))
            return number

    async def skip(self, count: int) -> None:
        """Skip ``count`` numbers, since other jobs have them already."""
        async with self._lock:
            await self._reserve(count)
            self._block = iter(range(0))

    def id_of(self, number: int) -> str:
        return self._ids.get(number) or id_of(number)

    async def of(self, job_id: str) -> int:
        """The number of a job. A job without a number gets a new number."""
        number = number_of(job_id)
        if number is not None:
            return number
        number = self._numbers.get(job_id)
        if number is None:
            number = await self.draw()
            if job_id in self._numbers:  # another client saw the job meanwhile
                return self._numbers[job_id]
            self._numbers[job_id] = number
            if len(self._numbers) > FOREIGN:
                _, oldest = self._ids.popitem(last=False)
                del self._numbers[oldest]
        self._ids[number] = job_id
        self._ids.move_to_end(number)
        return number


# -- tubes, and the state of one client ------------------------------------------------------------


MARGIN = 1.0  # in the last ``MARGIN`` seconds of a ttr, a client gets DEADLINE_SOON
KEPT = 10_000  # the number of tubes above which unused tubes and their counters are forgotten

_NEVER = float("inf")


class Tube:
    """One tube. Times are monotonic."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.using = self.watching = self.waiting = 0
        self.deletes = self.pauses = 0
        self.paused_for = 0
        self.paused_until = 0.0

    @property
    def is_in_use(self) -> bool:
        return bool(self.using or self.watching)

    def pause_left(self) -> float:
        """Seconds until the end of the pause."""
        if not self.paused_for:
            return 0.0
        left = self.paused_until - time.monotonic()
        if left <= 0:
            self.paused_for = 0
        return max(0.0, left)


class Tubes:
    """All tubes of a port, by name."""

    def __init__(self) -> None:
        self._tubes: dict[str, Tube] = {"default": Tube("default")}  # in order of creation
        self._most = KEPT

    def __getitem__(self, name: str) -> Tube:
        tube = self._tubes.get(name)
        if tube is None:
            if len(self._tubes) > self._most:
                self._forget()
            tube = self._tubes[name] = Tube(name)
        return tube

    def _forget(self) -> None:
        """Forget unused tubes. The next call comes when there are twice as many tubes as now."""
        idle = [n for n, t in self._tubes.items() if not t.is_in_use and not t.pause_left()]
        for name in idle:
            if name != "default":
                del self._tubes[name]
        self._most = max(KEPT, 2 * len(self._tubes))

    def places(self) -> dict[str, int]:
        """The tubes by name, numbered in order of creation."""
        return {name: place for place, name in enumerate(self._tubes)}

    def is_in_use(self, name: str) -> bool:
        """Whether a tube exists even without jobs in the store."""
        tube = self._tubes.get(name)
        return name == "default" or (tube is not None and tube.is_in_use)

    def in_use(self) -> list[str]:
        return [name for name in self._tubes if self.is_in_use(name)]


class Reservation(msgspec.Struct, gc=False):
    """A job that a client has reserved.

    ``hands_on`` is the id of a task whose result other jobs wait for, else empty.
    ``deadline`` is monotonic time; infinity for a job with ttr 0, which is already acknowledged.
    """

    number: int
    tube: str
    token: int
    ttr: float
    leased: float
    deadline: float
    commit: PendingCommit | None = None
    hands_on: str = ""


class Client:
    """One connection. ``interrupt`` ends a wait; ``hang_up`` closes the connection at once."""

    def __init__(
        self, tubes: Tubes, timed_out: Callable[[Reservation], None], hang_up: Callable[[], None]
    ) -> None:
        self._tubes = tubes
        self._timed_out = timed_out
        self.hang_up = hang_up
        self.use = tubes["default"]
        self.watch: dict[str, Tube] = {"default": self.use}
        self.use.using += 1
        self.use.watching += 1
        self.reservations: dict[int, Reservation] = {}
        self.produces = self.works = False
        self.waiting = False
        self.has_ended = False  # the client sends nothing more
        self.has_left = False  # the connection is closed
        self.interrupt: Callable[[], None] = _nothing

    def close(self) -> list[Reservation]:
        """Leave all tubes; return the reservations that are left."""
        self.use.using -= 1
        for tube in self.watch.values():
            tube.watching -= 1
        self.watch = {}
        return list(self.reservations.values())

    # -- tubes ------------------------------------------------------------------------------------

    def use_tube(self, name: str) -> None:
        self.use.using -= 1
        self.use = self._tubes[name]
        self.use.using += 1

    def watch_tube(self, name: str) -> None:
        if name not in self.watch:
            tube = self.watch[name] = self._tubes[name]
            tube.watching += 1

    def ignore_tube(self, name: str) -> bool:
        """Stop watching a tube; False when it is the only watched tube."""
        if name in self.watch:
            if len(self.watch) == 1:
                return False
            self.watch.pop(name).watching -= 1
        return True

    def wait(self, waiting: bool) -> None:
        """Set whether the client waits for a job."""
        if waiting != self.waiting:
            self.waiting = waiting
            for tube in self.watch.values():
                tube.waiting += 1 if waiting else -1

    # -- jobs -------------------------------------------------------------------------------------

    def reservation(self, number: int) -> Reservation | None:
        """The client's reservation of a job; None when there is none, or its ttr is over."""
        reservation = self.reservations.get(number)
        if reservation is not None and reservation.deadline <= time.monotonic():
            self.end_late()
            return None
        return reservation

    def end_late(self) -> None:
        """Remove reservations whose ttr is over: the store gives their jobs to other clients."""
        now = time.monotonic()
        for late in [it for it in self.reservations.values() if it.deadline <= now]:
            del self.reservations[late.number]
            self._timed_out(late)

    def soonest(self) -> float:
        """The time at which the client must get DEADLINE_SOON; infinity for never."""
        self.end_late()
        return min((it.deadline for it in self.reservations.values()), default=_NEVER) - MARGIN


def _nothing() -> None: ...


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
        self.mill = mill
        self.broker = mill.broker
        self.store_numbers = with_job_numbers(mill.broker, "--beanstalk")
        self.tasks = tasks
        self.max_job_size = max_job_size
        self.owner = consumer_here(new_id(), "beanstalk ")
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
