"""Which rows of the board belong to which process.

The rows of a dead process stay until its verdicts are stored: a job that ended before its verdict
was stored is on the board until then. So a share comes back with the step that stores them. While
none is free the board grows: processes that finish their last jobs must not keep others away.
"""

from __future__ import annotations

from collections.abc import Container

from tidemill.board import Board
from tidemill.worker.prefetch import MOST

__all__ = ["Shares"]


class Shares:
    """The shares of one board, as numbers of their first rows."""

    def __init__(self, processes: int, concurrency: int) -> None:
        # A header, the rows of running jobs, and rows for as many as end before a step stores them.
        self.size = 1 + 2 * concurrency + MOST
        self._count = 2 * processes + 2
        self._free = [n * self.size for n in range(self._count)]
        self._unsettled: list[int] = []
        self.board: Board | None = None

    @property
    def slots(self) -> int:
        """How many rows there are in all."""
        return self._count * self.size

    def open(self, path: str, owner_id: str) -> Board:
        """Make the board."""
        self.board = Board(path, self.slots)
        self.board.claim(owner_id)
        return self.board

    def take(self) -> int:
        """The share of a process that starts.

        Raises:
            OSError: the board cannot grow.
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
        """Shares whose last verdicts are in the step that is made now."""
        return list(self._unsettled)

    def strike(self, tokens: Container[int]) -> None:
        """Take jobs of dead processes off the board."""
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
