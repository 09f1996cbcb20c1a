"""How many leases a process holds in advance: enough for a tick of its latest work."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.core.job import Verdict

__all__ = ["MOST", "TICK", "Prefetch"]

TICK = 0.05
"""Seconds of work a process holds in advance, and how often it looks while it is busy."""

MOST = 4000
"""Leases that a process holds in advance at most."""


class Prefetch:
    """A number of leases besides the running ones."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.ahead = slots

    def measure(self, verdicts: Sequence[Verdict]) -> None:
        """Follow the time that these jobs took; grow in steps, since an average may deceive."""
        seconds = sum([verdict.ended - verdict.started for verdict in verdicts]) / len(verdicts)
        target = self._slots * TICK / max(seconds, 1e-6)
        grown = 4 * max(self.ahead, self._slots)
        self.ahead = int(max(0, min(MOST, target, grown)))

    def nothing_ended(self, full: bool) -> None:
        """A tick passed without an end: the jobs are long, or there are none."""
        self.ahead = 0 if full else self._slots
