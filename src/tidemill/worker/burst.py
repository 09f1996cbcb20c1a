"""Tell when a burst is over: no job is ready, running, or on its way from a carrier."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tidemill.brokers.contract.exchange import Reply
from tidemill.brokers.contract.store import Store
from tidemill.core.errors import BrokerUnavailable
from tidemill.worker.process_pool import ProcessPool
from tidemill.worker.store_steps import StoreSteps

ON_ITS_WAY, ON_ITS_WAY_MOST = 0.1, 1.0
"""Seconds between two checks for jobs on their way from a carrier: at first, and at most."""


class Burst:
    """One burst of a worker that serves ``queues``. Empty ``queues`` stand for all queues."""

    def __init__(
        self,
        queues: tuple[str, ...],
        pool: ProcessPool,
        lock: AbstractContextManager[object],
        steps: StoreSteps,
    ) -> None:
        self._queues = queues
        self._pool = pool
        self._lock = lock
        self._steps = steps
        self._again = ON_ITS_WAY

    def is_over(self, broker: Store, reply: Reply) -> bool:
        """True when no work is left.

        Jobs on their way send no wake-up. While such jobs exist, ``reply.next_due`` is shortened,
        so that the worker checks again soon.
        """
        with self._lock:
            dry = self._dry(reply)
        on_its_way = reply.more or (dry and self._carried(broker))
        if reply.leases or not on_its_way:
            self._again = ON_ITS_WAY
        if on_its_way:
            reply.next_due = min(reply.next_due, self._again)
            self._again = min(ON_ITS_WAY_MOST, 2 * self._again)
        return dry and not on_its_way

    def _carried(self, broker: Store) -> bool:
        """True when a carrier (a message broker) has jobs for this worker that have not arrived."""
        try:
            rows = broker.stats()
        except (BrokerUnavailable, OSError) as error:
            self._steps.trouble(error)
            return True
        return any(row.carried for row in rows if not self._queues or row.name in self._queues)

    def _dry(self, reply: Reply) -> bool:
        """True when no lease came, and no process has anything to do."""
        pool = self._pool
        started = bool(pool.processes) and all(process.depth for process in pool.processes)
        busy = any(process.held or process.stuck or process.killed for process in pool.processes)
        busy = busy or bool(pool.verdicts or pool.dispatch.spare)
        at_once = not reply.next_due  # with ``next_due`` 0 the store has more work now
        more = reply.leases or reply.schedules or reply.more or at_once
        return started and self._steps.asked > 0 and not (busy or more)
