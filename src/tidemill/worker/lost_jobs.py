"""Verdicts on the jobs of a dead process."""

from __future__ import annotations

import logging

from tidemill.client.context import JobContext
from tidemill.client.log_attributes import job_name, logged_as
from tidemill.core.clock import clock
from tidemill.core.job import NOT_STARTED, Lease, Note, Outcome, Verdict
from tidemill.worker.counting import Concluded
from tidemill.worker.notes import interrupted_run
from tidemill.worker.worker_process import WorkerProcess

log = logging.getLogger("tidemill.worker")


class LostJobs:
    """Verdicts and notes on the jobs of one process, by its rows on the scoreboard.

    A job that ran when its process ended by itself used an attempt. If the supervisor killed the
    process, a job that ran goes back and counts no attempt. A job that had not started also goes
    back. A stuck job can be retried only after the process is dead.
    """

    def __init__(self, process: WorkerProcess, *, closing: bool) -> None:
        self.verdicts: list[Verdict] = []
        self.concluded: list[Concluded] = []  # the verdicts on jobs that ran
        self.notes: list[Note] = []
        self.culprit = False  # True if a job ran when the process ended by itself
        self.interrupted = False  # True if a job ran when the supervisor killed the process
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
            elif process.spares_its_jobs:
                self._interrupt(lease, running[token])
            else:
                self._count(lease, running[token])
        for token, due in process.stuck.due.items():
            delay = max(0.0, due - clock.machine())
            self.verdicts.append(Verdict(token, Outcome.RELEASE, delay=delay))
        process.held.clear()

    def _count(self, lease: Lease, started: float) -> None:
        self.culprit = True
        envelope = lease.open()
        most = envelope.retries.max_attempts
        again = not most or lease.attempt < most
        with logged_as(JobContext(envelope, lease.attempt)):
            log.log(
                logging.WARNING if again else logging.ERROR,
                "%s while running %s (attempt %d); %s",
                *(self._cause, job_name(envelope), lease.attempt),
                "again" if again else "not again",
            )
        ended = clock.wall()
        verdict = Verdict(
            lease.token, Outcome.RETRY, error=self._cause, started=started, ended=ended
        )
        self.verdicts.append(verdict)
        self.concluded.append((verdict, lease, envelope))

    def _interrupt(self, lease: Lease, started: float) -> None:
        self.interrupted = True
        envelope = lease.open()
        with logged_as(JobContext(envelope, lease.attempt)):
            log.warning("%s was interrupted and goes back: %s", job_name(envelope), self._why)
        self.notes.append(interrupted_run(lease.token, started, self._why))
        verdict = Verdict(lease.token, Outcome.RELEASE, started=started)
        self.verdicts.append(verdict)
        self.concluded.append((verdict, lease, envelope))


def unstarted(token: int) -> Verdict:
    """Give back a job that never ran. If somebody cancelled the job, the store ends it."""
    return Verdict(token, Outcome.RELEASE, error=NOT_STARTED)
