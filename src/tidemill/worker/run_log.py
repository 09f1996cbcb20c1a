"""One log line for each run that ended, or one line a second when too many runs end.

Failed and cancelled runs are logged elsewhere (:mod:`tidemill.worker.verdicts`).
"""

from __future__ import annotations

import collections
import logging
from typing import TYPE_CHECKING

from tidemill.client.log_attributes import logged_as
from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, Verdict
from tidemill.worker.safe_logging import SafeLog

if TYPE_CHECKING:
    from tidemill.worker.execute import Run

log = SafeLog("tidemill.worker")

LINES_MOST = 200
"""Lines a second that all processes of a worker write together."""

END = "%s[%s] %s %s %.3f s (queue %s, attempt %d%s)"
"""The end of a run in a line of the log; :func:`end_values` has the values."""

SLOW = "%s[%s] was slow: it ran %.3f s and had waited %.3f s (queue %s, attempt %d, slow from %g s)"
"""The line of a slow run."""

_WORDS = {
    Outcome.SUCCESS: "succeeded",
    Outcome.RETRY: "failed",
    Outcome.FAIL: "failed",
    Outcome.RELEASE: "interrupted",
    Outcome.SNOOZE: "snoozed",
    Outcome.CANCELLED: "cancelled",
}
_LOGGED = (Outcome.RETRY, Outcome.FAIL, Outcome.CANCELLED)


def end_values(
    envelope: Envelope, attempt: int, how: str, seconds: float, most: int = 0
) -> tuple[object, ...]:
    """The values for :data:`END`; ``most`` is the largest number of attempts."""
    preposition = "in" if how in ("succeeded", "failed") else "after"
    of = f" of {most}" if most else ""
    return envelope.task, envelope.id, how, preposition, seconds, envelope.queue, attempt, of


def _wait_of(run: Run) -> float:
    """Seconds from the due time to the start. For later attempts: seconds from lease to start."""
    envelope = run.envelope
    since = max(envelope.created + envelope.delay, envelope.at)
    return max(0.0, run.started - (since if run.lease.attempt == 1 else run.lease.leased))


class RunLog:
    """Logs ended runs at INFO. The threads of jobs call :meth:`ended`, the timekeeper the rest.

    Each process may write an equal part of the ``LINES_MOST`` lines. After these lines, the process
    only counts the runs of the rest of the second. If it counts more runs than it has lines, the
    next second has no lines of single runs. No lock guards the numbers, so a race of threads may
    write a few lines more.
    """

    def __init__(self, processes: int, slow: float = 0.0) -> None:
        self.slow = slow  # a run of at least this many seconds is slow; 0: no run is slow
        self.wanted = log.talks(logging.INFO)  # read once here, since every job asks for it
        self._most = max(1, LINES_MOST // processes)
        self._left = self._most  # the number of lines left for this second
        self._until = 0.0  # machine time at which this second ends
        self._more = "more "  # for the summary: empty when the second has no other lines
        # Outcomes of runs that were only counted.
        self._counted: collections.deque[int] = collections.deque()

    def ended(self, run: Run, verdict: Verdict) -> None:
        """Log a run, or count it for the summary; log a slow run in any case."""
        if self.slow and (verdict.ended or clock.wall()) - run.started >= self.slow:
            self._write_slow(run, verdict)
        if self._left <= 0:
            self._counted.append(verdict.outcome)
        elif verdict.outcome not in _LOGGED:
            self._write(run, verdict)

    def _write_slow(self, run: Run, verdict: Verdict) -> None:
        envelope = run.envelope
        with logged_as(run.context):
            log.warning(
                SLOW,
                *(envelope.task, envelope.id, (verdict.ended or clock.wall()) - run.started),
                *(_wait_of(run), envelope.queue, run.lease.attempt, self.slow),
            )

    def _write(self, run: Run, verdict: Verdict) -> None:
        now = clock.machine()
        if now >= self._until:
            self._left, self._until = self._most, now + 1.0
        self._left -= 1
        seconds, attempt = (verdict.ended or clock.wall()) - run.started, run.lease.attempt
        how = _WORDS[Outcome(verdict.outcome)]
        with logged_as(run.context):
            log.info(END, *end_values(run.envelope, attempt, how, seconds))

    # -- in the timekeeper ----------------------------------------------------------------------

    def next_look(self, now: float) -> float | None:
        """Seconds until :meth:`look` has to be called; None while each run gets its own line."""
        return None if self._left > 0 else max(0.001, self._until - now)

    def look(self, now: float) -> None:
        """Log the summary of a second that is over."""
        if self._left > 0 or now < self._until:
            return
        count = self._summarise()
        self._left, self._more = (0, "") if count > self._most else (self._most, "more ")
        self._until = now + 1.0

    def close(self) -> None:
        """Log the runs that are only counted, before the process ends."""
        self._summarise()

    def _summarise(self) -> int:
        outcomes = [self._counted.popleft() for _ in range(len(self._counted))]
        if outcomes:
            counts = collections.Counter(_WORDS[Outcome(outcome)] for outcome in outcomes)
            log.info(
                "%s %s%s ended in the last second: %s",
                *(f"{len(outcomes):,}", self._more, "jobs" if outcomes[1:] else "job"),
                ", ".join(f"{count:,} {word}" for word, count in counts.most_common()),
            )
        return len(outcomes)
