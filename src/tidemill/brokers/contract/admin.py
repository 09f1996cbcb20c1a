"""The part of the contract that changes jobs, queues and owners on request.

Repeating a call has no further effect unless another caller acts in between. The answer to the
second call reports only changes of the second call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tidemill.core.job import Command

__all__ = ["Admin"]


class Admin(Protocol):
    """Requests of operators and of callers that hold a job's id."""

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        """Cancel an unfinished job at once, a running job through its owner. False: too late."""
        ...

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        """Make failed, cancelled, expired and scheduled jobs ready.

        A finished job starts a new run, whose attempts and backoff begin from 1. A scheduled job
        goes on with its run.

        With ``force`` a succeeded job runs again, too, unless it belongs to a flow. With ``force``
        a job whose key a succeeded job holds (``Unique.period``) takes the key, until the same
        time.

        A barrier (``RunOn.BARRIER``) never runs: kick the failed jobs before it.
        """
        ...

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        """Forget jobs in any state; a running job loses its lease."""
        ...

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        """Change a queue's settings; None leaves a setting as it is."""
        ...

    def purge(self, queue: str) -> int:
        """Delete all jobs of a queue that are neither running nor finished; return how many."""
        ...

    def forget_queue(self, queue: str) -> bool:
        """Forget the counters and settings of a queue; False when it has unfinished jobs.

        The queue's limit and its finished jobs stay.
        """
        ...

    def command(self, owner_id: str, command: Command) -> bool:
        """Send a command to an owner; False when the owner is not attached."""
        ...

    def backup(self, target: str) -> None:
        """Copy the whole store to a new place while it is in use."""
        ...
