"""The steps that a supervisor makes with the store, and the handling of failed steps.

A step hands in verdicts and notes and asks for leases. If a step fails, the next step hands in the
same verdicts again, so no verdict is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from tidemill.brokers.contract.exchange import Reply, Step, Want
from tidemill.brokers.contract.store import Store
from tidemill.core.clock import clock
from tidemill.core.errors import BrokerUnavailable, StoreFull, StoreGone
from tidemill.worker.held_leases import HeldLeases
from tidemill.worker.notes import latest_notes
from tidemill.worker.parts import Part
from tidemill.worker.process_pool import ProcessPool
from tidemill.worker.refused_verdicts import RefusedVerdicts

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
