"""One owner: the messages it has, those it leased, and what becomes of them.

The server pushes as many messages as it is given credit for, onto shelves (:mod:`.shelf`);
``exchange`` takes leases from there. Credit follows what the owner holds and misses, and so its
measured work. What nobody wanted for a second goes back, so that others get it.

A line that breaks makes everything in hand the server's again, and it hands it out anew: to us,
very likely, and then a job that still runs is recognized, and goes on as if nothing had been; one
that has ended meanwhile ends now. To others, and then it runs twice: at least once means just that.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from tidemill.brokers.base import DEFAULT_TTR, Mode, Reply, Step, Want
from tidemill.brokers.rabbitmq.declaring import Declarer
from tidemill.brokers.rabbitmq.ends import Ends
from tidemill.brokers.rabbitmq.line import Line
from tidemill.brokers.rabbitmq.message import Writer
from tidemill.brokers.rabbitmq.names import Names
from tidemill.brokers.rabbitmq.publisher import Publisher
from tidemill.brokers.rabbitmq.shelf import Hold, Shelf
from tidemill.brokers.rabbitmq.tap import Tap
from tidemill.clock import machine_time, wall_time
from tidemill.errors import BrokerUnavailable
from tidemill.job import Lease, Outcome, Owner, Verdict

__all__ = ["Desk", "Intake"]

log = logging.getLogger("tidemill.rabbitmq")

UNWANTED = 1.0
"""Seconds after which what nobody wants goes back."""

CREDIT_MOST, _EXACT = 4096, 16

_ANSWER_WITHIN = 10.0
"""Seconds the server has to say whether there is a message."""


class Desk(msgspec.Struct, frozen=True):
    """What the owners of a process share."""

    line: Line
    declarer: Declarer
    publisher: Publisher
    names: Names
    writer: Writer
    next_token: Callable[[], int]


class Intake:
    """One owner of this process."""

    def __init__(self, owner: Owner, desk: Desk) -> None:
        self.owner = owner
        self._desk = desk
        self._lock = threading.RLock()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._news, self._asleep = True, False
        self._hungry = self._looking = self._telling = False
        self._kinds: tuple[str, ...] = ("messages",) if owner.kind == "consumer" else ("tasks",)
        self._shelves: dict[str, list[Shelf]] = {}  # by queue, most urgent first
        self._turn = 0
        self._held: dict[int, Hold] = {}  # by token
        self._tap = Tap(desk.line, desk.declarer, owner.name, self._came, self._lost, self._all)
        self._ends = Ends(self._tap, desk.publisher, desk.writer, self._held, self._lock)

    # -- the conversation -----------------------------------------------------------------------

    def exchange(self, step: Step) -> Reply:
        """Settle, renew and lease."""
        want = step.want
        with self._lock:
            self._news = False
            now = machine_time()
            self._run_out(now)
            settled = [self._settle(verdict) for verdict in step.verdicts]
            touched = [self._touch(token, seconds, now) for token, seconds in step.touch]
            leases: list[Lease] = []
            missing = 0
            if want is not None:
                self._know_queues(want)
                leases = [self._lease(hold, now) for hold in self._choose(want)]
                missing = want.count - len(leases)
                self._hungry = want.sleep and missing > 0
                if self._hungry:
                    self._set_credit(want, missing, now)
            more = missing > 0 and not all(shelf.empty for shelf in self._all())
        if want is not None and not want.sleep:
            leases += self._fetch(missing)
        elif not self._hungry and not self._looking:
            self._looking = True
            self._desk.line.do(self._look_later)
        return Reply(settled, touched, leases, next_due=self._next_look(now), more=more)

    def serve(self, queue: str) -> None:
        """Take from one more queue: it was heard of."""
        with self._lock:
            if queue not in self._shelves:
                self._add_shelves(queue)
                self._tell()

    def wait(self, timeout: float, fds: Sequence[int]) -> list[int]:
        """Sleep until something came, a readable descriptor or the timeout."""
        poll = select.poll()
        for fd in (self.bell, *fds):
            poll.register(fd, select.POLLIN)
        until = max(0.0, timeout) if self.arm() else 0.0
        ready = [fd for fd, _ in poll.poll(min(until, 3600.0) * 1000)]
        self.disarm()
        return [fd for fd in ready if fd != self.bell]

    def arm(self) -> bool:
        """Have the bell rung when something comes; False when something has come already."""
        with self._lock:
            self._asleep = not self._news
            return self._asleep

    def disarm(self) -> None:
        """Have it rung no more."""
        with self._lock:
            self._asleep = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)

    def wake(self) -> None:
        """Make the wait return."""
        with self._lock:
            self._news = True
            os.eventfd_write(self.bell, 1)

    def close(self, patience: float) -> None:
        """Give everything back and leave, when what is under way has arrived."""
        self._desk.publisher.flush(patience)
        with self._lock:
            self._held.clear()
        self._tap.close(patience)
        os.close(self.bell)

    def after_fork_child(self) -> None:
        """In a forked child: it was the parent's."""
        with contextlib.suppress(OSError):
            os.close(self.bell)

    # -- choosing -------------------------------------------------------------------------------

    def _know_queues(self, want: Want) -> None:
        kinds = tuple(k for k, on in (("tasks", want.tasks), ("messages", want.messages)) if on)
        if kinds and kinds != self._kinds:
            self._kinds = kinds
            for queue in self._shelves:
                self._add_shelves(queue)
        for queue in want.queues:
            if queue not in self._shelves:
                self._add_shelves(queue)

    def _add_shelves(self, queue: str) -> None:
        known = {shelf.place.name: shelf for shelf in self._shelves.get(queue, ())}
        places = [place for kind in self._kinds for place in self._desk.names.of(queue, kind)]
        shelves = [known.get(place.name) or Shelf(place) for place in places]
        self._shelves = {**self._shelves, queue: shelves}

    def _all(self) -> list[Shelf]:
        return list(itertools.chain.from_iterable(self._shelves.values()))

    def _rows(self, want: Want) -> list[list[Shelf]]:
        """What is to be emptied in order; one row has its turn after the other."""
        rows = [self._shelves[queue] for queue in want.queues or sorted(self._shelves)]
        if want.mode is Mode.STRICT:
            rows = [[shelf for row in rows for shelf in row]]
        return rows

    def _choose(self, want: Want) -> Iterator[Hold]:
        left, rows = want.count, self._rows(want)
        while left and rows:
            self._turn += 1
            row = rows[self._turn % len(rows)]
            shelf = self._first(row)
            if shelf is None:
                rows.remove(row)
            else:
                left -= 1
                yield shelf.take()

    def _first(self, row: Sequence[Shelf]) -> Shelf | None:
        """The shelf to take from; none as long as a more urgent place may have something."""
        for shelf in row:
            if len(shelf):
                return shelf
            if not self._is_empty(shelf):
                return None
        return None

    def _is_empty(self, shelf: Shelf) -> bool:
        """Whether the server has nothing in a place either; if we do not know, it is asked."""
        if not shelf.empty and not shelf.asking:
            shelf.asking = True
            self._desk.line.do(functools.partial(self._ask, shelf))
        return shelf.empty

    def _ask(self, shelf: Shelf) -> None:
        arrivals = shelf.arrivals

        def answer(count: int, why: str) -> None:
            with self._lock:
                shelf.asking = False
                if not count and not why and shelf.arrivals == arrivals:
                    shelf.empty = True
                    self._tell()

        self._desk.declarer.count(shelf.place, answer)

    def _set_credit(self, want: Want, missing: int, now: float) -> None:
        """How much the server may push, of which places.

        Of each place as much as we hold of it and miss, so that there is little that others could
        have and we do not use; of less urgent places nothing before the more urgent are empty.
        """
        changed = False
        for row in self._rows(want):
            for shelf in row:
                shelf.wanted = now
                credit = _rounded(shelf.held + missing)
                if credit > shelf.credit or credit * 4 < shelf.credit:
                    shelf.credit = credit
                    changed = True
                if len(shelf) or not shelf.empty:
                    break
        if changed:
            self._tap.adjust()

    # -- leasing --------------------------------------------------------------------------------

    def _lease(self, hold: Hold, now: float) -> Lease:
        job, envelope = hold.job, hold.job.envelope
        hold.token = token = self._desk.next_token()
        hold.leased = wall_time()
        ttr = 0.0
        if envelope.is_message and envelope.ttr == 0:  # at most once: gone when taken
            self._ends.finish(hold)
        else:
            if self.owner.kind == "consumer":
                ttr = _ttr_of(hold)
                hold.deadline = now + ttr
            self._held[token] = hold
            hold.shelf.held += 1
        counts = job.attempt + 1, 0, envelope.rank, token
        return Lease(token, *counts, envelope.timeout, hold.leased, ttr, job.encoded)

    def _fetch(self, count: int) -> list[Lease]:
        """For who does not mean to wait: what is there, one by one, and nothing in advance."""
        self._desk.line.do(self._retire)
        fetched: list[Lease] = []
        for shelf in self._all():
            while len(fetched) < count and (hold := self._get(shelf)) is not None:
                with self._lock:
                    fetched.append(self._lease(hold, machine_time()))
        return fetched

    def _get(self, shelf: Shelf) -> Hold | None:
        """One message, if the server has one that can be used."""
        while True:
            answered, found = threading.Event(), list[Any]()

            def heard(got: Any, found: list[Any] = found, bell: Any = answered) -> None:
                found.append(got and self._ends.read(shelf, *got))
                bell.set()

            self._tap.get(shelf, heard)
            if not answered.wait(_ANSWER_WITHIN):
                raise BrokerUnavailable(self._desk.line.silence())
            if found[0] is None or isinstance(found[0], Hold):
                return found[0]

    def _touch(self, token: int, seconds: float, now: float) -> bool:
        hold = self._held.get(token)
        if hold is None or not hold.tag:
            return False
        if hold.deadline:
            hold.deadline = now + (seconds or _ttr_of(hold))
        return True

    def _run_out(self, now: float) -> None:
        """Messages whose ttr is over go back."""
        if self.owner.kind == "consumer":
            for token, hold in list(self._held.items()):
                if hold.deadline and hold.deadline <= now:
                    self._let_go(token)
                    self._ends.give_back(hold)

    def _next_look(self, now: float) -> float:
        deadlines = [hold.deadline for hold in self._held.values() if hold.deadline]
        return max(0.0, min(deadlines) - now) if deadlines else float("inf")

    # -- settling -------------------------------------------------------------------------------

    def _settle(self, verdict: Verdict) -> bool:
        """Close a lease. False: it was lost with its line, or before."""
        hold = self._held.get(verdict.token)
        if hold is None:
            return False
        job = hold.job
        limit = job.envelope.retries.max_attempts
        may_retry = verdict.outcome == Outcome.RETRY and not 0 < limit <= job.attempt + 1
        if verdict.hold and may_retry:
            job.attempt, job.error, hold.changed = job.attempt + 1, verdict.error, True
            return bool(hold.tag)
        self._let_go(verdict.token)
        if not hold.tag:
            self._ends.remember(hold, verdict)
            return False
        self._ends.close(hold, verdict)
        return True

    def _let_go(self, token: int) -> None:
        self._held.pop(token).shelf.held -= 1

    # -- in the line's thread -------------------------------------------------------------------

    def _came(
        self, shelf: Shelf, tag: int, properties: Any, body: bytes, *, redelivered: bool
    ) -> None:
        hold = self._ends.read(shelf, tag, redelivered, properties, body)
        if isinstance(hold, Hold):
            with self._lock:
                if shelf.credit:
                    shelf.add(hold)
                    if self._hungry and not self._telling:
                        self._telling = True  # once for all that came in one piece
                        self._desk.line.do(self._tell_of_all)
                else:  # it was under way when we stopped wanting it
                    self._ends.give_back(hold)

    def _lost(self) -> None:
        """The line is gone, or the channel."""
        with self._lock:
            for shelf in self._all():
                shelf.drop()
            for hold in self._held.values():
                hold.tag = 0
            running = len(self._held)
        if running:
            log.warning(
                "%d jobs go on without a line to rabbitmq; those that it hands to others when it "
                "is back run twice",
                running,
            )

    def _tell_of_all(self) -> None:
        with self._lock:
            self._telling = False
            self._tell()

    def _tell(self) -> None:
        """There is something the owner should look at; with the lock."""
        self._news = True
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self.bell, 1)

    def _look_later(self) -> None:
        self._desk.line.later(UNWANTED, self._look)

    def _look(self) -> None:
        """What nobody wanted goes back, and no more of it comes."""
        now = machine_time()
        with self._lock:
            self._looking = False
            stale = [s for s in self._all() if s.credit and now - s.wanted > UNWANTED]
            if self._hungry:
                return
            for shelf in stale:
                self._stop(shelf)
            if any(shelf.credit for shelf in self._all()):
                self._looking = True
                self._look_later()

    def _retire(self) -> None:
        """Nobody waits any more."""
        with self._lock:
            for shelf in self._all():
                if shelf.credit:
                    self._stop(shelf)

    def _stop(self, shelf: Shelf) -> None:
        shelf.credit, shelf.empty = 0, False
        for hold in shelf.clear():
            self._ends.give_back(hold)
        self._tap.adjust()


def _ttr_of(hold: Hold) -> float:
    """Seconds a consumer has for a message."""
    ttr = hold.job.envelope.ttr
    return ttr if ttr > 0 else DEFAULT_TTR


def _rounded(credit: int) -> int:
    """A credit that need not change with each message: exact while it is small."""
    return min(CREDIT_MOST, credit if credit <= _EXACT else 1 << (credit - 1).bit_length())
