"""The memory that all requests and answers of one server may use together.

A bound for each request would be multiplied by the number of connections. So large bodies and
large answers share one budget; an answer counts until its client has taken it. Small bodies and
answers do not count: the number of connections bounds them.
"""

from __future__ import annotations

from tidemill.server.http.problems import Problem

SMALL = 64 * 1024
"""Bytes up to which a body or an answer does not count."""


class MemoryBudget:
    """The bytes in use, at most ``most``. Used in the event loop only."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    def has_room(self, size: int) -> bool:
        """Whether ``size`` more bytes may be used."""
        return self.held + size <= self.most


class MemoryShare:
    """The bytes that one request uses of a budget, until :meth:`free`."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._size = 0

    def take(self, size: int) -> None:
        """Use ``size`` more bytes.

        Raises:
            Problem: the budget has no room for these bytes.
        """
        self.check(size)
        self.add(size)

    def check(self, size: int) -> None:
        """Check that the budget has room for ``size`` more bytes.

        Raises:
            Problem: the budget has no room for these bytes.
        """
        if not self._budget.has_room(size):
            raise Problem(
                "busy",
                f"requests and answers use {self._budget.held:,} of the {self._budget.most:,} "
                "bytes of memory that the server may use; try again later, or start the server "
                "with a larger --max-memory",
                headers={"retry-after": "1"},
            )

    def add(self, size: int) -> None:
        """Use ``size`` more bytes without a check: a finished call must be answered."""
        self._size += size
        self._budget.held += size

    def at_least(self, size: int) -> None:
        """Use at least ``size`` bytes in total, without a check."""
        self.add(max(0, size - self._size))

    def free(self) -> None:
        """Give back all bytes."""
        self._budget.held -= self._size
        self._size = 0
