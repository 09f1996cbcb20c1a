"""The dispatcher: the thread that talks to the store for all clients of a shared owner.

Requests and verdicts that arrive during one exchange go into the next exchange. So ten clients cost
hardly more commits than one client, and thousands of waiting clients cost nothing.

A broker may report leases before they are durable (:mod:`tidemill.brokers.contract.early_leases`).
Then the jobs are handed out before their commit, and verdicts on them join the same commit. If the
commit fails, the jobs are lost, and no verdict on them reaches the store.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.early_leases import EarlyLeases
from tidemill.brokers.contract.exchange import Mode, Reply, Step, Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.generic.owner_loop import RETRY, OwnerLoop
from tidemill.core.commit_delay import EACH_CLIENT, CommitDelay
from tidemill.core.job import Lease, Note, Outcome, Owner, Verdict
from tidemill.core.verdicts import given_back
from tidemill.errors import BrokerUnavailable
from tidemill.server.waiters import BatchSize, JobKinds, PendingCommit, ReservedJob, Waiter, Waiters

log = logging.getLogger("tidemill.server")

MAX_VERDICTS = 1000  # the most verdicts in one step

SHORTEST_TICK, LONGEST_TICK = 0.1, 600.0
"""Bounds of the time between two ticks of the broker, in seconds."""

LOOP_PATIENCE = 2.0  # seconds that the event loop has for the answers to its last clients


Answer = tuple[asyncio.Future[Any] | None, bool | Exception]


class PendingVerdict(NamedTuple):
    """A verdict, or a touch with notes, and the future of the client that waits for the answer."""

    verdict: Verdict | None
    touch: tuple[int, float] | None
    answer: asyncio.Future[bool] | None
    commit: PendingCommit | None
    notes: Sequence[Note] = ()

    @property
    def is_void(self) -> bool:
        """True when the job was lost with a failed commit."""
        return self.commit is not None and self.commit.failed


def _deliver(answers: Sequence[Answer]) -> None:
    """Resolve the futures of clients. Called in the event loop."""
    for future, outcome in answers:
        if future is None or future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


class Dispatcher(OwnerLoop):
    """The thread of one ``SharedOwner``, whose docstring explains the arguments.

    ``hand_over`` is called in the loop with the waiters to answer; each waiter holds its jobs.
    """

    def __init__(
        self,
        broker: Broker,
        owner: Owner,
        loop: asyncio.AbstractEventLoop,
        hand_over: Callable[[Sequence[Waiter]], None],
        *,
        kinds: JobKinds,
        stays: bool,
        on_lost_commit: Callable[[PendingCommit], None] | None,
    ) -> None:
        super().__init__(broker, owner)
        self.inbox: collections.deque[Waiter | PendingVerdict] = collections.deque()
        self.gone: collections.deque[Waiter] = collections.deque()  # clients that have left
        self.closing = False
        self._loop = loop
        self._hand_over = hand_over
        self._kinds = kinds
        self._stays = stays
        self._on_lost_commit = on_lost_commit
        self._early = broker if on_lost_commit and isinstance(broker, EarlyLeases) else None
        self._merged = Mode.MERGED if Feature.MERGED in broker.features else Mode.STRICT
        self._waiters = Waiters()
        self._first: Sequence[Waiter] = ()  # the clients whose first look is the latest step
        self._batch = BatchSize(few=bool(kinds.knows))  # many owners with ``knows`` may exist
        self._delay = CommitDelay(EACH_CLIENT)  # the wait before an exchange
        self._verdicts: list[PendingVerdict] = []
        # The state of an exchange that hands out jobs before its commit:
        self._commit: PendingCommit | None = None
        self._early_delay = CommitDelay(EACH_CLIENT, least=1)
        self._early_verdicts: list[PendingVerdict] = []
        self._withheld: set[int] = set()  # tokens of leases to hand out after the commit
        self._took = self._waited = 0.0  # seconds of the exchange without its wait, and of its wait
        self._marked = frozenset[str]()  # queues whose hints may go to this owner alone
        self._tick_at = 0.0  # monotonic time
        self._has_work = False  # True when the next step must not wait
        self._held = 0  # jobs that clients may hold, lost jobs included
        self._held_is_known = True  # False: clients may hold jobs that are not counted
        self._thread = threading.Thread(target=self._run, name="server-dispatcher", daemon=True)

    # -- called by the event loop -----------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. The owner is attached already."""
        self._thread.start()

    def close(self) -> None:
        self.closing = True
        self.wake()

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join()
        self.free()

    def send(self, request: Waiter | PendingVerdict) -> None:
        self.inbox.append(request)
        self.arrived()

    def arrived(self) -> None:
        """Wake the thread for a request in the inbox that cannot wait."""
        self._delay.arrived(len(self.inbox))
        self._early_delay.arrived(len(self.inbox))
        self.wake()

    # -- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.closing:
            self.turn()
        self._end()

    def collect(self) -> Step:
        if self.inbox:
            self._delay.wait(self.inbox)
        self._collect()
        want, self._first = self._next_want()
        return self._step(want)

    def _step(self, want: Want | None) -> Step:
        self._verdicts = self._without_void(self._verdicts)
        return Step(
            self._owner.id,
            [it.verdict for it in self._verdicts if it.verdict is not None],
            want,
            [it.touch for it in self._verdicts if it.touch is not None],
            [note for it in self._verdicts for note in it.notes],
        )

    def hand_out(self, step: Step, reply: Reply) -> float:
        is_early, self._commit = self._commit is not None, None  # the commit is durable
        answers = self._answers(reply)
        served = self._hand_out_reply(reply, step.want, is_early)
        # ``expect`` comes before the answers: a quick client's next request must not count twice.
        self._delay.expect(len(answers) + len(served), len(self.inbox), self._took)
        self._call_loop(_deliver, answers)
        self._answer(served)
        self._has_work = not self._has_nothing_to_do()
        return 0.0 if self._has_work else self._seconds_to_sleep(reply.next_due)

    def lost(self) -> None:
        """Forget that hints for some queues go to this owner alone."""
        self._marked = frozenset()

    def has_news(self) -> bool:
        return self._has_work or self.closing or bool(self.inbox)

    @property
    def watched(self) -> frozenset[str]:
        """The queues whose jobs end the current sleep."""
        return self._marked if self.asleep else frozenset()

    # -- requests of clients ----------------------------------------------------------------------

    def _collect(self) -> None:
        """Take requests out of the inbox, and forget clients that have left."""
        while self.inbox and len(self._verdicts) < MAX_VERDICTS:
            request = self.inbox.popleft()
            if not isinstance(request, Waiter):
                self._verdicts.append(request)
            elif not request.answer.done():  # a client with a finished answer has left already
                self._take_in(request)
        while self.gone:
            self._waiters.drop(self.gone.popleft())

    def _take_in(self, waiter: Waiter) -> None:
        """Add a client; one that came during a sleep may skip its first look."""
        # No job is missed: the thread found these queues empty, and looks for all before it sleeps.
        self._waiters.add(waiter)
        if waiter.joined and not waiter.late and waiter.is_plain(self._merged):
            self._waiters.looked([waiter])
            if waiter.late:  # the client's time is over, and this look must answer the client
                self._answer([waiter])

    def _next_want(self) -> tuple[Want | None, list[Waiter]]:
        """The next request for jobs, and the clients whose first look it is."""
        # A hint for a marked queue may go to this owner alone: unmark the queues without a client.
        given_up = tuple(self._marked - self._waiters.queues())
        self._marked = frozenset()
        if given_up:
            tasks, messages, _ = self._kinds
            want = Want(0, given_up, self._merged, tasks, messages=messages, sleep=False)
            return want, []
        if not self._waiters:
            return None, []
        want, first = self._waiters.want(self._merged, self._kinds)
        if want.count > self._batch.count:
            want = msgspec.structs.replace(want, count=self._batch.count)
        return want, first

    # -- the exchange -----------------------------------------------------------------------------

    def exchange(self, step: Step) -> Reply:
        self._commit, self._waited = None, 0.0
        began = time.monotonic()
        try:
            if self._early is not None and step.want is not None and step.want.count:
                reply = self._early.exchange_early(step, self._hand_out_early)
            else:
                reply = self._broker.exchange(step)
        except BaseException:
            self._held_is_known = False  # the store may have done the step before the error
            raise
        self._took = time.monotonic() - began - self._waited
        return reply

    def _answers(self, reply: Reply) -> list[Answer]:
        settled, touched = iter(reply.settled), iter(reply.touched)
        answers: list[Answer] = [
            (it.answer, next(touched if it.verdict is None else settled))
            for it in self._verdicts + self._early_verdicts
        ]
        self._verdicts, self._early_verdicts = [], []
        self._held += len(reply.leases) - sum(reply.settled)
        self._batch.learn(reply.leases)
        return answers

    def _without_void(self, verdicts: Sequence[PendingVerdict]) -> list[PendingVerdict]:
        """Refuse verdicts on jobs that were lost with a failed commit; return the others."""
        self._call_loop(_deliver, [(it.answer, False) for it in verdicts if it.is_void])
        return [it for it in verdicts if not it.is_void]

    def _hand_out_reply(self, reply: Reply, want: Want | None, is_early: bool) -> list[Waiter]:
        """Hand out jobs that were not handed out early; return all clients to answer."""
        leases = [it for it in reply.leases if not is_early or it.token in self._withheld]
        served = self._hand_out(leases, None, self._verdicts)
        if want is not None and len(reply.leases) < want.count:
            self._marked = frozenset(want.queues) if want.sleep else frozenset()
            self._waiters.looked(self._first)
            served += [waiter for waiter in self._first if waiter.late and not waiter.jobs]
        return served

    def _hand_out(
        self, leases: Sequence[Lease], commit: PendingCommit | None, returned: list[PendingVerdict]
    ) -> list[Waiter]:
        """Give jobs to clients, and return these; jobs that none gets go to ``returned``."""
        served: dict[Waiter, None] = {}
        for lease in leases:
            verdict = Verdict(lease.token, Outcome.RELEASE)
            try:
                envelope = lease.open()
                if commit is not None and envelope.at_most_once:  # never delivered twice
                    self._withheld.add(lease.token)
                    continue
                if self._kinds.knows and envelope.task not in self._kinds.knows:
                    waiter, verdict = None, given_back(lease.token, envelope)
                else:
                    waiter = self._waiters.hand_out(ReservedJob(lease, envelope, commit))
            except msgspec.DecodeError as error:
                waiter, verdict.outcome = None, Outcome.FAIL
                verdict.error = f"the job cannot be read: {error}"
            if waiter is None:  # the job is unreadable, its task is unknown, or its client has left
                returned.append(PendingVerdict(verdict, None, None, commit))
            else:
                served[waiter] = None
        return list(served)

    # -- inside an exchange whose commit is pending -----------------------------------------------

    def _hand_out_early(self, leases: Sequence[Lease]) -> list[Verdict]:
        """Hand out jobs before their commit; return the verdicts that clients send meanwhile."""
        self._lose_commit()  # when the broker repeats the step, the jobs of the first try are lost
        self._withheld.clear()
        if leases:
            self._commit = commit = PendingCommit()
            served = self._hand_out(leases, commit, self._early_verdicts)
            self._early_delay.expect(len(served), len(self.inbox), self._took)
            self._answer(served)
            began = time.monotonic()
            self._early_delay.wait(self.inbox)
            self._waited += time.monotonic() - began
            self._collect_early_verdicts()
        return [it.verdict for it in self._early_verdicts if it.verdict is not None]

    def _collect_early_verdicts(self) -> None:
        """Take the verdicts out of the inbox into the exchange under way."""
        others: list[Waiter | PendingVerdict] = []
        while self.inbox and len(self._early_verdicts) < MAX_VERDICTS:
            request = self.inbox.popleft()
            if isinstance(request, Waiter) or request.verdict is None or request.is_void:
                others.append(request)
            else:
                self._early_verdicts.append(request)
        self.inbox.extendleft(reversed(others))

    def _lose_commit(self) -> None:
        """Mark the jobs that were handed out early as lost: the store undid their exchange."""
        if self._commit is None:
            return
        self._commit.failed = True
        if self._on_lost_commit is not None:
            self._call_loop(self._on_lost_commit, self._commit)
        self._commit = None
        self._early_verdicts = self._without_void(self._early_verdicts)

    def _answer(self, waiters: Sequence[Waiter]) -> None:
        for waiter in waiters:
            self._waiters.drop(waiter)
        self._call_loop(self._hand_over, waiters)

    def _call_loop(self, function: Callable[[Any], None], argument: Any) -> None:
        if argument:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its clients with it
                self._loop.call_soon_threadsafe(function, argument)

    def _has_nothing_to_do(self) -> bool:
        """Whether all clients had a look, all verdicts are stored, and hints reach this owner."""
        if self._waiters.to_look or self._verdicts or self._marked != self._waiters.queues():
            return False
        if not self._waiters:  # every client has its answer, and may soon ask again
            self._delay.wait(self.inbox)
        return True

    def _seconds_to_sleep(self, next_due: float) -> float:
        """The seconds until the next tick, or until a job for a waiting client comes due."""
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick_at = now + min(max(SHORTEST_TICK, self._broker.tick()), LONGEST_TICK)
        return min(self._tick_at - now, next_due if self._waiters else math.inf)

    def failed(self, error: Exception) -> float:
        """Give the error to clients. A store that is away may have jobs for clients later."""
        self.say_away(error)
        self._has_work, is_away = False, isinstance(error, BrokerUnavailable)
        self._fail(error, [waiter for waiter in self._waiters if waiter.late or not is_away])
        return RETRY

    def _fail(self, error: Exception, waiters: Sequence[Waiter]) -> None:
        """Give the error to clients; verdicts without a waiting client are sent again."""
        self._lose_commit()
        self._verdicts, self._early_verdicts = self._verdicts + self._early_verdicts, []
        self._collect()
        kept = [it for it in self._verdicts if it.answer is None]
        is_refusal = not isinstance(error, BrokerUnavailable)
        if is_refusal and not waiters and len(kept) == len(self._verdicts):
            kept = []
        self._call_loop(_deliver, [(it.answer, error) for it in self._verdicts])
        self._verdicts = kept
        for waiter in waiters:
            self._waiters.drop(waiter)
        self._call_loop(_deliver, [(waiter.answer, error) for waiter in waiters])

    def _end(self) -> None:
        self._answer_all()
        _wait_for_loop(self._loop, LOOP_PATIENCE)  # the loop may give jobs back
        self._collect()
        try:
            while self._verdicts or self.inbox:
                reply = self.exchange(self._step(Want(0, tuple(self._marked), sleep=False)))
                self._call_loop(_deliver, self._answers(reply))
                self._answer_all()
            if not self._stays or (self._held_is_known and not self._held):
                self._broker.detach(self._owner.id)
        except Exception as error:
            log.warning("the server could not detach from its store: %s", error)
            self._fail(error, [])
            while self.inbox:
                self._verdicts = []
                self._fail(error, list(self._waiters))

    def _answer_all(self) -> None:
        self._collect()
        self._answer(list(self._waiters))


def _wait_for_loop(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Wait in a thread until the loop has handled all earlier calls of the thread."""
    handled = threading.Event()
    with contextlib.suppress(RuntimeError):  # raised when the loop has ended
        loop.call_soon_threadsafe(handled.set)
        handled.wait(seconds)
