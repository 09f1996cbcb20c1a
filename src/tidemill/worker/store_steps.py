"""The steps that a supervisor makes with the store, and what becomes of steps that fail.

A step hands in verdicts and notes and asks for leases. If a step fails, the next step hands in the
same verdicts again, so no verdict is lost.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Sequence

import msgspec

from tidemill.brokers.contract.broker import SMALL_RESULT, Broker
from tidemill.brokers.contract.exchange import Reply, Step, Want
from tidemill.brokers.contract.store import Store
from tidemill.core.clock import clock
from tidemill.core.config import storable
from tidemill.core.envelope import RESULT_NOT_KEPT
from tidemill.core.errors import BrokerUnavailable, StoreFull, StoreGone, TidemillError
from tidemill.core.job import Lease, Note, Outcome, Verdict
from tidemill.worker.notes import latest_notes
from tidemill.worker.parts import Part
from tidemill.worker.pool import ProcessPool
from tidemill.worker.process import unstarted

log = logging.getLogger("tidemill.worker")

SHORT_FOR = 60.0
"""Seconds in which a worker leases no job in advance, after a full store has refused a step."""


class StoreSteps:
    """The steps of one owner. The lock of the pool is free during a call of the store."""

    def __init__(self, owner: str, pool: ProcessPool) -> None:
        self._owner = owner
        self._settings = pool.settings
        self._pool = pool
        self._leases = HeldLeases()
        self._refusals = RefusedVerdicts(owner)
        self._troubled = False  # True when the latest log line says that the broker is away
        self._short_until = 0.0  # until this machine time, no job is leased in advance

    def exchange(self, broker: Store, parts: Iterable[Part], *, takes: bool) -> Reply:
        """Hand in verdicts and notes; ask for leases (``takes``); have the parts do their share."""
        pool = self._pool
        with pool.lock:
            want = self._want(takes)
            pool.verdicts += pool.dispatch.place_spare()
            verdicts, pool.verdicts = pool.verdicts, []
            notes, pool.notes = latest_notes(pool.notes), []
            shares = pool.shares.unsettled()
            rows = pool.history.rows(settles=bool(verdicts) or not takes)
            held = self._leases.held()
            step = Step(self._owner, verdicts, want, notes=notes, held=held, history=rows)
            for part in parts:
                part.before_step(step)
        try:
            reply = broker.exchange(step)
        except (BrokerUnavailable, OSError) as error:
            self.trouble(error)
            with pool.lock:
                pool.verdicts, pool.notes = verdicts + pool.verdicts, notes + pool.notes
            return Reply(next_due=self._settings.waits.retry)
        except Exception as error:
            if not (verdicts or notes or rows or isinstance(error, StoreFull)):
                raise
            return self._settle_refused(broker, step, error)
        again = self._leases.answered(step, reply)
        with pool.lock:
            pool.settled(verdicts, shares)
            pool.history.settled(verdicts, reply.settled)
            pool.verdicts += again
        if reply.behind or again:
            reply.next_due = 0.0
        self._no_trouble()
        try:
            for part in parts:
                part.after_reply(broker, reply)
        except (BrokerUnavailable, OSError) as error:
            self.trouble(error)
            reply.next_due = self._settings.waits.retry
        self._leases.lend(reply.leases)
        return reply

    def _settle_refused(self, broker: Store, step: Step, error: Exception) -> Reply:
        """Settle the verdicts of a refused step by parts; the next step has the rest of them."""
        if isinstance(error, StoreFull):
            self._short_until = clock.machine() + SHORT_FOR
        done, pool = self._refusals.settle(broker, step.verdicts, step.notes, error), self._pool
        answered = [*zip(step.verdicts, done.answers, strict=True)]
        settled = [verdict for verdict, answer in answered if answer is not None]
        self._leases.settled(settled)
        self._leases.lend(done.reply.leases)
        with pool.lock:
            pool.settled(settled, [])
            pool.history.settled(done.verdicts, done.answers, refused=True)
            pool.verdicts += [verdict for verdict, answer in answered if answer is None]
            pool.notes = [*done.notes, *pool.notes]
        done.reply.next_due = min(done.reply.next_due, self._settings.waits.retry)
        return done.reply

    def _want(self, takes: bool) -> Want:
        """The want of the next step."""
        pool = self._pool
        count = pool.dispatch.room() if takes else 0
        # A lease takes up room in a full store, and the verdicts may need this room.
        if clock.machine() < self._short_until:
            count = max(0, min(count, pool.slots - pool.held))
        return Want(
            count,
            self._settings.queues,
            self._settings.mode,
            alone=pool.dispatch.can_isolate,
        )

    def wait(self, broker: Store, timeout: float, fds: Sequence[int]) -> list[int] | None:
        """Sleep until the store wakes this owner, or a descriptor is readable; None for trouble."""
        try:
            return list(broker.wait(self._owner, timeout, fds))
        except (BrokerUnavailable, StoreFull, OSError) as error:
            self.trouble(error)
            return None

    def forget(self) -> None:
        """Drop all leases, since the store gave this worker up."""
        self._leases.forget()

    def trouble(self, error: Exception) -> None:
        """Log once that the broker is away, or full.

        Raises:
            StoreGone: the store will not come back, so this worker ends.
        """
        if isinstance(error, StoreGone):
            raise error
        if isinstance(error, StoreFull):
            self._refusals.say_full(error)
        elif not self._troubled:
            self._troubled = True
            log.error("%s; trying again", error)

    def _no_trouble(self) -> None:
        self._refusals.say_room()
        if self._troubled:
            self._troubled = False
            log.info("the broker is back")


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
        """Have the next step offer these verdicts again."""
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
        """Hand in the verdicts and notes of a step that was refused with ``error``."""
        done = Settled(Reply(next_due=0.0 if verdicts or notes else float("inf")))
        if not isinstance(error, StoreFull) and clock.machine() - self._refused_at >= SAID_FOR:
            self._refused_at = clock.machine()
            log.error("the store refused a step: %s; its verdicts are handed in one by one", error)
        if notes:
            self._store_notes(broker, notes, done)
        if isinstance(error, StoreFull):
            self._settle_in_parts(broker, verdicts, error, done)
        else:
            self._settle_one_by_one(broker, verdicts, done)
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
        """Log once that the store has no room."""
        if not self._full and clock.machine() - self._full_at >= SAID_FOR:
            self._full, self._full_at = True, clock.machine()
            log.error("%s; the worker keeps the outcome of ended jobs until there is room", error)

    def say_room(self) -> None:
        """Log that the store has room again, if an earlier line said that it has none."""
        if self._full:
            self._full = False
            log.info("the store has room again")

    # -- a store without room -------------------------------------------------------------------

    def _settle_in_parts(
        self, broker: Broker, verdicts: Sequence[Verdict], error: StoreFull, done: Settled
    ) -> None:
        self._drop_results(verdicts, error)
        left, size = verdicts, len(verdicts)
        while left and size:
            try:
                self._exchange(broker, left[:size], done)
            except (BrokerUnavailable, OSError):
                break
            except StoreFull:
                size //= 2
                continue
            except Exception:
                self._settle_one_by_one(broker, left[:size], done)
            left = left[size:]
        if left or not verdicts:
            done.put_off(left)
            self.say_full(error)

    def _drop_results(self, verdicts: Sequence[Verdict], error: StoreFull) -> None:
        large = [verdict for verdict in verdicts if len(verdict.result) > SMALL_RESULT]
        for verdict in large:
            verdict.result = RESULT_NOT_KEPT
        if large and clock.machine() - self._lost_at >= SAID_FOR:
            self._lost_at = clock.machine()
            log.error("%s; until then large results are not kept", error)

    # -- one by one -----------------------------------------------------------------------------

    def _settle_one_by_one(
        self, broker: Broker, verdicts: Sequence[Verdict], done: Settled
    ) -> None:
        for verdict in verdicts:
            try:
                self._exchange(broker, [verdict], done)
            except (BrokerUnavailable, StoreFull, OSError):
                done.put_off([verdict])
            except Exception as error:
                self._fail(broker, verdict, error, done)

    def _fail(self, broker: Broker, verdict: Verdict, error: Exception, done: Settled) -> None:
        reason = storable(f"the outcome of the job could not be stored: {error}")[:2000]
        log.error("a verdict cannot be stored; its job fails", exc_info=error)
        failure = Verdict(verdict.token, Outcome.FAIL, error=reason)
        try:
            self._exchange(broker, [failure], done)
        except (TidemillError, OSError):
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


KEPT_FOR = 60.0
"""Seconds for which verdicts that the store has taken are remembered."""

KEPT_MOST = 10_000
"""Verdicts remembered at most."""

KEPT_BYTES = 32 * 1024 * 1024
"""Bytes of results remembered at most."""


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
        return list(self._open) if self._behind else None

    def answered(self, step: Step, reply: Reply) -> list[Verdict]:
        """Evaluate the reply to a step; return verdicts on the strays that the reply names."""
        self.settled(step.verdicts)
        self._behind = reply.behind or (self._behind and step.held is None)
        return self._settle_again(reply.strays) if reply.strays else []

    def lend(self, leases: Iterable[Lease]) -> None:
        """Add these leases."""
        self._open.update([lease.token for lease in leases])

    def settled(self, verdicts: Sequence[Verdict]) -> None:
        """Remember that the store has taken these verdicts."""
        if not verdicts:
            return
        self._open.difference_update([one.token for one in verdicts if not one.hold])
        now = clock.machine()
        size = sum([len(one.result) for one in verdicts])
        self._taken.append((now, size, verdicts))
        self._count += len(verdicts)
        self._bytes += size
        while self._taken and (
            self._count > KEPT_MOST
            or self._bytes > KEPT_BYTES
            or self._taken[0][0] < now - KEPT_FOR
        ):
            _, size, old = self._taken.popleft()
            self._count -= len(old)
            self._bytes -= size

    def forget(self) -> None:
        """Drop all leases: the store has given them to other workers."""
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
