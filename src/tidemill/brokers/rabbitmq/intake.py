"""One owner: the messages it has, those it leased, and what becomes of them.

The server pushes as many messages as it is given credit for, onto shelves (:mod:`.shelf`);
``exchange`` takes leases from there. How much credit that is, :mod:`.appetite` says.

A line that breaks makes everything in hand the server's again, and it hands it out anew: to us,
very likely, and then a job that still runs is recognized, and goes on as if nothing had been; one
that has ended meanwhile ends now. To others, and then it runs twice: at least once means just that.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence

from tidemill.brokers.base import Mode, Reply, Step, Want
from tidemill.brokers.rabbitmq.appetite import Appetite
from tidemill.brokers.rabbitmq.bell import Bell
from tidemill.brokers.rabbitmq.desk import Desk
from tidemill.brokers.rabbitmq.ending import goes_back
from tidemill.brokers.rabbitmq.ends import Ends
from tidemill.brokers.rabbitmq.fetching import ANSWER_WITHIN, Fetching
from tidemill.brokers.rabbitmq.names import Place
from tidemill.brokers.rabbitmq.shelf import Hold, Shelf
from tidemill.brokers.rabbitmq.tap import Arrival, Tap
from tidemill.clock import machine_time, wall_time
from tidemill.deferral import Deferred
from tidemill.errors import BrokerUnavailable
from tidemill.job import Lease, Outcome, Owner, Verdict
from tidemill.locks import RLock

__all__ = ["Intake"]

log = logging.getLogger("tidemill.rabbitmq")

_SUCCESS = int(Outcome.SUCCESS)

RAN_OUT = "ttr passed without an ack"

_ASK_AGAIN = 0.05
"""Seconds until the server is asked again whether a place is empty."""

_ARRIVES = 0.1
"""Seconds after which the server counts the messages that were sent back to a queue."""


class Intake:
    """One owner of this process."""

    def __init__(self, owner: Owner, desk: Desk) -> None:
        self.owner = owner
        self._desk = desk
        self._lock = RLock()
        self.bell = Bell()
        self._watched = float("inf")  # machine time at which a ttr is looked at again
        self.serves_all = False
        self._telling = False
        self._kinds: tuple[str, ...] = ("messages",) if owner.kind == "consumer" else ("tasks",)
        self._shelves: dict[str, list[Shelf]] = {}  # by queue, most urgent first
        self._turn = 0
        self._served: dict[str, int] = {}  # the turn in which a queue was last taken from
        self._held: dict[int, Hold] = {}  # by token
        self._tap = Tap(desk.line, desk.declarer, owner.name, self._came, self._lost, self._all)
        shared = desk.publisher, desk.writer, self._held, self._lock, desk.announce
        self._ends = Ends(self._tap, *shared, self._sent_back)
        self._appetite = Appetite(desk.line, self._tap, self._ends, self._lock, self._all)
        self._fetching = Fetching(desk, self._tap, self._ends, self._lock)
        self._closing = False

    # -- the conversation -----------------------------------------------------------------------

    def exchange(self, step: Step) -> Reply:
        """Settle, renew and lease. A signal handler may end only the waits for the server."""
        with Deferred():
            return self._exchange(step)

    def _exchange(self, step: Step) -> Reply:
        want = step.want
        with self._lock, self._tap.together():
            now = machine_time()
            self._run_out(now)
            once = self._acknowledged_once(step.verdicts)
            settled = [self._settle(verdict) for verdict in step.verdicts]
            touched = [self._touch(token, seconds, now) for token, seconds in step.touch]
            leases, missing, more = list[Lease](), 0, False
            if want is not None:
                self.bell.looked()
                self._know_queues(want)
                leased = wall_time()
                leases = [self._lease(hold, now, leased) for hold in self._choose(want)]
                missing = want.count - len(leases)
                rows = self._in_turn(want)
                self._appetite.follow(want, missing, rows, now)
                here = self._ends.storing or any(not s.empty for row in rows for s in row)
                more = missing > 0 and bool(here)
            self._appetite.settle()
        settled = self._sure_of(settled, once)
        if want is not None:
            if not want.sleep and missing:
                more = False
                leases += self._fetch(want, missing, alone=not (leases or settled or touched))
            if not (want.sleep or leases or settled or touched):
                self._desk.line.check()  # that there is nothing, only the server can say
        return Reply(settled, touched, leases, next_due=self._next_look(now), more=more)

    def serve(self, queue: str) -> None:
        """Take from one more queue: it was heard of."""
        with self._lock:
            if queue not in self._shelves:
                self._add_shelves(queue)
                self.bell.tell()

    def wait(self, timeout: float, fds: Sequence[int]) -> list[int]:
        """Sleep until something came, a readable descriptor or the timeout."""
        return self.bell.sleep(timeout, fds)

    def doubt(self, homes: Sequence[str]) -> None:
        """Something was put there: the server is asked once more."""
        with self._lock:
            for shelf in (one for one in self._all() if one.place.name in homes):
                shelf.doubt()

    def wake(self) -> None:
        """Make the wait return."""
        self.bell.wake()

    def close(self, patience: float) -> None:
        """Give everything back and leave, when what is under way has arrived."""
        with self._lock:
            self._closing = True
            for shelf in self._all():
                shelf.credit = 0
        self._tap.adjust()
        self._tap.sync(patience)  # else what is written anew comes back to us
        with self._lock:
            holds = [*self._held.values(), *(hold for s in self._all() for hold in s.cut(0))]
            for hold in sorted(holds, key=lambda one: one.tag):  # they stand as they stood
                self._ends.give_back(hold)
            self._held.clear()
        self._desk.publisher.flush(patience)
        self._tap.close(patience)
        self.bell.close()

    def flush(self, patience: float) -> None:
        """Sleep until the server has all that was acknowledged."""
        self._tap.sync(patience)

    def put_back(self, queue: str, patience: float) -> None:
        """Return what the server pushed of a queue and nobody leased, and take no more of it.

        The next exchange that wants something takes of it again.
        """
        with self._lock, self._tap.together():
            for shelf in self._shelves.get(queue, ()):
                self._appetite.rest(shelf)
        if self._tap.sync(patience):  # by now all has come that was on its way, and goes back
            self._tap.sync(patience)

    def after_fork_child(self) -> None:
        """In a forked child: it was the parent's."""
        self.bell.after_fork_child()

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
        queues = dict.fromkeys(want.queues or sorted(self._shelves))
        rows = [[s for s in self._shelves[q] if want.alone or not s.place.alone] for q in queues]
        if want.mode is Mode.STRICT:
            rows = [list(itertools.chain.from_iterable(rows))]
        return [row for row in rows if row]

    def _in_turn(self, want: Want) -> list[list[Shelf]]:
        """The row that was taken from longest ago comes first."""
        return sorted(
            self._rows(want), key=lambda row: self._served.get(row[0].place.queue, 0)
        )

    def _choose(self, want: Want) -> Iterator[Hold]:
        left, rows, alone = want.count, self._in_turn(want), want.alone
        while left and rows:
            row = rows.pop(0)
            shelf = self._first(row, alone=alone)
            if shelf is not None:
                alone = alone and not shelf.place.alone
                holds = shelf.take(left if not (rows or shelf.place.alone) else 1)
                left -= len(holds)
                rows.append(row)  # last in line from now on
                self._turn += 1
                self._served[row[0].place.queue] = self._turn
                yield from holds

    def _first(self, row: Sequence[Shelf], *, alone: bool) -> Shelf | None:
        """The shelf to take from; none as long as a more urgent place may have something.

        What runs alone holds up nothing else, and without ``alone`` none of it is taken.
        """
        for shelf in row:
            if len(shelf) and (alone or not shelf.place.alone):
                return shelf
            if not self._is_empty(shelf) and not shelf.place.alone:
                return None
        return None

    def _is_empty(self, shelf: Shelf) -> bool:
        """Whether the server has nothing in a place either; if we do not know, it is asked."""
        if not shelf.empty and not shelf.asking:
            shelf.asking = True
            self._desk.line.do(functools.partial(self._ask, shelf))
        return shelf.empty

    def _ask(self, shelf: Shelf) -> None:
        arrivals, asked = shelf.arrivals, machine_time()

        def answer(count: int, why: str) -> None:
            if count:
                heard(False)
            elif why:  # what cannot be asked holds up nothing less urgent
                heard(True)
            else:  # what it has sent us does not count, and may still be on its way
                self._tap.round_trip(heard)

        def heard(empty: bool) -> None:
            with self._lock:
                if not shelf.asking or shelf.arrivals != arrivals:
                    return  # the line was lost, or something came
                shelf.late = False
                if empty and asked - shelf.back > _ARRIVES:
                    shelf.asking, shelf.empty = False, True
                    self.bell.tell()
                else:  # others may get what is there
                    again = functools.partial(self._ask_again, shelf, arrivals)
                    self._desk.line.later(_ASK_AGAIN, again)

        def slow() -> None:  # what does not answer soon holds up no other queue
            with self._lock:
                if shelf.asking and shelf.arrivals == arrivals:
                    shelf.late = True
                    self.bell.tell()

        self._desk.declarer.count(shelf.place, answer, slow)

    def _ask_again(self, shelf: Shelf, arrivals: int) -> None:
        with self._lock:
            if not shelf.asking or shelf.arrivals != arrivals:
                return
            shelf.asking = self._appetite.is_for(shelf)
        if shelf.asking:
            self._ask(shelf)

    # -- leasing --------------------------------------------------------------------------------

    def _lease(self, hold: Hold, now: float, leased: float) -> Lease:
        job, envelope = hold.job, hold.job.envelope
        hold.token = token = self._desk.next_token()
        ttr = 0.0
        if self.owner.kind == "consumer":
            ttr = hold.ttr
            self._set_deadline(hold, now, ttr)
        self._held[token] = hold
        if hold.tag:
            hold.shelf.held += 1
        counts = job.attempt + 1, job.losses, envelope.rank, token
        return Lease(token, *counts, envelope.timeout, leased, ttr, job.encoded)

    def _sure_of(self, settled: list[bool], once: Mapping[int, str]) -> list[bool]:
        """``settled``, but False for a message with ttr=0 that the server may still have.

        The consumer hands such a message on only when the server has forgotten it. ``once`` has
        the runs of such messages, by place. A message that the server sends again is new to us.
        """
        if not once or self._tap.sync(ANSWER_WITHIN):
            return settled
        log.warning("%d messages with ttr=0 may be lost with the line to rabbitmq", len(once))
        with self._lock:
            self._ends.forget(once.values())
        return [done and place not in once for place, done in enumerate(settled)]

    def _fetch(self, want: Want, count: int, *, alone: bool) -> list[Lease]:
        """What is there, for who does not mean to wait; ``alone`` if the step does nothing else."""
        fetched: list[Lease] = []
        with self._lock:
            rows = self._rows(want)
        try:
            for hold in itertools.islice(self._fetching.fetch(rows), count):
                with self._lock:
                    fetched.append(self._lease(hold, machine_time(), wall_time()))
        except BrokerUnavailable:
            if alone and not fetched:
                raise  # else what was done counts, and who comes again is told
        return fetched

    def _touch(self, token: int, seconds: float, now: float) -> bool:
        hold = self._held.get(token)
        if hold is None or not hold.tag:
            return False
        if hold.deadline:
            self._set_deadline(hold, now, seconds or hold.ttr)
        return True

    def _set_deadline(self, hold: Hold, now: float, seconds: float) -> None:
        hold.deadline = now + seconds
        if hold.deadline < self._watched:  # its holder may never come back
            self._watched = hold.deadline
            self._desk.line.do(lambda: self._desk.line.later(seconds, self._watch))

    def _watch(self) -> None:
        with self._lock:
            now = machine_time()
            if now < self._watched:
                return  # another timer is set for what is next
            self._watched = float("inf")
            self._run_out(now)
            if held := [hold for hold in self._held.values() if hold.deadline]:
                first = min(held, key=lambda hold: hold.deadline)
                self._set_deadline(first, now, first.deadline - now)

    def _run_out(self, now: float) -> None:
        """Messages whose ttr is over go back."""
        if self.owner.kind == "consumer":
            for token, hold in list(self._held.items()):
                if hold.deadline and hold.deadline <= now:
                    self._let_go(token)
                    if hold.tag:  # else it is the server's again
                        self._ends.close(hold, Verdict(token, Outcome.RETRY, error=RAN_OUT))

    def _next_look(self, now: float) -> float:
        if self.owner.kind != "consumer":
            return float("inf")
        deadlines = [hold.deadline for hold in self._held.values() if hold.deadline]
        return max(0.0, min(deadlines) - now) if deadlines else float("inf")

    # -- settling -------------------------------------------------------------------------------

    def _acknowledged_once(self, verdicts: Sequence[Verdict]) -> dict[int, str]:
        """By place of its verdict: the run of each message with ttr=0 that is acknowledged."""
        if self._kinds == ("tasks",):
            return {}
        return {
            place: hold.run
            for place, verdict in enumerate(verdicts)
            if verdict.outcome == _SUCCESS
            and (hold := self._held.get(verdict.token)) is not None
            and (hold.tag and hold.job.envelope.at_most_once)
        }

    def _settle(self, verdict: Verdict) -> bool:
        """Close a lease. False: it was lost with its line, or before."""
        hold = self._held.get(verdict.token)
        if hold is None:
            return False
        if verdict.outcome == _SUCCESS and hold.tag and not verdict.followers:
            self._let_go(verdict.token)
            self._ends.finish(hold)
            return True
        job = hold.job
        limit = job.envelope.retries.max_attempts
        may_retry = verdict.outcome == Outcome.RETRY and not 0 < limit <= job.attempt + 1
        if verdict.hold and may_retry:
            job.attempt, job.error, hold.changed = job.attempt + 1, verdict.error, True
            return bool(hold.tag)
        self._let_go(verdict.token)
        if not hold.tag:  # a consumer is told that it was lost, and may undo what it did
            if self.owner.kind != "consumer":
                self._ends.remember(hold, verdict)
            return False
        if goes_back(verdict, changed=hold.changed):
            self._appetite.returned.append(hold)
        else:
            self._ends.close(hold, verdict)
        return True

    def _let_go(self, token: int) -> None:
        hold = self._held.pop(token)
        if hold.tag:
            hold.shelf.held -= 1
            if hold.shelf.resting:  # and so nothing comes in its place
                self._appetite.rest(hold.shelf)

    # -- in the line's thread -------------------------------------------------------------------

    def _came(self, arrivals: Sequence[Arrival]) -> None:
        with self._lock:
            added = False
            for shelf, tag, redelivered, properties, body, wanted in arrivals:
                hold = self._ends.read(shelf, tag, redelivered, properties, body)
                if not isinstance(hold, Hold):
                    continue
                if wanted or self._closing:
                    shelf.add(hold)
                    added = True
                    if shelf.resting:
                        self._appetite.see_to_it()
                else:  # it was under way when we stopped wanting it
                    self._ends.give_back(hold)
            if added and self._appetite.hungry and not self._telling:
                self._telling = True  # once for all that came in one piece
                self._desk.line.do(self._tell_of_all)

    def _sent_back(self, places: Sequence[Place]) -> None:
        """Messages went, by us, to where we may take them from; with the lock."""
        for place in places:
            for shelf in self._shelves.get(place.queue, ()):
                if shelf.place.name == place.name:
                    shelf.empty, shelf.back = False, machine_time()
        if self._appetite.hungry:
            self.bell.tell()

    def _lost(self) -> None:
        """The line is gone, or the channel."""
        with self._lock:
            for shelf in self._all():
                shelf.drop()
            for hold in self._held.values():
                hold.tag = 0
            self._ends.lost = {hold.run: hold for hold in self._held.values()}
            running = len(self._held)
            self._appetite.see_to_it()
            if self._appetite.hungry:  # which places are empty is to be asked anew
                self.bell.tell()
        if running:
            said = "%d jobs go on without a line to rabbitmq; what it hands to others runs twice"
            log.warning(said, running)

    def _tell_of_all(self) -> None:
        with self._lock:
            self._telling = False
            self.bell.tell()
