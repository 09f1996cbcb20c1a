"""Verdicts for the jobs of a process that is dead, or stuck in its last system call."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tidemill.core.clock import machine_time, wall_time
from tidemill.core.job import NOT_STARTED, Lease, Note, Outcome, Verdict
from tidemill.core.scoreboard import Running
from tidemill.worker.stuck_grace import name_of
from tidemill.worker.worker_process import WorkerProcess

__all__ = ["LostJobs", "unstarted"]

log = logging.getLogger("tidemill.worker")


class LostJobs:
    """Verdicts and notes on the jobs of one process, by its rows on the scoreboard.

    A job that ran used an attempt, unless the supervisor killed the process: then the job goes
    back uncounted. A job that had not started goes back. The retry of a stuck job becomes runnable
    once the process is dead.
    """

    def __init__(self, process: WorkerProcess, *, closing: bool) -> None:
        self.verdicts: list[Verdict] = []
        self.notes: list[Note] = []
        self.culprit = False  # a job ran when the process ended by itself
        self.interrupted = False  # a job ran when the supervisor killed it
        self._hand = process
        self._cause = process.cause()
        self._why = "its worker was stopped" if closing else process.stuck.reason or self._cause

    def close(self) -> None:
        """Settle all jobs of a dead process."""
        process = self._hand
        running = {row.token: row.started for row in process.running()}
        for token, lease in process.held.items():
            if token not in running:
                self.verdicts.append(unstarted(token))
            elif process.killed:
                self._interrupt(lease, running[token])
            else:
                self._count(token, running[token])
        for token, due in process.stuck.due.items():
            delay = max(0.0, due - machine_time())
            self.verdicts.append(Verdict(token, Outcome.RELEASE, delay=delay))
        process.held.clear()

    def interrupt(self, rows: Iterable[Running]) -> None:
        """Settle interrupted jobs of a process that is not dead yet."""
        for row in rows:
            lease = self._hand.held.pop(row.token, None)
            if lease is not None:  # its verdict has not come
                self._interrupt(lease, row.started)

    def _count(self, token: int, started: float) -> None:
        self.culprit = True
        log.warning("%s while running a job", self._cause)
        ended = wall_time()
        verdict = Verdict(token, Outcome.RETRY, error=self._cause, started=started, ended=ended)
        self.verdicts.append(verdict)

    def _interrupt(self, lease: Lease, started: float) -> None:
        self.interrupted = True
        now = wall_time()
        log.warning("%s was interrupted and goes back: %s", name_of(lease), self._why)
        line = f"interrupted after {now - started:.3f} s: {self._why}"
        self.notes.append(Note(lease.token, line=line, time=now))
        self.verdicts.append(Verdict(lease.token, Outcome.RELEASE, started=started))


def unstarted(token: int) -> Verdict:
    """Give back a job that never ran; somebody may have cancelled it meanwhile."""
    return Verdict(token, Outcome.RELEASE, error=NOT_STARTED)
