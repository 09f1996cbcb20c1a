"""The time for which the neighbours of a stuck job may run on.

A process with a stuck job takes no new jobs, and a replacement starts at once. The neighbours are
the other running jobs of the process. The neighbours may run on within their own timeouts, for
``--stuck-grace`` seconds at most. If a neighbour has no attempt left, all neighbours may run on for
an hour. A process without a heartbeat is killed at once, since none of its jobs can finish.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.client.log_attributes import job_name
from tidemill.core.job import Lease, Outcome, Verdict

LAST_ATTEMPT = 3600.0
"""Seconds that neighbours may run on when one of them has no attempt left."""


SILENT = 5.0
"""Seconds without a heartbeat after which a process with a stuck job counts as blocked."""


class Heartbeat:
    """The last heartbeat of one process, as its supervisor sees it. Times are machine time.

    While jobs run, the process writes the machine time into its share of the scoreboard every 50
    milliseconds. A task that keeps the interpreter lock stops the heartbeat. A task that blocks the
    event loop stops the heartbeat if all running jobs use this loop. Without a heartbeat no job of
    the process can finish.
    """

    def __init__(self) -> None:
        self._beat = -1.0
        self._seen = 0.0

    def note(self, beat: float, now: float) -> None:
        """Note the time that the scoreboard shows. Only a new time counts as a heartbeat."""
        if beat != self._beat or not self._seen:
            self._beat, self._seen = beat, now

    def is_silent(self, now: float) -> bool:
        """True when the process has shown no heartbeat for ``SILENT`` seconds."""
        return now - self._seen >= SILENT


class StuckJobs:
    """The stuck jobs of one process. Times are machine time."""

    def __init__(self) -> None:
        self.due: dict[int, float] = {}  # token → time of the retry
        self.since = 0.0  # the time of the first stuck job
        self._reasons: list[str] = []
        self.heartbeat = Heartbeat()

    def __bool__(self) -> bool:
        return bool(self.due)

    def add(self, lease: Lease, verdict: Verdict, now: float) -> None:
        """Add a job that cannot be interrupted."""
        self.since = self.since or now
        self.due[verdict.token] = now + verdict.delay
        what = "was terminated" if verdict.outcome == Outcome.CANCELLED else "ran past its timeout"
        self._reasons.append(f"{job_name(lease.open())} {what} and cannot be interrupted")

    @property
    def reason(self) -> str:
        """A text that names the stuck jobs, as the reason for interrupting the neighbours."""
        more = f" (and {len(self._reasons) - 1} more)" if len(self._reasons) > 1 else ""
        return self._reasons[0] + more if self._reasons else ""

    def is_over(self, neighbours: Iterable[Lease], grace: float, now: float) -> bool:
        """True when the process must be killed, even if neighbours still run."""
        running = list(neighbours)
        if not running or self.heartbeat.is_silent(now):
            return True
        waited = now - self.since
        if waited < grace:
            return False
        return waited >= LAST_ATTEMPT or not any(_is_last(lease) for lease in running)

    def next_look(self, grace: float, now: float) -> float:
        """The time of the next look, also for heartbeats."""
        over = self.since + grace
        return min(now + 0.5, over) if over > now else now + 0.5


def _is_last(lease: Lease) -> bool:
    most = lease.open().retries.max_attempts
    return bool(most) and lease.attempt >= most
