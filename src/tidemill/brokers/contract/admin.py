"""The part of the contract that changes jobs, queues and owners on request.

Repeating a call has no further effect unless another caller acts in between. The answer to the
second call reports only what the second call changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tidemill.core.job import Command


class Admin(Protocol):
    """Requests of operators and of callers that hold a job's id."""

    def cancel(
        self, job_ids: Iterable[str], *, terminate: bool = False, purge: str = ""
    ) -> list[bool]:
        """Cancel unfinished jobs: a running job through its owner, the other jobs at once.

        With ``terminate`` the owner stops a running job at once. The answer is False for a job that
        has finished or does not exist.

        With ``purge``, the id of a purge, a running job is refused, too. The error of the cancelled
        jobs is :func:`tidemill.core.job.purged`. They count as purged, not as cancelled, and
        are kept as long as failed jobs.

        Raises:
            StoreFull: with ``purge``, the store may have no room to keep the jobs.
        """
        ...

    def retry(
        self,
        job_ids: Iterable[str],
        *,
        force: bool = False,
        due: float = 0.0,
        only_scheduled: bool = False,
    ) -> list[bool]:
        """Make failed, cancelled, expired and scheduled jobs ready, or scheduled for ``due``.

        ``due`` is a wall time. A job that waits for other jobs ignores it.

        A finished job starts a new run, whose attempts and backoff begin from 1. A scheduled job
        goes on with its run. With ``only_scheduled`` other jobs stay as they are: a job that was
        cancelled since the caller has read it does not run again. Without ``only_scheduled`` the
        log of the job gets the line :data:`tidemill.core.job.RETRY_ASKED`.

        With ``force`` a succeeded job runs again, too, unless it belongs to a flow. With ``force``
        a job also takes its key from a succeeded job that keeps the key for a ``Unique.period``.
        After its own success, the job keeps the key for the rest of that period.

        A job waits again while jobs before it have not ended. A job that needs their success is
        refused if one of them ended without it: retry that job first.

        A barrier (``RunOn.BARRIER``) never runs: retry the failed jobs before it. Only a barrier
        that somebody cancelled is retried itself. It waits again, or ends by how those jobs ended.
        """
        ...

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        """Forget jobs in any state; a running job loses its lease.

        A departed store still deletes, until it is sealed: a move by puts deletes what has moved.
        """
        ...

    def alter(
        self, job_ids: Iterable[str], *, rank: int | None = None, queue: str | None = None
    ) -> list[bool]:
        """Give waiting jobs a new rank, a new queue, or both; None keeps the old value.

        Only jobs that are ready, scheduled or in the state ``waiting`` are changed. A job keeps its
        sequence number, so its position is as if the put had named the new rank and queue. The job
        also keeps its due time, key, limit and history.

        Returns False and changes nothing for a job that runs, has finished or does not exist. The
        same holds when the other queue has no room for the job (``max_size``). ``max_size`` does
        not apply to a job in the state ``waiting``. A barrier is never altered.
        """
        ...

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        """Change a queue's settings; None keeps the old value."""
        ...

    def forget_queue(self, queue: str) -> bool:
        """Forget a queue's counters and settings; False when it has unfinished jobs.

        The queue's limit and its finished jobs stay.
        """
        ...

    def command(self, owner_id: str, command: Command) -> bool:
        """Send a command to an owner; False when the owner is not attached."""
        ...

    def backup(self, target: str) -> None:
        """Copy the whole store to a new place while it is in use."""
        ...


class NativePurge(Protocol):
    """The purge of a broker that cannot list its jobs (without ``Feature.INSPECT``)."""

    def purge(self, queue: str) -> int:
        """Delete all jobs of a queue that are neither running nor finished; return how many."""
        ...
