"""The part of the contract for callers that wait for jobs to end, or for room in a queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidemill.core.job import Record


class JobWaits(Protocol):
    """Waits of callers that lease no jobs. Each wait first moves the jobs whose time has come."""

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        """Sleep until all jobs have finished or the time is over; return their records.

        With ``first`` sleep until one job has finished. None stands for a job that the store does
        not have. A missing job counts as finished.
        """
        ...

    def wait_space(self, queue: str, timeout: float) -> bool:
        """Sleep until the queue is below its ``max_size``; False when the time is over."""
        ...
