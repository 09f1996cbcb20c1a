"""Shares: which rows of the scoreboard belong to which process.

The rows of a dead process stay until its verdicts are stored. The step that stores the verdicts
frees the share. When no share is free, the scoreboard grows, so that a new process need not wait
for a process that finishes its last jobs.
"""

from __future__ import annotations

from tidemill.core.scoreboard import Scoreboard
from tidemill.worker.slots import MOST


class ScoreboardShares:
    """The shares of one scoreboard. A share is named by the number of its first row."""

    def __init__(self, processes: int, concurrency: int) -> None:
        # A header, rows for running jobs, and rows for jobs that end before a step stores them.
        self.size = 1 + 2 * concurrency + MOST
        self._count = 2 * processes + 2
        self._free = [n * self.size for n in range(self._count)]
        self._unsettled: list[int] = []
        self.board: Scoreboard | None = None

    @property
    def slots(self) -> int:
        """The number of rows in all shares."""
        return self._count * self.size

    def open(self, path: str, owner_id: str) -> Scoreboard:
        """Make the scoreboard."""
        self.board = Scoreboard(path, self.slots)
        self.board.claim(owner_id)
        return self.board

    def take(self) -> int:
        """Take a share for a process that starts.

        Raises:
            OSError: the scoreboard cannot grow.
        """
        if not self._free:
            if self.board is not None:
                self.board.grow(self.slots + self.size)
            self._free.append(self._count * self.size)
            self._count += 1
        return self._free.pop()

    def put_back(self, first: int) -> None:
        """Return the share of a process that never started."""
        self._free.append(first)

    def retire(self, first: int) -> None:
        """Remember that the process of a share is dead and its verdicts are in the next step."""
        self._unsettled.append(first)

    def unsettled(self) -> list[int]:
        """Shares of dead processes whose last verdicts are in the next step."""
        return list(self._unsettled)

    def settled(self, firsts: list[int]) -> None:
        """Free shares of dead processes whose verdicts are stored."""
        for first in firsts:
            self._unsettled.remove(first)
            if self.board is not None:
                self.board.clear(first, self.size)
            self._free.append(first)
