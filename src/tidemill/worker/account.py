"""Verdicts for the jobs of a process that is dead, or stuck in its last system call."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tidemill.board import Running
from tidemill.clock import machine_time, wall_time
from tidemill.job import NOT_STARTED, Lease, Note, Outcome, Verdict
from tidemill.worker.grace import name_of
from tidemill.worker.hand import Hand

__all__ = ["Account", "unstarted"]

log = logging.getLogger("tidemill.worker")


class Account:
    """Verdicts and notes on what a process held, by its rows on the board.

    A job that ran used an attempt, unless we killed the process; then it goes back uncounted. A job
    that had not started goes back. The retry of a stuck job becomes runnable once the process is
    dead.
    """

    def __init__(self, hand: Hand, *, closing: bool) -> None:
        self.verdicts: list[Verdict] = []
        self.notes: list[Note] = []
        self.culprit = False  # a job ran when the process ended by itself
        self.interrupted = False  # a job ran when we killed the process
        self._hand = hand
        self._cause = hand.cause()
        self._why = "its worker was stopped" if closing else hand.stuck.reason or self._cause

    def close(self) -> None:
        """The process is dead: settle all that it held."""
        hand = self._hand
        running = {row.token: row.started for row in hand.running()}
        for token, lease in hand.held.items():
            if token not in running:
                self.verdicts.append(unstarted(token))
            elif hand.killed:
                self._interrupt(lease, running[token])
            else:
                self._count(token, running[token])
        for token, due in hand.stuck.due.items():
            delay = max(0.0, due - machine_time())
            self.verdicts.append(Verdict(token, Outcome.RELEASE, delay=delay))
        hand.held.clear()

    def interrupt(self, rows: Iterable[Running]) -> None:
        """These jobs were interrupted, and the process is not dead yet."""
        for row in rows:
            lease = self._hand.held.pop(row.token, None)
            if lease is not None:  # it has not said how it ended
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
    """Give back what never ran; somebody may have cancelled it meanwhile."""
    return Verdict(token, Outcome.RELEASE, error=NOT_STARTED)
