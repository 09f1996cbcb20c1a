"""Clients that wait for jobs, and whose turn it is when one comes.

A job of a queue goes to the client that has waited longest among those that named the queue. What
they all wait for can be asked of the store at once, since whoever waits has found its queues empty:
in what order it named them matters only for its first look.
"""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tidemill.brokers.base import Mode, Want
from tidemill.job import Envelope, Lease

__all__ = [
    "ENOUGH",
    "FEWEST",
    "MOST",
    "Ask",
    "Asks",
    "Held",
    "Kinds",
    "Pledge",
    "Portion",
    "size_of",
]

ENOUGH = 8 * 1024 * 1024
"""Bytes of jobs after which a client gets no more in one answer, however many it asked for."""

FEWEST, MOST = 16, 256
"""Jobs that are leased at a time, at most: few when those before were large."""


class Pledge:
    """That jobs which are in the hands of clients already will be theirs: the commit is to come.

    ``broken`` when it failed. Then their tokens may be others', and must not be used.
    """

    __slots__ = ("broken",)

    def __init__(self) -> None:
        self.broken = False


class Kinds(NamedTuple):
    """Which jobs are taken: tasks, messages. With ``knows`` only tasks of these names."""

    tasks: bool = False
    messages: bool = True
    knows: tuple[str, ...] = ()


class Held(NamedTuple):
    """A job in the hands of a client."""

    lease: Lease
    envelope: Envelope
    pledge: Pledge | None = None


def size_of(lease: Lease) -> int:
    """Bytes of a job, with the results of others that come with it."""
    size = len(lease.envelope)
    return size + sum(len(it.result) for it in lease.inputs) if lease.inputs else size


class Portion:
    """How many jobs are leased at a time, by the size of those before; at first few, or most."""

    def __init__(self, *, few: bool) -> None:
        self.count = FEWEST if few else MOST

    def learn(self, leases: Sequence[Lease]) -> None:
        """These were leased."""
        if leases:
            size = sum(map(size_of, leases))
            self.count = max(FEWEST, min(MOST, ENOUGH * len(leases) // max(size, 1)))


class Ask:
    """One client's wish for up to ``room`` jobs of some queues."""

    __slots__ = ("answer", "held", "joined", "late", "looked", "mode", "queues", "room", "size")

    def __init__(
        self, queues: tuple[str, ...], room: int, mode: Mode, answer: asyncio.Future[list[Held]]
    ) -> None:
        self.queues = queues
        self.room = room
        self.mode = mode
        self.answer = answer
        self.held: list[Held] = []
        self.size = 0  # bytes of what it holds
        self.looked = False  # the store had nothing when it was asked
        self.joined = False  # it waits with others who had looked, before its own first look
        self.late = False  # its time is over; it was not looked for yet

    def is_plain(self, merged: Mode) -> bool:
        """Whether a look for many gives it just what one of its own would, in the same order."""
        return self.room == 1 and (len(self.queues) == 1 or self.mode is merged is Mode.MERGED)


class Asks:
    """All that wait, by queue, the longest waiting first. Used by one thread only."""

    def __init__(self) -> None:
        self._by_queue: dict[str, dict[Ask, None]] = {}
        self._room: dict[str, int] = {}  # of those that have looked
        self._first: dict[Ask, None] = {}  # whose first look is under way
        self._new: dict[tuple[tuple[str, ...], Mode], dict[Ask, None]] = {}
        self._many: dict[int, collections.Counter[str]] = {}  # by size: of who wants more than one
        self._below = math.inf  # the size that was looked for last, before the look for all
        self._turn = False

    def add(self, ask: Ask) -> None:
        """Somebody waits from now on; its queues are to be looked at."""
        for name in ask.queues:
            self._by_queue.setdefault(name, {})[ask] = None
        self._new.setdefault((ask.queues, ask.mode), {})[ask] = None

    def drop(self, ask: Ask) -> None:
        """It waits no more; nothing happens when it does not."""
        if ask not in self._by_queue.get(ask.queues[0], ()):
            return
        for name in ask.queues:
            waiting = self._by_queue[name]
            del waiting[ask]
            if not waiting:
                del self._by_queue[name]
        if ask.looked:
            self._count(ask, -1)
        self._old(ask)

    def __bool__(self) -> bool:
        return bool(self._by_queue)

    def __iter__(self) -> Iterator[Ask]:
        return iter({ask: None for waiting in self._by_queue.values() for ask in waiting})

    def queues(self) -> frozenset[str]:
        """All that somebody waits for."""
        return frozenset(self._by_queue)

    @property
    def to_look(self) -> bool:
        """True when somebody's queues have not been looked at yet."""
        return bool(self._new)

    def want(self, merged: Mode, kinds: Kinds, told: int) -> tuple[Want, list[Ask]]:
        """What to ask of the store now, and for whom it is the first look.

        Never more than can be handed on, whichever queue it comes from: to those whose look it is,
        and those that have looked before. Others who have not may have better in another queue.
        When all have looked, it is for the queues of all, and the store may be left to hint us.
        """
        queues, mode, self._first = tuple(self._by_queue), merged, {}
        sleep = not self._new
        if self._new:
            queues = self._rest()
            if not queues:
                (queues, mode), group = next(iter(self._new.items()))
                self._first = dict(group)
        elif self._many and (many := self._for_many()):
            queues, sleep = many, False
        count = min(self._room.get(name, 0) for name in queues)
        count += sum(ask.room for ask in self._first)
        want = Want(
            count,
            queues,
            mode,
            kinds.tasks,
            messages=kinds.messages,
            sleep=sleep,
            knows=kinds.knows,
            told=told,
        )
        return want, list(self._first)

    def _rest(self) -> tuple[str, ...]:
        """Every other time, what new clients do not look at: they may come faster than they go."""
        self._turn = not self._turn
        if self._turn:
            return ()
        looked_at = {name for queues, _ in self._new for name in queues}
        return tuple(name for name in self._by_queue if name not in looked_at)

    def _for_many(self) -> tuple[str, ...]:
        """The queues of those who want many, those who want most first; none when it is all's turn.

        A look for all takes no more than who wants fewest can have. Those go together whose wishes
        do not differ by more than twice, since each look is an exchange.
        """
        least = min(self._room.get(name, 0) for name in self._by_queue)
        sizes = [size for size in self._many if least.bit_length() < size < self._below]
        self._below = max(sizes, default=math.inf)
        return tuple(self._many[max(sizes)]) if sizes else ()

    def looked(self, asks: Sequence[Ask]) -> None:
        """There was nothing more in their queues when the store was asked."""
        for ask in asks:
            if not ask.looked and ask in self._by_queue.get(ask.queues[0], ()):
                self._count(ask, 1)
            ask.looked = True
            self._old(ask)

    def hand(self, held: Held) -> Ask | None:
        """Whose a job is, which has it now; None when nobody waits for it any more."""
        for ask in self._by_queue.get(held.envelope.queue, ()):
            if not ask.looked and ask not in self._first:
                continue
            ask.held.append(held)
            ask.size += size_of(held.lease)
            if len(ask.held) == ask.room or ask.size >= ENOUGH:
                self.drop(ask)
            return ask
        return None

    def _count(self, ask: Ask, sign: int) -> None:
        for name in ask.queues:
            self._room[name] = self._room.get(name, 0) + sign * ask.room
            if not self._room[name]:
                del self._room[name]
        if ask.room == 1:
            return
        size = ask.room.bit_length()
        many = self._many.setdefault(size, collections.Counter())
        for name in ask.queues:
            many[name] += sign
            if not many[name]:
                del many[name]
        if not many:
            del self._many[size]

    def _old(self, ask: Ask) -> None:
        group = self._new.get((ask.queues, ask.mode), {})
        if ask in group:
            del group[ask]
            if not group:
                del self._new[ask.queues, ask.mode]
