"""The steps that a supervisor makes with the store, and what it does when one fails.

A step hands in verdicts and notes and asks for leases. The verdicts of a step that failed are
offered again, so none is lost.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

from tidemill.brokers.contract.exchange import Reply, Step, Want
from tidemill.brokers.contract.store import Store
from tidemill.core.errors import BrokerUnavailable, StoreFull, StoreGone
from tidemill.core.job import Note, Verdict
from tidemill.worker.held_leases import HeldLeases
from tidemill.worker.process_pool import ProcessPool
from tidemill.worker.refused_verdicts import RefusedVerdicts
from tidemill.worker.settings import Settings

__all__ = ["RETRY_AFTER", "StoreSteps"]

log = logging.getLogger("tidemill.worker")

RETRY_AFTER = 1.0
"""Seconds between two tries to reach a broker that is away."""


class StoreSteps:
    """The steps of one owner. ``lock`` guards the pool, and is free during a call of the store."""

    def __init__(
        self,
        owner: str,
        settings: Settings,
        pool: ProcessPool,
        lock: AbstractContextManager[object],
    ) -> None:
        self.asked = 0  # how many leases the latest step asked for; 0 if it failed
        self._owner = owner
        self._settings = settings
        self._pool = pool
        self._lock = lock
        self._leases = HeldLeases()
        self._refusals = RefusedVerdicts(owner, self._settled, self._keep)
        self._troubled = False  # the log says that the broker is away

    def exchange(self, broker: Store, *, fires: int, takes: bool) -> Reply:
        """Hand in what has ended; with ``takes`` ask for leases, with ``fires`` for schedules."""
        pool, known = self._pool, self._pool.known
        with self._lock:
            want = self._want(takes)
            pool.verdicts += pool.dispatch.place_spare()
            verdicts, pool.verdicts = pool.verdicts, []
            pool.sent = verdicts
            notes, pool.notes = pool.notes, []
            shares = pool.shares.unsettled()
        held = self._leases.held()
        step = Step(self._owner, verdicts, want, notes=notes, fires=fires, held=held)
        try:
            reply = broker.exchange(step)
        except (BrokerUnavailable, OSError) as error:
            self.trouble(error)
            with self._lock:
                pool.verdicts, pool.notes = verdicts + pool.verdicts, notes + pool.notes
            self.asked = 0
            return Reply(next_due=RETRY_AFTER)
        except Exception as error:
            if not (verdicts or notes or isinstance(error, StoreFull)):
                raise
            self.asked = 0
            reply = self._refusals.settle(broker, verdicts, notes, error)
            reply.next_due = min(reply.next_due, RETRY_AFTER)
            return reply
        again = self._leases.answered(step, reply)
        with self._lock:
            pool.settled(verdicts, shares)
            pool.verdicts += again
        if known.hear(reply) or reply.behind or again:
            reply.next_due = 0.0
        self._no_trouble()
        return reply

    def _want(self, takes: bool) -> Want:
        """Which jobs to ask for."""
        pool, known = self._pool, self._pool.known
        self.asked = pool.dispatch.room() if takes else 0
        known.load([it.hello for it in pool.processes if it.serving and it.hello])
        return Want(
            self.asked,
            self._settings.queues,
            self._settings.mode,
            alone=pool.dispatch.can_isolate,
            knows=known.names,
            told=known.told,
        )

    def lend(self, reply: Reply) -> None:
        """Count the leases of a reply as held by this worker."""
        self._leases.lend(reply.leases)

    def forget(self) -> None:
        """The store gave this worker up: other workers have its leases."""
        self._leases.forget()

    def trouble(self, error: Exception) -> None:
        """Log once that the broker is away, or full.

        Raises:
            StoreGone: it will not come back: this worker leaves.
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
        """Offer these again with the next step."""
        with self._lock:
            self._pool.verdicts += verdicts
            self._pool.notes = notes + self._pool.notes

    def _settled(self, verdicts: list[Verdict]) -> None:
        """The store has taken these verdicts."""
        self._leases.settled(verdicts)
        with self._lock:
            self._pool.settled(verdicts, [])
