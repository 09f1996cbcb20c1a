"""A shared owner: one owner of the store through which many clients reserve and settle jobs.

One thread, the dispatcher (:mod:`.dispatcher`), makes all exchanges with the store. This module
runs in the event loop. Only the loop decides whether a client still waits. A job for a client that
has left goes back to its queue, and no attempt is counted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Mode
from tidemill.core.job import Note, Outcome, Owner, Verdict
from tidemill.server.dispatcher import MAX_VERDICTS, Dispatcher, PendingVerdict
from tidemill.server.waiters import JobKinds, PendingCommit, ReservedJob, Waiter

LONG_WAIT = 1.0
"""The shortest wait, in seconds, that may begin without a request of its own to the store."""

SHARE, MOST = 100, 0.5
"""A wait may last longer by 1/SHARE of its length, but by at most MOST seconds."""

SHORTEST = 0.001  # seconds. A shorter wait is rounded as if it lasted this long.


def round_moment(now: float, seconds: float) -> float:
    """The rounded end of a wait that begins at ``now``: a multiple of a power of two.

    With thousands of long polls, one poll ends every few milliseconds, and a wake-up for each costs
    several times as much as its answer. So many waits end at the same round moment.
    """
    _, exponent = math.frexp(min(MOST, max(seconds, SHORTEST) / SHARE))
    step = math.ldexp(0.5, exponent)
    return math.ceil((now + seconds) / step) * step


class SharedOwner:
    """One owner for many clients of one event loop.

    Args:
        owner: the owner as the store lists it.
        tasks: also lease tasks, not only raw messages.
        knows: lease tasks of these names, and no messages; other tasks are given back.
        stays: detach the owner at the end only if its clients hold nothing, so that clients keep
            their jobs when the server ends.
        on_lost_commit: receives a failed commit in the loop, when clients have lost its jobs. With
            this argument jobs are handed out before their commit, if the broker can do so. Give it
            only if the connections of the clients break when this process dies.
    """

    def __init__(
        self,
        broker: Broker,
        owner: Owner,
        *,
        tasks: bool = False,
        knows: Sequence[str] = (),
        stays: bool = False,
        on_lost_commit: Callable[[PendingCommit], None] | None = None,
    ) -> None:
        self.owner = owner
        self._background: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._ends: dict[float, dict[Waiter, None]] = {}  # the waiters by the end of their time
        self._dispatcher = Dispatcher(
            broker,
            owner,
            self._loop,
            self._hand_over,
            kinds=JobKinds(tasks or bool(knows), not knows, tuple(knows)),
            stays=stays,
            on_lost_commit=on_lost_commit,
        )
        self.broker = broker

    async def open(self) -> None:
        await asyncio.to_thread(self.broker.attach, self.owner)
        self._dispatcher.start()

    async def close(self) -> None:
        """Answer all waiters without a job, store the last verdicts, and detach the owner."""
        self._dispatcher.close()
        await asyncio.to_thread(self._dispatcher.join)
        if self._background:
            await asyncio.wait(self._background)

    @property
    def closing(self) -> bool:
        """Whether the owner is closing: :meth:`reserve` then returns at once without a job."""
        return self._dispatcher.closing

    def in_background(self, function: Callable[..., None], *args: object) -> None:
        """Make a blocking call in a thread; only :meth:`close` waits for it."""
        call = asyncio.ensure_future(asyncio.to_thread(function, *args))
        self._background.add(call)
        call.add_done_callback(self._background.discard)

    # -- reserving --------------------------------------------------------------------------------

    async def reserve(
        self,
        queues: Sequence[str],
        count: int = 1,
        timeout: float = 0.0,
        mode: Mode = Mode.STRICT,
        latest: float = math.inf,
    ) -> list[ReservedJob]:
        """Up to ``count`` jobs as soon as a job is available; none after ``timeout`` seconds.

        The wait may last a little longer (:func:`round_moment`), but never longer than ``latest``
        seconds. A cancelled call reserves nothing. ``queues`` are distinct names.
        """
        if self.closing:
            return []
        waiter = Waiter(tuple(queues), count, mode, self._loop.create_future())
        # The loop fills the inbox and then reads ``watched``. The thread falls asleep and then
        # reads the inbox. So no waiter is missed.
        self._dispatcher.inbox.append(waiter)
        if not self._joins(waiter, timeout):
            self._dispatcher.arrived()
        now = self._loop.time()
        end = min(round_moment(now, timeout), now + latest)
        if end not in self._ends:
            self._ends[end] = {}
            self._loop.call_at(end, self._time_over, end)
        self._ends[end][waiter] = None
        try:
            return await waiter.answer
        except asyncio.CancelledError:
            self._leave(waiter)
            self.give_all_back(waiter.answer.result() if not waiter.answer.cancelled() else [])
            raise
        finally:
            self._ends.get(end, {}).pop(waiter, None)

    def _joins(self, waiter: Waiter, timeout: float) -> bool:
        """Whether a client may join the dispatcher's sleep: its queues are empty and watched."""
        # A short wait needs a look of its own: a new job may not have woken the thread yet.
        is_watched = timeout >= LONG_WAIT and self._dispatcher.watched.issuperset(waiter.queues)
        waiter.joined = is_watched and len(self._dispatcher.inbox) < MAX_VERDICTS
        return waiter.joined

    def _time_over(self, end: float) -> None:
        for waiter in self._ends.pop(end):
            waiter.late = True  # a first look that is still to come answers the waiter
            if waiter.jobs:  # the answer is on the way
                continue
            has_joined = waiter.joined and self._dispatcher.asleep
            if waiter.looked or waiter.answer.done() or has_joined:
                self._leave(waiter)
            else:
                self._dispatcher.wake()

    def _leave(self, waiter: Waiter) -> None:
        self._dispatcher.gone.append(waiter)
        if not waiter.answer.done():
            waiter.answer.set_result([])

    def _hand_over(self, waiters: Sequence[Waiter]) -> None:
        for waiter in waiters:
            if waiter.answer.done():
                self.give_all_back(waiter.jobs)
            else:
                waiter.answer.set_result(waiter.jobs)

    # -- settling ---------------------------------------------------------------------------------

    async def settle(self, verdict: Verdict, commit: PendingCommit | None = None) -> bool:
        """Settle a job; False when its lease was lost and nothing changed."""
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._dispatcher.send(PendingVerdict(verdict, None, answer, commit))
        return await answer

    def settle_later(self, verdict: Verdict, commit: PendingCommit | None = None) -> None:
        self._dispatcher.send(PendingVerdict(verdict, None, None, commit))

    async def touch(
        self,
        token: int,
        seconds: float = 0.0,
        commit: PendingCommit | None = None,
        notes: Sequence[Note] = (),
    ) -> bool:
        """Restart a job's ttr, or set it anew, and store notes; False when the lease was lost."""
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._dispatcher.send(PendingVerdict(None, (token, seconds), answer, commit, notes))
        return await answer

    def give_back(self, token: int, commit: PendingCommit | None = None) -> None:
        """Release the job of a client that has left, without waiting for the answer."""
        self.settle_later(Verdict(token, Outcome.RELEASE), commit)

    def give_all_back(self, jobs: Sequence[ReservedJob]) -> None:
        for job in jobs:
            self.give_back(job.lease.token, job.commit)
