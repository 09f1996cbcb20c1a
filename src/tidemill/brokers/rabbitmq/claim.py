"""One owner of this process: the messages it holds, leases and settles.

The server pushes messages up to the owner's credit (:class:`Credit`) into queue states
(:mod:`.queue_state`). ``exchange`` leases them from there.

When a connection breaks, the server hands out again every message that the owner held, most likely
to the same owner. The owner recognizes its jobs: a running job goes on, and a job that ended
meanwhile is settled now. A message that goes to another owner runs twice: jobs run at least once.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.exchange import Mode, Reply, Step, Want
from tidemill.brokers.rabbitmq.amqp.channel import Arrival, ConsumerChannel
from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread
from tidemill.brokers.rabbitmq.amqp.topology import Declarer
from tidemill.brokers.rabbitmq.layout import Names, Place
from tidemill.brokers.rabbitmq.message import Writer
from tidemill.brokers.rabbitmq.put import Outgoing, Publisher
from tidemill.brokers.rabbitmq.queue_state import HeldMessage, QueueState
from tidemill.brokers.rabbitmq.settle import Settlement, goes_back
from tidemill.brokers.rabbitmq.wakeup import WakeUp
from tidemill.core.clock import clock
from tidemill.core.job import Lease, Outcome, Owner, Verdict
from tidemill.core.locks import Event, RLock
from tidemill.core.signals import SignalsDeferred, raised_by_handler
from tidemill.errors import BrokerUnavailable

log = logging.getLogger("tidemill.rabbitmq")

_SUCCESS = int(Outcome.SUCCESS)

RAN_OUT = "ttr passed without an ack"

_ASK_AGAIN = 0.05  # seconds until the server is asked again whether a place is empty
_ARRIVES = 0.1  # seconds after which the server counts the messages that were sent back to a queue


class OwnerContext(msgspec.Struct, frozen=True):
    """The objects that the owners of a process share."""

    thread: ConnectionThread
    declarer: Declarer
    publisher: Publisher
    names: Names
    writer: Writer
    next_token: Callable[[], int]
    announce: Callable[[Sequence[str]], Sequence[Outgoing]]


class AttachedOwner:
    def __init__(self, owner: Owner, context: OwnerContext) -> None:
        self.owner = owner
        self._context = context
        self._lock = RLock()
        self.wake_up = WakeUp()
        self._watched = float("inf")  # machine time of the next check of deadlines
        self.serves_all = False
        self._telling = False
        self._kinds: tuple[str, ...] = ("messages",) if owner.kind == "consumer" else ("tasks",)
        self._states: dict[str, list[QueueState]] = {}  # places by queue, urgent ones first
        self._turn = 0
        self._served: dict[str, int] = {}  # the turn in which a queue was last taken from
        self._held: dict[int, HeldMessage] = {}  # leased messages by token
        heard = self._came, self._lost, self._all
        self._channel = ConsumerChannel(context.thread, context.declarer, owner.name, *heard)
        shared = context.publisher, context.writer, self._held, self._lock, context.announce
        self._settlement = Settlement(self._channel, *shared, self._sent_back)
        parts = self._channel, self._settlement, self._lock
        self._credit = Credit(context.thread, *parts, self._all)
        self._basic_get = BasicGet(*parts)
        self._closing = False

    # -- the exchange ---------------------------------------------------------------------------

    def exchange(self, step: Step) -> Reply:
        """Settle, renew and lease. A signal handler may end only the waits for the server."""
        with SignalsDeferred():
            return self._exchange(step)

    def _exchange(self, step: Step) -> Reply:
        want = step.want
        with self._lock, self._channel.together():
            now = clock.machine()
            self._run_out(now)
            once = self._acknowledged_once(step.verdicts)
            settled = [self._settle(verdict) for verdict in step.verdicts]
            touched = [self._touch(token, seconds, now) for token, seconds in step.touch]
            leases, missing, more = list[Lease](), 0, False
            if want is not None:
                self.wake_up.looked()
                self._know_queues(want)
                leased = clock.wall()
                leases = [self._lease(hold, now, leased) for hold in self._choose(want)]
                missing = want.count - len(leases)
                rows = self._in_turn(want)
                self._credit.follow(want, missing, rows, time.monotonic())
                here = self._settlement.storing or any(not s.empty for row in rows for s in row)
                more = missing > 0 and bool(here)
            self._credit.settle()
        settled = self._sure_of(settled, once)
        if want is not None:
            if not want.sleep and missing:
                more = False
                leases += self._fetch(want, missing, alone=not (leases or settled or touched))
            if not (want.sleep or leases or settled or touched):
                self._context.thread.await_up(0)  # raise if the server is away: it may have jobs
        return Reply(settled, touched, leases, next_due=self._next_look(now), more=more)

    def serve(self, queue: str) -> None:
        """Also take from this queue, which was just announced."""
        with self._lock:
            if queue not in self._states:
                self._add_states(queue)
                self.wake_up.tell()

    def close(self, patience: float) -> None:
        """Wait for messages that are being sent, return all messages, and close the channel."""
        with self._lock:
            self._closing = True
            for state in self._all():
                state.credit = 0
        self._channel.adjust()
        self._channel.sync(patience)  # else the new message of a job would come back to us
        with self._lock:
            holds = [*self._held.values(), *(hold for s in self._all() for hold in s.cut(0))]
            for hold in sorted(holds, key=lambda one: one.tag):  # in their order
                self._settlement.give_back(hold)
            self._held.clear()
        self._context.publisher.flush(patience)
        self._channel.close(patience)
        self.wake_up.close()

    def flush(self, patience: float) -> None:
        """Sleep until the server has all acknowledgements."""
        self._channel.sync(patience)

    def put_back(self, queue: str, patience: float) -> None:
        """Return the unleased messages of a queue, and take no more from the queue."""
        # The next exchange that wants jobs takes from the queue again.
        with self._lock, self._channel.together():
            for state in self._states.get(queue, ()):
                self._credit.rest(state)
        if self._channel.sync(patience):  # all messages that were under way have come: they go back
            self._channel.sync(patience)

    # -- choosing -------------------------------------------------------------------------------

    def _know_queues(self, want: Want) -> None:
        kinds = tuple(k for k, on in (("tasks", want.tasks), ("messages", want.messages)) if on)
        if kinds and kinds != self._kinds:
            self._kinds = kinds
            for queue in self._states:
                self._add_states(queue)
        for queue in want.queues:
            if queue not in self._states:
                self._add_states(queue)

    def _add_states(self, queue: str) -> None:
        known = {state.place.name: state for state in self._states.get(queue, ())}
        places = [place for kind in self._kinds for place in self._context.names.of(queue, kind)]
        states = [known.get(place.name) or QueueState(place) for place in places]
        self._states = {**self._states, queue: states}

    def _all(self) -> list[QueueState]:
        return list(itertools.chain.from_iterable(self._states.values()))

    def _rows(self, want: Want) -> list[list[QueueState]]:
        """Rows of places. The places of a row are emptied in order; the rows take turns."""
        queues = dict.fromkeys(want.queues or sorted(self._states))
        rows = [[s for s in self._states[q] if want.alone or not s.place.alone] for q in queues]
        if want.mode is Mode.STRICT:
            rows = [list(itertools.chain.from_iterable(rows))]
        return [row for row in rows if row]

    def _in_turn(self, want: Want) -> list[list[QueueState]]:
        """The rows by their turns: the row that was served longest ago comes first."""
        return sorted(self._rows(want), key=lambda row: self._served.get(row[0].place.queue, 0))

    def _choose(self, want: Want) -> Iterator[HeldMessage]:
        left, rows, alone = want.count, self._in_turn(want), want.alone
        while left and rows:
            row = rows.pop(0)
            state = self._first(row, alone=alone)
            if state is not None:
                alone = alone and not state.place.alone
                holds = state.take(left if not (rows or state.place.alone) else 1)
                left -= len(holds)
                rows.append(row)  # its next turn comes last
                self._turn += 1
                self._served[row[0].place.queue] = self._turn
                yield from holds

    def _first(self, row: Sequence[QueueState], *, alone: bool) -> QueueState | None:
        """The place to take from; None while a more urgent place may have messages."""
        # A place of suspects delays no other place. Without ``alone`` its messages are not taken.
        for state in row:
            if len(state) and (alone or not state.place.alone):
                return state
            if not self._is_empty(state) and not state.place.alone:
                return None
        return None

    def _is_empty(self, state: QueueState) -> bool:
        """Whether the server has no message in a place. If that is unknown, ask the server."""
        if not state.empty and not state.asking:
            state.asking = True
            self._context.thread.do(functools.partial(self._ask, state))
        return state.empty

    def _ask(self, state: QueueState) -> None:
        arrivals, asked = state.arrivals, time.monotonic()

        def answer(count: int, why: str) -> None:
            if count:
                heard(False)
            elif why:  # go on without a place that cannot be asked
                heard(True)
            else:  # 0 is not certain: pushed messages may be under way
                self._channel.round_trip(heard)

        def heard(empty: bool) -> None:
            with self._lock:
                if not state.asking or state.arrivals != arrivals:
                    return  # the answer is out of date: connection lost, or message came
                state.late = False
                if empty and asked - state.back > _ARRIVES:
                    state.asking, state.empty = False, True
                    self.wake_up.tell()
                else:  # not empty: other owners may take its messages
                    again = functools.partial(self._ask_again, state, arrivals)
                    self._context.thread.later(_ASK_AGAIN, again)

        def slow() -> None:  # other queues do not wait for a slow place
            with self._lock:
                if state.asking and state.arrivals == arrivals:
                    state.late = True
                    self.wake_up.tell()

        do = self._context.thread.do
        self._context.declarer.count(
            state.place, lambda *said: do(lambda: answer(*said)), lambda: do(slow)
        )

    def _ask_again(self, state: QueueState, arrivals: int) -> None:
        with self._lock:
            if not state.asking or state.arrivals != arrivals:
                return
            state.asking = self._credit.is_for(state)
        if state.asking:
            self._ask(state)

    # -- leasing --------------------------------------------------------------------------------

    def _lease(self, hold: HeldMessage, now: float, leased: float) -> Lease:
        job, envelope = hold.job, hold.job.envelope
        hold.token = token = self._context.next_token()
        ttr = hold.ttr if self.owner.kind == "consumer" else 0.0
        if ttr:
            self._set_deadline(hold, now, ttr)
        self._held[token] = hold
        if hold.tag:
            hold.state.held += 1
        counts = job.attempt + 1, job.losses, envelope.rank, token
        return Lease(token, *counts, envelope.timeout, leased, ttr, job.encoded)

    def _sure_of(self, settled: list[bool], once: Mapping[int, str]) -> list[bool]:
        """``settled``, with False for each message with ttr=0 that the server may still have."""
        # The consumer hands on a message with ttr=0 only when the server has forgotten it. ``once``
        # maps indexes of ``settled`` to the runs of these messages. If the server hands out such a
        # message again, it counts as new.
        if not once or self._channel.sync(ANSWER_WITHIN):
            return settled
        log.warning("%d messages with ttr=0 may be lost with the connection to rabbitmq", len(once))
        with self._lock:
            self._settlement.forget(once.values())
        return [done and place not in once for place, done in enumerate(settled)]

    def _fetch(self, want: Want, count: int, *, alone: bool) -> list[Lease]:
        """Lease ready messages without waiting; ``alone`` if the step does nothing else."""
        fetched: list[Lease] = []
        with self._lock:
            rows = self._rows(want)
        try:
            for hold in itertools.islice(self._basic_get.fetch(rows), count):
                with self._lock:
                    fetched.append(self._lease(hold, clock.machine(), clock.wall()))
        except BrokerUnavailable as error:
            if (alone and not fetched) or raised_by_handler(error):
                raise  # with leases, return this reply; the next step gets the error
        return fetched

    def _touch(self, token: int, seconds: float, now: float) -> bool:
        hold = self._held.get(token)
        if hold is None or not hold.tag:
            return False
        if hold.deadline:
            self._set_deadline(hold, now, seconds or hold.ttr)
        return True

    def _set_deadline(self, hold: HeldMessage, now: float, seconds: float) -> None:
        hold.deadline = now + seconds
        if hold.deadline < self._watched:  # watch the deadline: the consumer may never come back
            self._watched = hold.deadline
            self._context.thread.do(lambda: self._context.thread.later(seconds, self._watch))

    def _watch(self) -> None:
        with self._lock:
            now = clock.machine()
            if now < self._watched:
                return  # another timer is set for the next deadline
            self._watched = float("inf")
            self._run_out(now)
            if held := [hold for hold in self._held.values() if hold.deadline]:
                first = min(held, key=lambda hold: hold.deadline)
                self._set_deadline(first, now, first.deadline - now)

    def _run_out(self, now: float) -> None:
        """Return messages whose ttr is over."""
        if self.owner.kind == "consumer":
            for token, hold in list(self._held.items()):
                if hold.deadline and hold.deadline <= now:
                    self._let_go(token)
                    if hold.tag:  # without a tag, the server has the message again
                        self._settlement.close(hold, Verdict(token, Outcome.RETRY, error=RAN_OUT))

    def _next_look(self, now: float) -> float:
        if self.owner.kind != "consumer":
            return float("inf")
        deadlines = [hold.deadline for hold in self._held.values() if hold.deadline]
        return max(0.0, min(deadlines) - now) if deadlines else float("inf")

    # -- settling -------------------------------------------------------------------------------

    def _acknowledged_once(self, verdicts: Sequence[Verdict]) -> dict[int, str]:
        """The run of each acknowledged message with ttr=0, by the index of its verdict."""
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
        """Settle a lease; False when the lease was lost with its connection, or earlier."""
        hold = self._held.get(verdict.token)
        if hold is None:
            return False
        if verdict.outcome == _SUCCESS and hold.tag and not verdict.followers:
            self._let_go(verdict.token)
            self._settlement.finish(hold)
            return True
        job = hold.job
        limit = job.envelope.retries.max_attempts
        may_retry = verdict.outcome == Outcome.RETRY and not 0 < limit <= job.attempt + 1
        if verdict.hold and may_retry:
            job.attempt, job.error, hold.changed = job.attempt + 1, verdict.error, True
            return bool(hold.tag)
        self._let_go(verdict.token)
        if not hold.tag:  # a consumer learns of the loss, and may undo its work
            if self.owner.kind != "consumer":
                self._settlement.remember(hold.run, verdict)
            return False
        if goes_back(verdict, changed=hold.changed):
            self._credit.returned.append(hold)
        else:
            self._settlement.close(hold, verdict)
        return True

    def _let_go(self, token: int) -> None:
        hold = self._held.pop(token)
        if hold.tag:
            hold.state.held -= 1
            if hold.state.resting:  # no new message may replace this message
                self._credit.rest(hold.state)

    # -- in the connection thread ---------------------------------------------------------------

    def _came(self, arrivals: Sequence[Arrival]) -> None:
        with self._lock:
            added = False
            for state, tag, redelivered, properties, body, wanted in arrivals:
                hold = self._settlement.read(state, tag, redelivered, properties, body)
                if not isinstance(hold, HeldMessage):
                    continue
                if wanted or self._closing:
                    state.add(hold)
                    added = True
                    if state.resting:
                        self._credit.plan_look()
                else:  # the message came after its credit was withdrawn
                    self._settlement.give_back(hold)
            if added and self._credit.hungry and not self._telling:
                self._telling = True  # once for all messages of one piece
                self._context.thread.do(self._tell_of_all)

    def _sent_back(self, places: Sequence[Place]) -> None:
        """Record that messages went back to places of this owner. The caller has the lock."""
        for place in places:
            for state in self._states.get(place.queue, ()):
                if state.place.name == place.name:
                    state.empty, state.back = False, time.monotonic()
        if self._credit.hungry:
            self.wake_up.tell()

    def _lost(self) -> None:
        """The connection or the channel is gone: the server has all messages again."""
        with self._lock:
            for state in self._all():
                state.drop()
            for hold in self._held.values():
                hold.tag = 0
            self._settlement.lost = {hold.run: hold for hold in self._held.values()}
            running = len(self._held)
            self._credit.plan_look()
            if self._credit.hungry:  # ask again which places are empty
                self.wake_up.tell()
        if running:
            log.warning("%d jobs run without rabbitmq; other workers may run them again", running)

    def _tell_of_all(self) -> None:
        with self._lock:
            self._telling = False
            self.wake_up.tell()


UNWANTED = 1.0  # seconds after which unwanted messages go back


def _parts(missing: int, rows: Sequence[Sequence[QueueState]]) -> list[int]:
    """The share of each row of places. Only rows that may have messages share."""
    # If no row may have messages, each row gets the whole number.
    open_rows = [any(s.may_bring for s in row if not s.place.alone) for row in rows]
    count = sum(open_rows)
    if not count:
        return [missing] * len(rows)
    each, more = divmod(missing, count)
    turns = iter([each + 1] * more + [each] * (count - more))
    return [next(turns) if is_open else 0 for is_open in open_rows]


class Credit:
    """The credit of one owner, with the owner's ``lock``, which every caller holds.

    Credit is the number of messages of a place that the server may push to the owner: the number of
    jobs that the owner holds, plus the jobs that it still wants. Credit grows at once. When the
    owner returns jobs, credit falls at once to the used credit. Once a second credit falls to the
    highest need of this second. Messages that the owner did not want for a second go back, so that
    other owners get these. After this the credit is the number of leased jobs, and the place rests:
    no further messages come.
    """

    def __init__(
        self,
        thread: ConnectionThread,
        channel: ConsumerChannel,
        settlement: Settlement,
        lock: RLock,
        states: Callable[[], Sequence[QueueState]],
    ) -> None:
        self._thread = thread
        self._channel = channel
        self._settlement = settlement
        self._lock = lock
        self._states = states
        self._asked = 0.0  # monotonic time of the last want whose owner waits
        self._looking = False
        self.hungry = False  # the owner waits, because it wanted more messages than had come
        self.returned: list[HeldMessage] = []  # the messages that the owner returns in this step

    def is_for(self, state: QueueState) -> bool:
        """Whether the owner waits for messages of this place."""
        return self.hungry and state.wanted == self._asked

    def follow(
        self, want: Want, missing: int, rows: Sequence[Sequence[QueueState]], now: float
    ) -> None:
        """Set the credit for a want that lacks ``missing`` messages.

        The credit of a place is the number of messages that the owner holds, plus the place's share
        of the missing messages. So the owner holds few messages that other owners could use. A less
        urgent place gets no credit before the more urgent places are empty. The rows come in the
        order of their turns.
        """
        self.hungry = want.sleep and missing > 0
        if not (want.sleep and want.count):
            return
        self._asked, grows = now, False
        for row, part in zip(rows, _parts(missing, rows), strict=True):
            for state in row:
                if state.place.alone or not state.may_bring:
                    grows = state.need(part or min(1, missing), now) or grows
                    continue
                # A place without a part of the missing messages gets its turn later, and rests.
                if part or not missing:
                    grows = state.need(part, now) or grows
                break
        if grows:
            self._channel.adjust()

    def settle(self) -> None:
        """End a step: lower the credit of an owner that returned jobs, since it has too many."""
        returned, self.returned = self.returned, []
        for state in {id(hold.state): hold.state for hold in returned}.values():
            returned += state.set_back(state.needs) if self.is_for(state) else state.rest()
        if returned:
            self._give_back(sorted(returned, key=lambda hold: hold.tag))
        self.plan_look()

    def rest(self, state: QueueState) -> None:
        """Lower the credit of a place to its leased messages, and return the other messages."""
        self._give_back(state.rest())

    def _give_back(self, holds: Sequence[HeldMessage]) -> None:
        """Return messages to the front in their order, and fit the consumers to the credit."""
        for hold in holds:
            self._settlement.give_back(hold)
        self._channel.adjust()

    # -- periodic look --------------------------------------------------------------------------

    def plan_look(self) -> None:
        """Look in a second, if a place may bring more messages than the owner uses."""
        if not self._looking and any(map(self._may_bring_more, self._states())):
            self._looking = True
            self._thread.do(lambda: self._thread.later(UNWANTED, self._look))

    def _may_bring_more(self, state: QueueState) -> bool:
        if not (len(state) or (state.credit and not state.resting)):
            return False
        return state.credit > state.needs or not self.is_for(state)

    def _look(self) -> None:
        now = time.monotonic()
        with self._lock, self._channel.together():
            self._looking = False
            for state in filter(self._may_bring_more, self._states()):
                self._set_back(state, now)
            self.plan_look()

    def _set_back(self, state: QueueState, now: float) -> None:
        if not state.consumes or now - state.begun < UNWANTED:
            return  # a new consumer: after a reconnect, the messages of running jobs come first
        if not self.is_for(state) and now - state.wanted >= UNWANTED:
            self.rest(state)
        elif state.peak < state.credit:
            self._give_back(state.set_back(state.peak))
        state.peak = state.needs


ANSWER_WITHIN = 10.0  # seconds within which the server must say whether it has a message


class BasicGet:
    """Takes ready messages one by one for an owner that does not wait; ``lock`` is its lock."""

    def __init__(self, channel: ConsumerChannel, settlement: Settlement, lock: RLock) -> None:
        self._channel = channel
        self._settlement = settlement
        self._lock = lock

    def fetch(self, rows: list[list[QueueState]]) -> Iterator[HeldMessage]:
        """Yield messages. Rows of places take turns; a row yields its first message."""
        # If the server does not answer, this raises, and the message of a late answer goes back.
        while rows:
            row = rows.pop(0)
            hold = next(filter(None, map(self._get, row)), None)
            if hold is not None:
                rows.append(row)
                yield hold

    def _get(self, state: QueueState) -> HeldMessage | None:
        """One message, if the server has a usable message."""
        while True:
            with self._lock:
                if len(state):
                    return state.take()[0]  # a message came during the last question
            consumed = len(state.consumers) > 1  # the place also has a consumer of this owner
            found = self._ask(state)
            if isinstance(found, HeldMessage):
                return found
            if found is None and not len(state) and not (consumed and self._brings(state)):
                return None

    def _brings(self, state: QueueState) -> bool:
        """Whether a consumer of this owner got the message."""
        # The server may answer that a queue is empty, although it has given a message to a consumer
        # of the same channel. The message for the consumer comes before the answer to a later call.
        return self._channel.sync(ANSWER_WITHIN) and len(state) > 0

    def _ask(self, state: QueueState) -> Any:
        """The next message of a place; None if there is none, and False if it was settled."""
        answered, found, dropped = Event(), list[Any](), list[bool]()

        def heard(got: Any) -> None:
            hold = got and self._settlement.read(state, *got)
            with self._lock:
                found.append(hold)
                if dropped:
                    give_back()
            answered.set()

        def give_back() -> None:  # nobody waits for the answer
            for hold in found:
                if isinstance(hold, HeldMessage):
                    self._settlement.give_back(hold)

        self._channel.get(state, heard)
        try:
            if not answered.wait(ANSWER_WITHIN):
                raise BrokerUnavailable(self._channel.silence())
        except BaseException:  # for example, a signal handler has raised
            with self._lock:
                dropped.append(True)
                give_back()
            raise
        return found[0]
