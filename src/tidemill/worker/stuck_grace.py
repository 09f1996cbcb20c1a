"""How long the neighbours of a stuck job may run on.

A process with a stuck job takes nothing new, and a replacement starts at once. Its neighbours
finish within their own timeouts, for ``--stuck-grace`` seconds at most; a neighbour that has no
attempt left, for an hour. When the process has shown no heartbeat for ``SILENT`` seconds, a task
keeps the interpreter lock, or the event loop that all neighbours are on: no neighbour can finish,
and the process is killed.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.core.job import Lease, Outcome, Verdict

__all__ = ["LAST_ATTEMPT", "SILENT", "StuckJobs", "name_of"]

LAST_ATTEMPT = 3600.0
"""Seconds that a neighbour without another attempt may run on."""

SILENT = 5.0
"""Seconds without a heartbeat after which no job of a process with a stuck job can finish."""


class StuckJobs:
    """The stuck jobs of one process. Times are machine time."""

    def __init__(self) -> None:
        self.due: dict[int, float] = {}  # token → when the job is to run again
        self.threads: set[int] = set()  # that run them, by the kernel's numbers
        self.since = 0.0
        self._reasons: list[str] = []
        self._beat = -1.0
        self._beat_seen = 0.0

    def __bool__(self) -> bool:
        return bool(self.due)

    def add(self, lease: Lease, verdict: Verdict, now: float) -> None:
        """Add a job that cannot be interrupted."""
        self.since = self.since or now
        self.due[verdict.token] = now + verdict.delay
        what = "was terminated" if verdict.outcome == Outcome.CANCELLED else "ran past its timeout"
        self._reasons.append(f"{name_of(lease)} {what} and cannot be interrupted")

    @property
    def reason(self) -> str:
        """The stuck jobs for which the neighbours are interrupted, in words."""
        more = f" (and {len(self._reasons) - 1} more)" if len(self._reasons) > 1 else ""
        return self._reasons[0] + more if self._reasons else ""

    def heard(self, beat: float, now: float) -> None:
        """Note the heartbeat of the process; only a change counts, as clocks may be held up."""
        if beat != self._beat or not self._beat_seen:
            self._beat, self._beat_seen = beat, now

    def is_over(self, neighbours: Iterable[Lease], grace: float, now: float) -> bool:
        """True when the process is to be killed, whether neighbours still run or not."""
        running = list(neighbours)
        if not running or now - self._beat_seen >= SILENT:
            return True
        waited = now - self.since
        if waited < grace:
            return False
        return waited >= LAST_ATTEMPT or not any(_is_last(lease) for lease in running)

    def next_look(self, grace: float, now: float) -> float:
        """When to look again, also for heartbeats."""
        over = self.since + grace
        return min(now + 0.5, over) if over > now else now + 0.5


def name_of(lease: Lease) -> str:
    """A job as the log names it."""
    envelope = lease.open()
    return f"job {envelope.id} ({envelope.task})"


def _is_last(lease: Lease) -> bool:
    most = lease.open().retries.max_attempts
    return bool(most) and lease.attempt >= most
