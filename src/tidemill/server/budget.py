"""The memory that the requests and answers of one server may hold together.

A bound for each request would be multiplied by the number of connections. So large bodies, and
large answers that their clients have not taken yet, share one budget. Small ones do not count:
the number of connections bounds them.
"""

from __future__ import annotations

from tidemill.server.problems import Problem

__all__ = ["SMALL", "Budget", "Share"]

SMALL = 64 * 1024
"""Bytes up to which a body or an answer does not count."""


class Budget:
    """Bytes that are held now, ``most`` at a time. Used in the event loop only."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    def has_room(self, size: int) -> bool:
        """Whether so many bytes more may be held."""
        return self.held + size <= self.most


class Share:
    """What one request holds of a budget; to be given back with :meth:`free`."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._size = 0

    def take(self, size: int) -> None:
        """Hold so many bytes more.

        Raises:
            Problem: the server holds too much already.
        """
        self.check(size)
        self.add(size)

    def check(self, size: int) -> None:
        """Refuse what has no room.

        Raises:
            Problem: the server holds too much already.
        """
        if not self._budget.has_room(size):
            raise Problem(
                "busy",
                f"requests and answers hold {self._budget.held:,} of the {self._budget.most:,} "
                "bytes that the server may use for them; try again, or give it more --max-memory",
                headers={"retry-after": "1"},
            )

    def add(self, size: int) -> None:
        """Hold so many more, whatever is held: what was done has to be answered."""
        self._size += size
        self._budget.held += size

    def at_least(self, size: int) -> None:
        """Hold as many in all, whatever is held."""
        self.add(max(0, size - self._size))

    def free(self) -> None:
        """Hold nothing any more."""
        self._budget.held -= self._size
        self._size = 0
