"""The number of leases that a process holds in advance: enough work for one tick."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.core.job import Verdict

TICK = 0.05
"""Seconds from one tick of a busy process to the next. Prefetched jobs are work for one tick."""

MOST = 4000
"""Leases that a process holds in advance at most."""


class Prefetch:
    """The number of leases that a process would like to hold besides the running jobs."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.ahead = slots

    def measure(self, verdicts: Sequence[Verdict]) -> None:
        """Adapt to the duration of these jobs. Growth is limited, since an average may mislead."""
        timed = [it.ended - it.started for it in verdicts if it.ended >= it.started > 0]
        if not timed:  # the verdicts of snoozed and released jobs have no times
            return
        seconds = sum(timed) / len(timed)
        target = self._slots * TICK / max(seconds, 1e-6)
        grown = 4 * max(self.ahead, self._slots)
        self.ahead = int(max(0, min(MOST, target, grown)))

    def nothing_ended(self, full: bool) -> None:
        """Adapt after a tick in which no job ended: the jobs are long, or there are none."""
        self.ahead = 0 if full else self._slots
