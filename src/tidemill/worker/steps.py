"""The steps of a worker with its store: what goes into a step, and what becomes of its reply.

A step hands in verdicts and notes and asks for leases. If a step fails, the next step hands in the
same verdicts again, so no verdict is lost.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidemill.brokers.contract.broker import SMALL_RESULT, Broker
from tidemill.brokers.contract.exchange import Reply, Step, Want, is_lost
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.owner_loop import UNTAKEN, OwnerLoop
from tidemill.core.clock import clock
from tidemill.core.config import storable
from tidemill.core.envelope import RESULT_NOT_KEPT
from tidemill.core.job import Command, Lease, Note, Outcome, Verdict
from tidemill.errors import BrokerUnavailable, StoreFull, StoreGone, StoreMoved
from tidemill.worker.child_protocol import Hello, latest_notes
from tidemill.worker.machine import Machine
from tidemill.worker.process import unstarted

if TYPE_CHECKING:
    from tidemill.worker.supervisor import Supervisor

log = logging.getLogger("tidemill.worker")

LAST_STEP = 10.0  # seconds for which the worker repeats its last step if the store is away or full
SHORT_FOR = 60.0  # seconds without jobs leased in advance, after a full store has refused a step


class WorkerLoop(OwnerLoop):
    """The loop of a supervisor. The lock of the pool is free during a call of the store."""

    def __init__(self, supervisor: Supervisor, store: Store, machine: Machine) -> None:
        super().__init__(store, supervisor.owner, machine.poll)
        self._supervisor = supervisor
        self._store = store
        self._pool = pool = supervisor.pool
        self._parts = supervisor.parts
        self._settings = pool.settings
        self._due = 0.0  # machine time at which a part has something to do
        self._paused = 0.0  # machine time until which no part is asked, after an error
        self._hello: Hello | None = None  # the latest that the parts have heard
        self._step: Step | None = None  # the step that the store has not answered
        self._shares: list[int] = []  # shares of the scoreboard that this step frees
        self._leases = HeldLeases()
        self._refusals = RefusedVerdicts(supervisor.owner.id)
        self._short_until = 0.0  # until this machine time, no job is leased in advance

    def collect(self) -> Step:
        """Have the parts do what is due, and collect what the processes have said."""
        pool = self._pool
        if clock.machine() >= max(self._due, self._paused) or pool.hello is not self._hello:
            self._ask_parts()
        with pool.lock:
            pool.news, takes = False, not pool.closing
            want = self._want(takes)
            pool.verdicts += pool.dispatch.place_spare()
            verdicts, pool.verdicts = pool.verdicts, []
            notes, pool.notes = latest_notes(pool.notes), []
            self._shares = pool.shares.unsettled()
            rows = pool.history.rows(settles=bool(verdicts) or not takes)
            held = self._leases.held()
            step = Step(self._owner.id, verdicts, want, notes=notes, held=held, history=rows)
            for part in self._parts:
                part.before_step(step)
        self._step = step
        return step

    def _ask_parts(self) -> None:
        now, hello = clock.machine(), self._pool.hello
        if hello is not None and hello is not self._hello:
            self._hello = hello
            for part in self._parts:
                part.greet(hello)
        try:
            for part in self._parts:
                if part.due <= now:
                    part.look(self._store)
        except (BrokerUnavailable, OSError) as error:
            self._say(error)
            self._paused = now + self._settings.waits.retry
        # A worker without a free slot asks for no job, so no step brings this command.
        except StoreMoved:
            self._supervisor.hand_out(Reply(commands=[Command("quiet")]))

    def _want(self, takes: bool) -> Want:
        pool = self._pool
        count = pool.dispatch.room() if takes else 0
        # A lease takes up room in a full store, and the verdicts may need this room.
        if clock.machine() < self._short_until:
            count = max(0, min(count, pool.slots - pool.held))
        return Want(
            count, self._settings.queues, self._settings.mode, alone=pool.dispatch.can_isolate
        )

    def hand_out(self, step: Step, reply: Reply) -> float:
        """Free what is settled, give the leases to processes, and have the parts act."""
        self._step = None
        self._refusals.say_room()
        again = self._leases.answered(step, reply)
        self._leases.lend(reply.leases)
        pool = self._pool
        with pool.lock:
            pool.settled(step.verdicts, self._shares)
            pool.history.settled(step.verdicts, reply.settled)
            pool.verdicts += again
        if reply.behind or again:
            reply.next_due = 0.0
        self._supervisor.hand_out(reply)
        for part in self._parts:
            part.after_reply(self._store, reply)
        self._due = min([part.due for part in self._parts])
        return max(0.0, min(reply.next_due, max(self._due, self._paused) - clock.machine()))

    def failed(self, error: Exception) -> float:
        """Have the next step say the same again; settle a refused step by parts."""
        step, self._step = self._step, None
        if step is None or isinstance(error, (BrokerUnavailable, OSError)):
            self._say(error)
            if step is not None:
                with self._pool.lock:
                    self._pool.verdicts = [*step.verdicts, *self._pool.verdicts]
                    self._pool.notes = [*step.notes, *self._pool.notes]
            return self._settings.waits.retry
        if not (step.verdicts or step.notes or step.history or isinstance(error, StoreFull)):
            raise error
        return self._settle_refused(step, error)

    def _settle_refused(self, step: Step, error: Exception) -> float:
        """Settle the verdicts of a refused step by parts; the next step has the rest of them."""
        if isinstance(error, StoreFull):
            self._short_until = clock.machine() + SHORT_FOR
        pool = self._pool
        done = self._refusals.settle(self._broker, step.verdicts, step.notes, error)
        answered = [*zip(step.verdicts, done.answers, strict=True)]
        settled = [verdict for verdict, answer in answered if answer is not None]
        self._leases.settled(settled)
        self._leases.lend(done.reply.leases)
        with pool.lock:
            pool.settled(settled, [])
            pool.history.settled(done.verdicts, done.answers, refused=True)
            pool.verdicts += [verdict for verdict, answer in answered if answer is None]
            pool.notes = [*done.notes, *pool.notes]
        self._supervisor.hand_out(done.reply)
        if is_lost(done.reply):
            self.begin_anew()
        return min(done.reply.next_due, self._settings.waits.retry)

    def _say(self, error: Exception) -> None:
        """Log once that the store is away, or full."""
        if isinstance(error, StoreGone) or not isinstance(error, UNTAKEN):
            raise error
        if isinstance(error, StoreFull):
            self._refusals.say_full(error)
        else:
            self.say_away(error)

    def lost(self) -> None:
        with self._pool.lock:
            self._pool.lose()
            for part in self._parts:
                part.forget()
        self._leases.forget()

    def has_news(self) -> bool:
        """True after a change that the next step must tell the store, and when the worker ends."""
        return self._pool.news or self._supervisor.over

    def rest(self) -> None:
        """Take no more jobs, since the worker stops. Any thread may call this."""
        self._parts = [part for part in self._parts if not part.rests]

    def end(self) -> None:
        """Store the last verdicts, and detach.

        If the store does not take the verdicts in time, the worker does not detach: by a detach,
        the store would give back ended jobs without an attempt.
        """
        pool, until = self._pool, clock.machine() + LAST_STEP
        self.step()
        while pool.verdicts and clock.machine() < until:
            self._poll([], self._settings.waits.retry)
            self.step()
        if pool.verdicts:
            left = len(pool.verdicts)
            log.error("the store did not take the outcome of %d jobs: they may run again", left)
            pool.interrupted = True
            return
        if pool.history.due < math.inf:
            self.step()  # the numbers of the last verdicts
        # If this fails, the store later notices the end by itself.
        with contextlib.suppress(*UNTAKEN):
            self._broker.detach(self._owner.id)
            for part in self._parts:
                part.end(self._store)


SAID_FOR = 60.0
"""Seconds between two log lines about a full store, which may have room and be full in turn."""


class Settled(msgspec.Struct):
    """What became of a refused step.

    Attributes:
        reply: the leases and commands of all replies. ``next_due`` is 0 when all verdicts and notes
            are stored, and infinity when some must be offered again.
        verdicts: the verdicts of the step, in order. A verdict that cannot be stored is replaced by
            the failure in its place.
        answers: the answers to these verdicts. None means that the verdict must be offered again.
        notes: notes that must be offered again.
    """

    reply: Reply
    verdicts: list[Verdict] = []
    answers: list[bool | None] = []
    notes: Sequence[Note] = ()

    def put_off(self, verdicts: Sequence[Verdict]) -> None:
        self.verdicts += verdicts
        self.answers += [None] * len(verdicts)
        self.reply.next_due = float("inf")


class RefusedVerdicts:
    """The refused steps of one owner: their verdicts are handed in by parts.

    A full store keeps the outcome of a job that succeeded, but no large result. All large results
    of the step are dropped at once. A refusal halves the size of the parts. So a full store has to
    refuse only a few parts a second, however many jobs end. The reason of any other refusal may be
    a single verdict, which must not hold up the other verdicts. So each verdict is handed in by
    itself, and a job whose verdict cannot be stored fails.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._full = False  # True when the latest log line says that the store has no room
        self._full_at = -SAID_FOR  # machine time of the last log line about a full store
        self._lost_at = -SAID_FOR  # machine time of the last log line about lost results
        self._refused_at = -SAID_FOR  # machine time of the last log line about another refusal

    def settle(
        self, broker: Broker, verdicts: Sequence[Verdict], notes: Sequence[Note], error: Exception
    ) -> Settled:
        done = Settled(Reply(next_due=0.0 if verdicts or notes else float("inf")))
        full = error if isinstance(error, StoreFull) else None
        if full is not None:
            self._drop_results(verdicts, full)
        elif clock.machine() - self._refused_at >= SAID_FOR:
            self._refused_at = clock.machine()
            log.error("the store refused a step: %s; its verdicts are handed in one by one", error)
        if notes:
            self._store_notes(broker, notes, done)
        left, size = verdicts, len(verdicts) if full is not None else 1
        while left and size:
            try:
                self._exchange(broker, left[:size], done)
            except (BrokerUnavailable, OSError):
                break
            except StoreFull as refusal:
                full = refusal
                if size > 1 or isinstance(error, StoreFull):
                    size //= 2
                    continue
                done.put_off(left[:1])  # a smaller verdict may still have room
            except Exception as refusal:
                if size > 1:
                    size = 1
                    continue
                self._fail(broker, left[0], refusal, done)
            left = left[size:]
        if left or (full is not None and not verdicts):
            done.put_off(left)
        if full is not None and (None in done.answers or not verdicts):
            self.say_full(full)
        return done

    def _store_notes(self, broker: Broker, notes: Sequence[Note], done: Settled) -> None:
        """Store the notes of running jobs by themselves, before any of these jobs is settled."""
        try:
            self._hand_in(broker, Step(self._owner, notes=notes), done)
        except (BrokerUnavailable, StoreFull, OSError):
            done.notes = notes
            done.put_off([])
        except Exception as error:
            log.error("progress and log lines of jobs cannot be stored, and are lost: %s", error)

    def say_full(self, error: StoreFull) -> None:
        if not self._full and clock.machine() - self._full_at >= SAID_FOR:
            self._full, self._full_at = True, clock.machine()
            log.error("%s; the worker keeps the outcome of ended jobs until there is room", error)

    def say_room(self) -> None:
        """Log that the store has room again, if an earlier line said that it has none."""
        if self._full:
            self._full = False
            log.info("the store has room again")

    def _drop_results(self, verdicts: Sequence[Verdict], error: StoreFull) -> None:
        large = [verdict for verdict in verdicts if len(verdict.result) > SMALL_RESULT]
        for verdict in large:
            verdict.result = RESULT_NOT_KEPT
        if large and clock.machine() - self._lost_at >= SAID_FOR:
            self._lost_at = clock.machine()
            log.error("%s; until then large results are not kept", error)

    def _fail(self, broker: Broker, verdict: Verdict, error: Exception, done: Settled) -> None:
        reason = storable(f"the outcome of the job could not be stored: {error}")[:2000]
        log.error("a verdict cannot be stored; its job fails", exc_info=error)
        failure = Verdict(verdict.token, Outcome.FAIL, error=reason)
        try:
            self._exchange(broker, [failure], done)
        except Exception:  # the next step offers the verdict again
            done.put_off([verdict])

    def _exchange(self, broker: Broker, verdicts: Sequence[Verdict], done: Settled) -> None:
        done.answers += self._hand_in(broker, Step(self._owner, verdicts), done)
        done.verdicts += verdicts

    @staticmethod
    def _hand_in(broker: Broker, step: Step, done: Settled) -> list[bool]:
        answer = broker.exchange(step)
        done.reply.leases += answer.leases
        done.reply.commands += answer.commands
        return answer.settled


KEPT_FOR = 60.0  # seconds for which verdicts that the store has taken are remembered
KEPT_MOST = 10_000  # verdicts remembered at most
KEPT_BYTES = 32 * 1024 * 1024  # bytes of results remembered at most


class HeldLeases:
    """The leases that are not settled, and the verdicts that the store has lately taken.

    A store may lose its latest steps: a replica that lags takes over, or a backup is restored. The
    store then counts jobs as running that this worker has settled or never had: *strays*. The
    worker asks for the strays and settles each again with its remembered verdict. A stray without a
    remembered verdict goes back to its queue, and no attempt counts. Only the thread that calls the
    store may use this.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()  # tokens of leases that are not settled
        self._taken: collections.deque[tuple[float, int, Sequence[Verdict]]] = collections.deque()
        self._count = 0
        self._bytes = 0
        self._behind = False

    def held(self) -> list[int] | None:
        """For ``Step.held``: the tokens of all leases, if the store may have lost steps."""
        self._drop_old()
        return list(self._open) if self._behind else None

    def answered(self, step: Step, reply: Reply) -> list[Verdict]:
        """Evaluate the reply to a step; return verdicts on the strays that the reply names."""
        self.settled(step.verdicts)
        self._behind = reply.behind or (self._behind and step.held is None)
        return self._settle_again(reply.strays) if reply.strays else []

    def lend(self, leases: Iterable[Lease]) -> None:
        self._open.update([lease.token for lease in leases])

    def settled(self, verdicts: Sequence[Verdict]) -> None:
        if not verdicts:
            return
        self._open.difference_update([one.token for one in verdicts if not one.hold])
        size = sum([len(one.result) for one in verdicts])
        self._taken.append((clock.machine(), size, verdicts))
        self._count += len(verdicts)
        self._bytes += size
        self._drop_old()

    def _drop_old(self) -> None:
        oldest = clock.machine() - KEPT_FOR
        while self._taken and (
            self._count > KEPT_MOST or self._bytes > KEPT_BYTES or self._taken[0][0] < oldest
        ):
            _, size, old = self._taken.popleft()
            self._count -= len(old)
            self._bytes -= size

    def forget(self) -> None:
        self._open.clear()
        self._taken.clear()
        self._count = self._bytes = 0
        self._behind = False

    def _settle_again(self, strays: Sequence[int]) -> list[Verdict]:
        wanted, oldest = frozenset(strays), clock.machine() - KEPT_FOR
        again = [
            one
            for at, _, verdicts in self._taken
            if at >= oldest
            for one in verdicts
            if one.token in wanted
        ]
        known = {one.token for one in again}
        back = [unstarted(token) for token in strays if token not in known]
        self._open |= wanted
        log.warning(
            "the store has lost its latest steps: %d verdicts are handed in again, %d jobs go back",
            len(again),
            len(back),
        )
        return again + back
