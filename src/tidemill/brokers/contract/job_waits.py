"""The part of the contract for callers that own nothing and wait for jobs or for room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidemill.core.job import Record

__all__ = ["JobWaits"]


class JobWaits(Protocol):
    """Waits that lease nothing."""

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        """Sleep until all jobs have finished or the time is over; return their records.

        With ``first`` sleep until one job has finished. None stands for an id that the store does
        not have; such a job counts as finished.
        """
        ...

    def wait_space(self, queue: str, timeout: float) -> bool:
        """Sleep until the queue is below its ``max_size``; False when the time is over."""
        ...
