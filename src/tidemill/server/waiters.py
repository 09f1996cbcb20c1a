"""Clients that wait for jobs, and the order in which they get jobs.

A look is a request to the store for jobs of some queues. A client that waits after its first look
has found its queues empty, so one look can serve all these clients. A job goes to the client that
has waited longest for its queue; the order of a client's queues matters for its first look only.
"""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tidemill.brokers.contract.exchange import Mode, Want
from tidemill.core.envelope import Envelope
from tidemill.core.job import Lease

ANSWER_BYTES = 8 * 1024 * 1024
"""Bytes after which an answer gets no more jobs, even if its client asked for more."""

MIN_BATCH, MAX_BATCH = 16, 256
"""Bounds of the number of jobs to lease at a time; the number is small after large jobs."""


class PendingCommit:
    """A commit of the store that is still under way, although clients already have its jobs.

    ``failed`` is set when the store undid the commit. Then the leases of its jobs were never
    stored. Other owners may have leases with the same tokens, so no verdict may use these tokens.
    """

    __slots__ = ("failed",)

    def __init__(self) -> None:
        self.failed = False


class JobKinds(NamedTuple):
    """The kinds of jobs to lease. With ``knows``, other tasks are given back."""

    tasks: bool = False
    messages: bool = True
    knows: tuple[str, ...] = ()


class ReservedJob(NamedTuple):
    lease: Lease
    envelope: Envelope
    commit: PendingCommit | None = None


def size_of(lease: Lease) -> int:
    """Bytes of a job and of the results of its parents."""
    size = len(lease.envelope)
    return size + sum(len(parent.result) for parent in lease.inputs) if lease.inputs else size


class BatchSize:
    """The number of jobs to lease at a time, by the sizes of the latest; it may begin ``few``."""

    def __init__(self, *, few: bool) -> None:
        self.count = MIN_BATCH if few else MAX_BATCH

    def learn(self, leases: Sequence[Lease]) -> None:
        if leases:
            size = sum(map(size_of, leases))
            fit = ANSWER_BYTES * len(leases) // max(size, 1)
            self.count = max(MIN_BATCH, min(MAX_BATCH, fit))


class Waiter:
    """One client that waits for up to ``room`` jobs of some queues."""

    __slots__ = ("answer", "jobs", "joined", "late", "looked", "mode", "queues", "room", "size")

    def __init__(
        self,
        queues: tuple[str, ...],
        room: int,
        mode: Mode,
        answer: asyncio.Future[list[ReservedJob]],
    ) -> None:
        self.queues = queues
        self.room = room
        self.mode = mode
        self.answer = answer
        self.jobs: list[ReservedJob] = []
        self.size = 0  # bytes of its jobs
        self.looked = False  # True after its first look: the store had no more jobs in its queues
        self.joined = False  # True if it came during a sleep of the dispatcher
        self.late = False  # True: the time is over, but the first look must still answer

    def is_plain(self, merged: Mode) -> bool:
        """Whether a look for many clients gives this client the same job as its own look."""
        return self.room == 1 and (len(self.queues) == 1 or self.mode is merged is Mode.MERGED)


class Waiters:
    """All clients that wait, by queue, the longest waiting first. Used by one thread only."""

    def __init__(self) -> None:
        self._by_queue: dict[str, dict[Waiter, None]] = {}
        # By queue: jobs that clients can take after their looks, and clients that want several.
        self._room, self._large = collections.Counter[str](), collections.Counter[str]()
        self._most = math.inf  # the next look for large numbers looks for at most this number
        self._first: dict[Waiter, None] = {}  # clients whose first look is under way
        self._new: dict[tuple[tuple[str, ...], Mode], dict[Waiter, None]] = {}
        self._turn = False

    def add(self, waiter: Waiter) -> None:
        """Add a client. Its first look is still to come."""
        for name in waiter.queues:
            self._by_queue.setdefault(name, {})[waiter] = None
        self._new.setdefault((waiter.queues, waiter.mode), {})[waiter] = None

    def drop(self, waiter: Waiter) -> None:
        """Remove a client; does nothing when the client does not wait."""
        if waiter not in self._by_queue.get(waiter.queues[0], ()):
            return
        for name in waiter.queues:
            waiting = self._by_queue[name]
            del waiting[waiter]
            if not waiting:
                del self._by_queue[name]
        if waiter.looked:
            self._count(waiter, -1)
        self._no_longer_new(waiter)

    def __bool__(self) -> bool:
        return bool(self._by_queue)

    def __iter__(self) -> Iterator[Waiter]:
        return iter({waiter: None for waiting in self._by_queue.values() for waiter in waiting})

    def queues(self) -> frozenset[str]:
        return frozenset(self._by_queue)

    @property
    def to_look(self) -> bool:
        """True when the first look of some client is still to come."""
        return bool(self._new)

    def want(self, merged: Mode, kinds: JobKinds) -> tuple[Want, list[Waiter]]:
        """The next request to the store, and the clients for which it is the first look.

        The request never leases more jobs than clients can take, even if all jobs come from one
        queue. A client whose first look is still to come gets none: another queue may have a better
        job. When all clients have looked, the request covers all queues and announces the sleep.
        """
        queues, mode, self._first = tuple(self._by_queue), merged, {}
        sleep = not self._new
        if self._new:
            queues = self._queues_without_new()
            if not queues:
                (queues, mode), group = next(iter(self._new.items()))
                self._first = dict(group)
        elif self._large and (large := self._queues_of_large()):
            queues, sleep = large, False
        count = min(self._room[name] for name in queues)
        count += sum(waiter.room for waiter in self._first)
        want = Want(count, queues, mode, kinds.tasks, messages=kinds.messages, sleep=sleep)
        return want, list(self._first)

    def _queues_without_new(self) -> tuple[str, ...]:
        """The queues that no new client waits for; every second call returns none."""
        self._turn = not self._turn  # the others must not starve while new clients keep coming
        if self._turn:
            return ()
        looked_at = {name for queues, _ in self._new for name in queues}
        return tuple(name for name in self._by_queue if name not in looked_at)

    def _queues_of_large(self) -> tuple[str, ...]:
        """The queues whose clients want the most jobs; the next call is for half as many."""
        # A look for all clients leases no more jobs than the clients of any one queue can take.
        enough = 2 * min(self._room[name] for name in self._by_queue)
        large = (name for name, clients in self._large.items() if clients)
        rooms = {name: room for name in large if enough < (room := self._room[name]) <= self._most}
        most = max(rooms.values(), default=math.inf)
        self._most = most / 2
        return tuple(name for name, room in rooms.items() if room > self._most)

    def looked(self, waiters: Sequence[Waiter]) -> None:
        """Record that the store had no more jobs in the queues of these clients."""
        for waiter in waiters:
            if not waiter.looked and waiter in self._by_queue.get(waiter.queues[0], ()):
                self._count(waiter, 1)
            waiter.looked = True
            self._no_longer_new(waiter)

    def hand_out(self, job: ReservedJob) -> Waiter | None:
        """Give a job to its client, and return the client; None when nobody waits for the job."""
        for waiter in self._by_queue.get(job.envelope.queue, ()):
            if not waiter.looked and waiter not in self._first:
                continue
            waiter.jobs.append(job)
            waiter.size += size_of(job.lease)
            if len(waiter.jobs) == waiter.room or waiter.size >= ANSWER_BYTES:
                self.drop(waiter)
            return waiter
        return None

    def _count(self, waiter: Waiter, sign: int) -> None:
        for name in waiter.queues:
            self._room[name] += sign * waiter.room
            self._large[name] += sign * (waiter.room > 1)
            if not self._room[name]:
                del self._room[name], self._large[name]

    def _no_longer_new(self, waiter: Waiter) -> None:
        group = self._new.get((waiter.queues, waiter.mode), {})
        if waiter in group:
            del group[waiter]
            if not group:
                del self._new[waiter.queues, waiter.mode]
