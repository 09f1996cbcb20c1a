"""Starvation: all slots of a worker hold jobs that wait for other jobs.

A task that waits for the result of another job keeps its slot. Suppose that the jobs in all slots
of a worker wait, and no other worker can run the awaited jobs. Then all these jobs would wait for
ever. So the last job that begins to wait gets an error.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from tidemill.client.context import JobContext
from tidemill.core.job import State
from tidemill.core.scoreboard import Scoreboard
from tidemill.errors import TidemillError
from tidemill.worker.child_protocol import Setup

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


class Waits:
    """The waiting jobs of this process. The scoreboard shows the waiting jobs of all processes."""

    def __init__(self, mill: Runtime, setup: Setup, board: Scoreboard) -> None:
        self._mill = mill
        self._setup = setup
        self._board = board
        self._lock = threading.Lock()
        self._waiting = 0

    def begin(self, context: JobContext, job_id: str) -> None:
        """Count a job that is about to wait for another job; an async job may wait for several.

        Raises:
            TidemillError: every slot would wait, and no other worker could run the job.
        """
        with self._lock:
            context.waiting += 1
            if context.waiting == 1:
                self._count(1)
        try:
            if self._starves(job_id):
                raise TidemillError(
                    f"job {context.id} would wait for job {job_id} for ever: all "
                    f"{self._setup.slots} slots of this worker wait for other jobs, and no other "
                    "worker is there to run them; give it more slots (-c, -p), or put the next "
                    "step in a chain"
                )
        except BaseException:
            # The store may also be unreachable.
            self.end(context)
            raise

    def end(self, context: JobContext) -> None:
        """End a wait of the job."""
        with self._lock:
            context.waiting -= 1
            if not context.waiting:
                self._count(-1)

    def _count(self, by: int) -> None:
        self._waiting += by
        self._board.set_waiting(self._setup.first_slot, os.getpid(), self._waiting)

    def _starves(self, job_id: str) -> bool:
        if self._board.waiting(self._setup.share) < self._setup.slots:
            return False
        broker = self._mill.broker
        record = broker.get(job_id)
        if record is None or record.state.finished:
            return False
        if record.state is State.RUNNING and record.worker != self._setup.worker:
            return False
        queue = record.envelope.queue
        return not any(
            owner.kind == "worker"
            and owner.board != self._setup.board
            and (not owner.queues or queue in owner.queues)
            for owner in broker.owners()
        )
