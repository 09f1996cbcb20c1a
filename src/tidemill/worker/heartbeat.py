"""The heartbeat of a worker process, as its supervisor sees it.

While jobs run, the process writes the machine time into its share of the scoreboard every 50
milliseconds. A task that keeps the interpreter lock stops the heartbeat. A task that blocks the
event loop stops the heartbeat if all running jobs use this loop. Without a heartbeat no job of the
process can finish.
"""

from __future__ import annotations

SILENT = 5.0
"""Seconds without a heartbeat after which a process with a stuck job counts as blocked."""


class Heartbeat:
    """The last heartbeat of one process. Times are machine time."""

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
