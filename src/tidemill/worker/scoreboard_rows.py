"""Shares: which rows of the scoreboard belong to which process.

The rows of a dead process stay until its verdicts are stored. A share comes back with the step that
stores them. While no share is free the scoreboard grows: a process that finishes its last jobs must
not keep another from starting.
"""

from __future__ import annotations

from collections.abc import Container

from tidemill.core.scoreboard import Scoreboard
from tidemill.worker.prefetch import MOST

__all__ = ["ScoreboardShares"]


class ScoreboardShares:
    """The shares of one scoreboard, as numbers of their first rows."""

    def __init__(self, processes: int, concurrency: int) -> None:
        # A header, the rows of running jobs, and rows for as many as end before a step stores them.
        self.size = 1 + 2 * concurrency + MOST
        self._count = 2 * processes + 2
        self._free = [n * self.size for n in range(self._count)]
        self._unsettled: list[int] = []
        self.board: Scoreboard | None = None

    @property
    def slots(self) -> int:
        """How many rows there are in all."""
        return self._count * self.size

    def open(self, path: str, owner_id: str) -> Scoreboard:
        """Make the scoreboard."""
        self.board = Scoreboard(path, self.slots)
        self.board.claim(owner_id)
        return self.board

    def take(self) -> int:
        """The share of a process that starts.

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
        """The process never started."""
        self._free.append(first)

    def retire(self, first: int) -> None:
        """The process is dead; its verdicts are in the next step."""
        self._unsettled.append(first)

    def unsettled(self) -> list[int]:
        """Shares of dead processes whose last verdicts are in the next step."""
        return list(self._unsettled)

    def strike(self, tokens: Container[int]) -> None:
        """Take jobs of dead processes off the scoreboard."""
        if self.board is not None:
            for first in self._unsettled:
                for row in self.board.running(first + 1, self.size - 1, tokens):
                    self.board.end(row.slot)

    def settled(self, firsts: list[int]) -> None:
        """Their verdicts are stored."""
        for first in firsts:
            self._unsettled.remove(first)
            if self.board is not None:
                self.board.clear(first, self.size)
            self._free.append(first)
