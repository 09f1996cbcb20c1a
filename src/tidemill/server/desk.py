"""The desk: where clients that are no workers take jobs, and say what became of them.

All of them are one owner in the store, and one thread speaks for it (:mod:`.clerk`). What happens
in the event loop is here: whether a client still waits is decided in it, and a job that comes for
one that has gone is given back, uncounted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from tidemill.brokers.base import Broker, Mode
from tidemill.job import Command, Note, Outcome, Owner, Verdict
from tidemill.server.asks import Ask, Held, Kinds, Pledge
from tidemill.server.clerk import MOST, Clerk
from tidemill.server.deadlines import Deadlines
from tidemill.server.said import Said

__all__ = ["Desk", "Held", "Pledge"]

LONG = 1.0
"""Seconds of a wait from which on it may begin without a look of its own."""


class Desk:
    """One owner for many clients of one event loop.

    Args:
        owner: as which the store knows all of them.
        tasks: tasks are taken too, not only raw messages.
        knows: only tasks of these names are taken, and no messages. Other tasks of the queues are
            set aside for a worker that knows them.
        stays: the owner is let go at the end only if its clients hold nothing: what they hold
            stays theirs.
        hear: gets the commands the store has for what is held, in the loop.
        broken: for clients whose lines break with this process: jobs are handed out before their
            commit, if the broker can do so, and when it fails this gets the pledge, in the loop.
            Who holds a job under it has lost it.
    """

    def __init__(
        self,
        broker: Broker,
        owner: Owner,
        *,
        tasks: bool = False,
        knows: Sequence[str] = (),
        stays: bool = False,
        hear: Callable[[Sequence[Command]], None] | None = None,
        broken: Callable[[Pledge], None] | None = None,
    ) -> None:
        self.owner = owner
        self.broker = broker
        self._background: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(self._loop, self._too_late)
        self._clerk = Clerk(
            broker,
            owner,
            self._loop,
            self._hand_over,
            kinds=Kinds(tasks or bool(knows), not knows, tuple(knows)),
            stays=stays,
            hear=hear,
            broken=broken,
        )

    async def open(self) -> None:
        """Make the owner known, and begin.

        Raises:
            TidemillError: the store cannot be reached, or takes no owners.
        """
        await asyncio.to_thread(self.broker.attach, self.owner)
        self._clerk.start()

    async def close(self) -> None:
        """Answer all that wait with nothing, see through what was said, and let the owner go."""
        self._clerk.close()
        await asyncio.to_thread(self._clerk.join)
        if self._background:
            await asyncio.wait(self._background)

    @property
    def closing(self) -> bool:
        """Whether :meth:`reserve` finds nothing any more, and returns at once."""
        return self._clerk.closing

    def in_background(self, function: Callable[..., None], *args: object) -> None:
        """Make a blocking call that nobody waits for but :meth:`close`."""
        call = asyncio.ensure_future(asyncio.to_thread(function, *args))
        self._background.add(call)
        call.add_done_callback(self._background.discard)

    async def reserve(
        self,
        queues: Sequence[str],
        count: int = 1,
        timeout: float = 0.0,
        mode: Mode = Mode.STRICT,
        latest: float = math.inf,
    ) -> list[Held]:
        """Up to ``count`` jobs, as soon as there is one; none when ``timeout`` seconds are over.

        It may be a little longer (:mod:`.deadlines`), but no longer than ``latest`` seconds. When
        the call is cancelled, nothing stays taken. ``queues`` are distinct, and at least one.
        """
        if self.closing:
            return []
        ask = Ask(tuple(queues), count, mode, self._loop.create_future())
        # In the inbox first, and what is watched is asked then: the thread does it the other way.
        self._clerk.inbox.append(ask)
        if not self._joins(ask, timeout):
            self._clerk.arrived()
        over = self._deadlines.begin(ask, timeout, latest)
        try:
            return await ask.answer
        except asyncio.CancelledError:
            self._leave(ask)
            self.give_all_back(ask.answer.result() if not ask.answer.cancelled() else [])
            raise
        finally:
            self._deadlines.end(ask, over)

    async def settle(self, verdict: Verdict, pledge: Pledge | None = None) -> bool:
        """Say what became of a job; False when its lease was lost, and nothing changed."""
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._clerk.send(Said(verdict, None, answer, pledge))
        return await answer

    def say(self, verdict: Verdict) -> None:
        """Say what became of a job; nobody needs to hear of it."""
        self._clerk.send(Said(verdict, None, None, None))

    async def touch(
        self,
        token: int,
        seconds: float = 0.0,
        pledge: Pledge | None = None,
        notes: Sequence[Note] = (),
    ) -> bool:
        """More time for a job: its ttr begins anew, or with another; False when it was lost.

        ``notes`` are its progress and what it logs.
        """
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._clerk.send(Said(None, (token, seconds), answer, pledge, notes))
        return await answer

    def give_back(self, token: int, pledge: Pledge | None = None) -> None:
        """Its client has gone: others may have the job, and nobody needs to hear of it."""
        self._clerk.send(Said(Verdict(token, Outcome.RELEASE), None, None, pledge))

    def give_all_back(self, jobs: Sequence[Held]) -> None:
        """The same of several."""
        for held in jobs:
            self.give_back(held.lease.token, held.pledge)

    def _joins(self, ask: Ask, timeout: float) -> bool:
        """Whether the sleep under way is for this client, too: its queues are empty, and watched.

        It is taken in when the thread is up for another reason. Of those that are over by then not
        too many are kept. Who waits for a moment only has a look of its own: what was put just now
        may not have roused the thread yet.
        """
        is_watched = timeout >= LONG and self._clerk.watched.issuperset(ask.queues)
        ask.joined = is_watched and len(self._clerk.inbox) < MOST
        return ask.joined

    def _too_late(self, ask: Ask) -> None:
        ask.late = True  # the look that it waits for answers it, if that is still to come
        if ask.held:  # its answer is on the way
            return
        if ask.looked or ask.answer.done() or (ask.joined and self._clerk.asleep):
            self._leave(ask)
        else:
            self._clerk.wake()

    def _leave(self, ask: Ask) -> None:
        self._clerk.gone.append(ask)
        if not ask.answer.done():
            ask.answer.set_result([])

    def _hand_over(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            if ask.answer.done():
                self.give_all_back(ask.held)
            else:
                ask.answer.set_result(ask.held)
