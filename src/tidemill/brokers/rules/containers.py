"""The interface of a queue's row. The containers of jobs are mutable mappings.

The functions of this package, such as ``put`` and ``settle``, are the rules of two brokers.
``memory://`` has dicts and rows in memory. ``django://`` has containers that read a row of a table
when a rule asks for it, and write the changed rows at the end of a transaction.
"""

from __future__ import annotations

from typing import Protocol


class Queue(Protocol):
    """The settings and totals of a queue, and the numbers of its unfinished jobs."""

    paused: bool
    max_size: int
    accepted: int
    retried: int
    cancelled: int
    purged: int

    @property
    def name(self) -> str: ...

    @property
    def ready(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def size(self) -> int:
        """Unfinished jobs."""
        ...
