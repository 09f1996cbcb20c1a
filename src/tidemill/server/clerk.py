"""The clerk: the thread that speaks with the store for all clients of a desk (:mod:`.desk`).

Whatever was asked and said while one exchange was under way goes into the next. So ten clients cost
hardly more commits than one, and thousands that wait cost nothing.

An exchange may hand out jobs before it is durable (:mod:`tidemill.brokers.early`): inside it the
clerk waits a moment for what clients say of them, and that goes into the same commit. When that
fails the pledge is broken: nothing that is said under it reaches the store.

The thread only ever adds to what the event loop knows by ``call_soon_threadsafe``, and the loop to
what the thread knows by ``inbox`` and ``gone``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tidemill.brokers.base import Broker, Feature, Mode, Reply, Step, Want
from tidemill.brokers.early import Early
from tidemill.errors import BrokerUnavailable, TidemillError
from tidemill.gathering import EACH_CLIENT, Gathering
from tidemill.job import Command, Lease, Outcome, Owner, Verdict
from tidemill.server.asks import Ask, Asks, Held, Kinds, Pledge, Portion
from tidemill.server.said import Answer, Said, tell

__all__ = ["MOST", "Clerk"]

log = logging.getLogger("tidemill.server")

MOST = 1000
"""Verdicts in one step, at most."""

SHORTEST, LONGEST = 0.1, 2.0
"""Seconds of rest when the store cannot be used, growing."""

SELDOM = 600.0
"""Seconds between two looks after the house, at most."""


class Clerk:
    """One owner's thread; what a desk takes is described there, and ``hand_over`` is its own.

    ``hand_over`` gets those who wait no more, in the loop, with the jobs that each of them has.
    """

    def __init__(
        self,
        broker: Broker,
        owner: Owner,
        loop: asyncio.AbstractEventLoop,
        hand_over: Callable[[Sequence[Ask]], None],
        *,
        kinds: Kinds,
        stays: bool,
        hear: Callable[[Sequence[Command]], None] | None,
        broken: Callable[[Pledge], None] | None,
    ) -> None:
        self.inbox: collections.deque[Ask | Said] = collections.deque()
        self.gone: collections.deque[Ask] = collections.deque()  # who waited, and does no more
        self.watched = frozenset[str]()  # the queues that the sleep under way is for
        self.asleep = False
        self.closing = False
        self._broker = broker
        self._owner = owner
        self._loop = loop
        self._hand_over = hand_over
        self._kinds = kinds
        self._told = 0 if kinds.knows else -1  # see Want.told
        self._stays = stays
        self._hear = hear
        self._broken = broken
        self._early = broker if broken is not None and isinstance(broker, Early) else None
        self._merged = Mode.MERGED if Feature.MERGED in broker.features else Mode.STRICT
        self._asks = Asks()
        self._portion = Portion(few=bool(kinds.knows))  # there may be many such desks
        self._gathering = Gathering(EACH_CLIENT)
        self._said: list[Said] = []
        self._pledge: Pledge | None = None  # of the exchange that is under way
        self._prompt = Gathering(EACH_CLIENT, least=1)
        self._late: list[Said] = []  # what was heard inside of it
        self._withheld: set[int] = set()  # tokens of leases that are not handed out inside of it
        self._took = self._waited = 0.0  # the last exchange, and for what is heard inside this one
        self._marked = frozenset[str]()  # the queues the store may hint us for
        self._keep_house = 0.0  # monotonic time
        self._held = 0  # jobs that clients may hold; those they have lost are among them
        self._knows = True  # no job can be held that is not counted
        self._rest = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-desk", daemon=True)

    # -- what the loop calls ----------------------------------------------------------------------

    def start(self) -> None:
        """Begin; the store knows the owner by now."""
        self._thread.start()

    def close(self) -> None:
        """Answer all that wait with nothing, see through what was said, and let the owner go."""
        self.closing = True
        self.wake()

    def join(self) -> None:
        """Wait until that is done."""
        if self._thread.is_alive():
            self._thread.join()

    def send(self, what: Ask | Said) -> None:
        """Take this into the next exchange."""
        self.inbox.append(what)
        self.arrived()

    def arrived(self) -> None:
        """Something that cannot wait is in the inbox."""
        self._gathering.arrived(len(self.inbox))
        self._prompt.arrived(len(self.inbox))
        self.wake()

    def wake(self) -> None:
        """Sleep no more, to see to what is in the inbox."""
        # Appended first, asked then; the thread says that it sleeps first, and looks then.
        if self.asleep:
            self.asleep = False  # once is enough
            self._rest.set()
            self._broker.wake(self._owner.id)

    # -- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        pause = SHORTEST
        while not self.closing:
            try:
                self._turn()
                pause = SHORTEST
                continue
            except BrokerUnavailable as error:
                log.warning("the desk cannot reach its store: %s", error)
                self._fail(error, [ask for ask in self._asks if ask.late])
            except Exception as error:
                log.log(
                    logging.WARNING if isinstance(error, TidemillError) else logging.ERROR,
                    "the desk goes on after an error: %s",
                    error,
                    exc_info=not isinstance(error, TidemillError),
                )
                self._fail(error, list(self._asks))
            self._rest_for(pause)
            pause = min(2 * pause, LONGEST)
        self._end()

    def _turn(self) -> None:
        """One exchange, and a sleep when nothing is left to do."""
        if self.inbox:
            self._gathering.wait(self.inbox)
        self._collect()
        want, first = self._next_want()
        begun = time.monotonic()
        reply, answers = self._exchange(want)
        self._took = time.monotonic() - begun - self._waited
        pledged = self._pledge is not None
        left = [lease for lease in reply.leases if not pledged or lease.token in self._withheld]
        asks = self._hand_out(left, None, self._said)
        if want is not None and len(reply.leases) < want.count:
            self._marked = frozenset(want.queues) if want.sleep else frozenset()
            self._asks.looked(first)
            asks += [ask for ask in first if ask.late and not ask.held]
        # Before they hear of it: who is quick would be counted twice.
        self._gathering.expect(len(answers) + len(asks), len(self.inbox), self._took)
        self._tell(tell, answers)
        self._answer(asks)
        self._obey(reply.commands)
        if not self._asks.to_look and not self._said and self._marked == self._asks.queues():
            if not self._asks:  # all were answered, and may be back in a moment
                self._gathering.wait(self.inbox)
            self._sleep(reply.next_due)

    def _next_want(self) -> tuple[Want | None, list[Ask]]:
        """What to ask of the store now, and whose first look that is.

        Before the thread sleeps, the store is told of all queues that are waited for. It may then
        hint us alone, and so a queue nobody waits for any more is given up again first: the hint
        has to reach somebody else.
        """
        gone = tuple(self._marked - self._asks.queues())
        self._marked = frozenset()
        if gone:
            kinds = self._kinds
            want = Want(0, gone, self._merged, kinds.tasks, messages=kinds.messages, sleep=False)
            return want, []
        if not self._asks:
            return None, []
        want, first = self._asks.want(self._merged, self._kinds, self._told)
        if want.count > self._portion.count:
            want = msgspec.structs.replace(want, count=self._portion.count)
        return want, first

    def _exchange(self, want: Want | None) -> tuple[Reply, list[Answer]]:
        """Hand in what was said, and take what is wanted; the answers to what was said, too."""
        if any(said.is_void for said in self._said):
            self._tell(tell, [(said.answer, False) for said in self._said if said.is_void])
            self._said = [said for said in self._said if not said.is_void]
        verdicts = [s.verdict for s in self._said if s.verdict is not None]
        touches = [s.touch for s in self._said if s.touch is not None]
        notes = [note for s in self._said for note in s.notes]
        step = Step(self._owner.id, verdicts, want, touches, notes)
        self._pledge, self._waited = None, 0.0
        try:
            if self._early is not None and want is not None and want.count:
                reply = self._early.exchange_early(step, self._hand_out_early)
            else:
                reply = self._broker.exchange(step)
        except BaseException:
            self._knows = False  # it may have been done
            raise
        if want is not None and want.told >= 0:
            self._told = reply.told
        settled, touched = iter(reply.settled), iter(reply.touched)
        answers: list[Answer] = [
            (said.answer, next(touched if said.verdict is None else settled))
            for said in self._said + self._late
        ]
        self._said, self._late = [], []
        self._held += len(reply.leases) - sum(reply.settled)
        self._portion.learn(reply.leases)
        return reply, answers

    def _hand_out_early(self, leases: Sequence[Lease]) -> list[Verdict]:
        """Inside the exchange: give jobs to those who wait for them, and hear what they say.

        A message with ttr=0 is withheld until the commit: it must not be delivered twice. This is
        called anew when the exchange is, and what it handed out before is lost then.
        """
        self._break_pledge()
        self._withheld.clear()
        if leases:
            self._pledge = pledge = Pledge()
            asks = self._hand_out(leases, pledge, self._late)
            self._prompt.expect(len(asks), len(self.inbox), self._took)
            self._answer(asks)
            begun = time.monotonic()
            self._prompt.wait(self.inbox)
            self._waited += time.monotonic() - begun
            self._hear_late()
        return [said.verdict for said in self._late if said.verdict is not None]

    def _hear_late(self) -> None:
        """What has been said by now goes into the exchange that is under way."""
        others: list[Ask | Said] = []
        while self.inbox and len(self._late) < MOST:
            what = self.inbox.popleft()
            if isinstance(what, Said) and what.verdict is not None and not what.is_void:
                self._late.append(what)
            else:
                others.append(what)
        self.inbox.extendleft(reversed(others))

    def _break_pledge(self) -> None:
        """What was handed out inside an exchange is lost: that was undone."""
        if self._pledge is None:
            return
        self._pledge.broken = True
        if self._broken is not None:
            self._tell(self._broken, self._pledge)
        self._pledge = None
        self._tell(tell, [(said.answer, False) for said in self._late if said.is_void])
        self._late = [said for said in self._late if not said.is_void]

    def _collect(self) -> None:
        """Take in what was said and asked meanwhile."""
        while self.inbox and len(self._said) < MOST:
            what = self.inbox.popleft()
            if not isinstance(what, Ask):
                self._said.append(what)
            elif not what.answer.done():  # else it has joined, and left
                self._take_in(what)
        while self.gone:
            self._asks.drop(self.gone.popleft())

    def _take_in(self, ask: Ask) -> None:
        """It waits from now on. One that has joined others may have its first look behind it.

        Its queues were found empty. What has come since is not slept through: the thread sleeps
        only after a look for the queues of all. Which of several jobs it gets must not depend on
        that, and so it is one that would get the same by a look of its own.
        """
        self._asks.add(ask)
        if ask.joined and not ask.late and ask.is_plain(self._merged):
            self._asks.looked([ask])
            if ask.late:  # since a moment ago, and it counts on a look to answer it
                self._answer([ask])

    def _hand_out(
        self, leases: Sequence[Lease], pledge: Pledge | None, back: list[Said]
    ) -> list[Ask]:
        """Give jobs to those who wait for them; the clients that got some. Others go ``back``."""
        asks: dict[Ask, None] = {}
        for lease in leases:
            verdict = Verdict(lease.token, Outcome.RELEASE)
            try:
                envelope = lease.open()
                if pledge is not None and envelope.at_most_once:
                    self._withheld.add(lease.token)
                    continue
                if self._kinds.knows and envelope.task not in self._kinds.knows:
                    ask, verdict.outcome = None, Outcome.UNKNOWN
                    verdict.error = f"no worker knows task {envelope.task!r}"
                else:
                    ask = self._asks.hand(Held(lease, envelope, pledge))
            except msgspec.DecodeError as error:
                ask, verdict.outcome = None, Outcome.FAIL
                verdict.error = f"the job cannot be read: {error}"
            if ask is None:  # not readable, unknown, or it came for one that has gone
                back.append(Said(verdict, None, None, pledge))
            else:
                asks[ask] = None
        return list(asks)

    def _answer(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self._asks.drop(ask)
        self._tell(self._hand_over, asks)

    def _tell(self, how: Callable[[Any], None], what: Any) -> None:
        if what:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its clients with it
                self._loop.call_soon_threadsafe(how, what)

    def _obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if command.verb == "lost":
                log.warning("the store had given up the desk: what was held is others' now")
                self._marked = frozenset()
                self._broker.attach(self._owner)
            elif self._hear is not None:
                self._tell(self._hear, [command])

    def _sleep(self, next_due: float) -> None:
        now = time.monotonic()
        if now >= self._keep_house:
            self._keep_house = now + min(max(SHORTEST, self._broker.tick()), SELDOM)
        until = self._keep_house - now
        self.asleep = True
        self.watched = self._marked
        try:
            if not (self.inbox or self.closing):
                # What comes due matters to nobody when nobody waits.
                self._broker.wait(self._owner.id, min(until, next_due) if self._asks else until)
        finally:
            self.watched = frozenset()
            self.asleep = False

    def _rest_for(self, seconds: float) -> None:
        """Do nothing for a while, since nothing can be done."""
        self._rest.clear()
        self.asleep = True
        if not (self.inbox or self.closing):
            self._rest.wait(seconds)
        self.asleep = False

    def _fail(self, error: Exception, asks: Sequence[Ask]) -> None:
        """Tell those that said something that it may not have been heard, and some that wait.

        What nobody waits for is said again, unless it was refused when it was said by itself.
        """
        self._break_pledge()
        self._said, self._late = self._said + self._late, []
        self._collect()
        kept = [said for said in self._said if said.answer is None]
        if not isinstance(error, BrokerUnavailable) and not asks and len(kept) == len(self._said):
            kept = []
        self._tell(tell, [(s.answer, error) for s in self._said])
        self._said = kept
        for ask in asks:
            self._asks.drop(ask)
        self._tell(tell, [(ask.answer, error) for ask in asks])

    def _hear_the_loop(self) -> None:
        """Wait until the loop has seen all that it was told: it may have given jobs back."""
        seen = threading.Event()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(seen.set)
            seen.wait(LONGEST)

    def _end(self) -> None:
        """Hear the last of what was said; nobody gets anything any more."""
        self._collect()
        self._answer(list(self._asks))
        self._hear_the_loop()
        self._collect()
        try:
            while self._said:
                _, answers = self._exchange(Want(0, tuple(self._marked), sleep=False))
                self._tell(tell, answers)
                self._collect()
            if not self._stays or (self._knows and not self._held):
                self._broker.detach(self._owner.id)
        except Exception as error:
            log.warning("the desk could not say goodbye to its store: %s", error)
            self._fail(error, [])
