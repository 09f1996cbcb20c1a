"""The steps that a supervisor makes with the store, and the handling of failed steps.

A step hands in verdicts and notes and asks for leases. If a step fails, the next step hands in the
same verdicts again, so no verdict is lost.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

from tidemill.brokers.contract.exchange import Reply, Step, Want
from tidemill.brokers.contract.store import Store
from tidemill.core.clock import clock
from tidemill.core.errors import BrokerUnavailable, StoreFull, StoreGone
from tidemill.core.job import Note, Verdict
from tidemill.worker.held_leases import HeldLeases
from tidemill.worker.history import Numbers
from tidemill.worker.notes import latest_notes
from tidemill.worker.process_pool import ProcessPool
from tidemill.worker.refused_verdicts import RefusedVerdicts
from tidemill.worker.settings import Settings

log = logging.getLogger("tidemill.worker")

SHORT_FOR = 60.0
"""Seconds in which a worker leases no job in advance, after a full store has refused a step."""


class StoreSteps:
    """The steps of one owner. ``lock`` guards the pool, and is free during a call of the store."""

    def __init__(
        self,
        owner: str,
        settings: Settings,
        pool: ProcessPool,
        lock: AbstractContextManager[object],
    ) -> None:
        self.asked = 0  # the number of leases that the latest step asked for; 0 if the step failed
        self._owner = owner
        self._settings = settings
        self._pool = pool
        self._lock = lock
        self._leases = HeldLeases()
        self._refusals = RefusedVerdicts(
            owner, self._settled, self._keep, self._replaced, self._lost
        )
        self._numbers = Numbers()  # the numbers for history in the latest step
        self._troubled = False  # True when the latest log line says that the broker is away
        self._short_until = 0.0  # until this machine time, no job is leased in advance

    def exchange(self, broker: Store, *, fires: int, takes: bool) -> Reply:
        """Hand in verdicts and notes; ask for leases (``takes``) and due schedules (``fires``)."""
        pool = self._pool
        with self._lock:
            want = self._want(takes)
            pool.verdicts += pool.dispatch.place_spare()
            verdicts, pool.verdicts = pool.verdicts, []
            notes, pool.notes = latest_notes(pool.notes), []
            shares = pool.shares.unsettled()
            rows, self._numbers = pool.history.send()
        held = self._leases.held()
        step = Step(self._owner, verdicts, want, notes=notes, fires=fires, held=held, history=rows)
        try:
            reply = broker.exchange(step)
        except (BrokerUnavailable, OSError) as error:
            self.trouble(error)
            with self._lock:
                pool.verdicts, pool.notes = verdicts + pool.verdicts, notes + pool.notes
                pool.history.again(self._numbers)
            self.asked = 0
            return Reply(next_due=self._settings.waits.retry)
        except Exception as error:
            if not (verdicts or notes or rows or isinstance(error, StoreFull)):
                raise
            self.asked = 0
            if isinstance(error, StoreFull):
                self._short_until = clock.machine() + SHORT_FOR
            reply = self._refusals.settle(broker, verdicts, notes, error)
            with self._lock:
                pool.history.refused(self._numbers)
            reply.next_due = min(reply.next_due, self._settings.waits.retry)
            return reply
        again = self._leases.answered(step, reply)
        with self._lock:
            pool.settled(verdicts, shares)
            pool.history.answered(self._numbers, verdicts, reply)
            pool.verdicts += again
        if reply.behind or again:
            reply.next_due = 0.0
        self._no_trouble()
        return reply

    def _want(self, takes: bool) -> Want:
        """The want of the next step."""
        pool = self._pool
        self.asked = pool.dispatch.room() if takes else 0
        # A lease takes up room in a full store, and the verdicts may need this room.
        if clock.machine() < self._short_until:
            self.asked = max(0, min(self.asked, pool.slots - pool.held))
        return Want(
            self.asked,
            self._settings.queues,
            self._settings.mode,
            alone=pool.dispatch.can_isolate,
        )

    def lend(self, reply: Reply) -> None:
        """Count the leases of a reply as held by this worker."""
        self._leases.lend(reply.leases)

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

    def _keep(self, verdicts: list[Verdict], notes: list[Note]) -> None:
        """Offer verdicts and notes again with the next step."""
        with self._lock:
            self._pool.verdicts += verdicts
            self._pool.notes = notes + self._pool.notes

    def _settled(self, verdicts: list[Verdict]) -> None:
        """Remember that the store has answered these verdicts."""
        self._leases.settled(verdicts)
        with self._lock:
            self._pool.settled(verdicts, [])
            self._pool.history.settled(self._numbers, verdicts)

    def _replaced(self, verdict: Verdict, stored: Verdict) -> None:
        """Count the verdict ``stored``, which the store took in place of a refused verdict."""
        with self._lock:
            self._pool.history.replaced(self._numbers, verdict, stored)

    def _lost(self, verdicts: list[Verdict]) -> None:
        """Take back the numbers of verdicts that changed nothing, since their leases are lost."""
        with self._lock:
            self._pool.history.lost(self._numbers, verdicts)
