"""Tell when a burst is over: no job is ready, running, or on its way to the worker."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tidemill.brokers.contract.exchange import Reply
from tidemill.worker.process_pool import ProcessPool
from tidemill.worker.store_steps import StoreSteps
from tidemill.worker.worker_process import State

ON_ITS_WAY, ON_ITS_WAY_MOST = 0.1, 1.0
"""Seconds between two checks for jobs on their way to the worker: at first, and at most."""


class Burst:
    """One burst of a worker."""

    def __init__(
        self, pool: ProcessPool, lock: AbstractContextManager[object], steps: StoreSteps
    ) -> None:
        self._pool = pool
        self._lock = lock
        self._steps = steps
        self._again = ON_ITS_WAY

    def is_over(self, reply: Reply) -> bool:
        """True when no work is left.

        Jobs on their way send no wake-up. While such jobs exist, ``reply.next_due`` is shortened,
        so that the worker checks again soon.
        """
        if reply.leases or not reply.more:
            self._again = ON_ITS_WAY
        if reply.more:
            reply.next_due = min(reply.next_due, self._again)
            self._again = min(ON_ITS_WAY_MOST, 2 * self._again)
        with self._lock:
            return self._dry(reply)

    def _dry(self, reply: Reply) -> bool:
        """True when no lease came, and no process has anything to do."""
        pool = self._pool
        started = bool(pool.processes) and all(process.depth for process in pool.processes)
        busy = any(p.held or p.stuck or p.state >= State.KILLED for p in pool.processes)
        busy = busy or bool(pool.verdicts or pool.dispatch.spare)
        at_once = not reply.next_due  # with ``next_due`` 0 the store has more work now
        more = reply.leases or reply.schedules or reply.more or at_once
        return started and self._steps.asked > 0 and not (busy or more)
