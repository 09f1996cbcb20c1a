"""The part of the contract that changes jobs, queues and owners on request.

Repeating a call has no further effect unless another caller acts in between. The answer to the
second call reports only what the second call changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from tidemill.core.owner import Command


class KeptPurge(msgspec.Struct, array_like=True, frozen=True):
    """The result of a purge that keeps its jobs.

    Attributes:
        jobs: the number of purged jobs.
        is_whole: False when the store had no room to purge all jobs; the other jobs are still in
            the queue.
    """

    jobs: int
    is_whole: bool = True


class Admin(Protocol):
    """Requests of operators and of callers that hold a job's id."""

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        """Cancel unfinished jobs: a running job through its owner, the other jobs at once.

        With ``terminate`` the owner stops a running job at once. The answer is False for a job that
        has finished or does not exist.
        """
        ...

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        """Make failed, cancelled, expired and scheduled jobs ready.

        A finished job starts a new run, whose attempts and backoff begin from 1. A scheduled job
        goes on with its run.

        With ``force`` a succeeded job runs again, too, unless it belongs to a flow. With ``force``
        a job also takes its key from a succeeded job that keeps the key for a ``Unique.period``.
        After its own success, the job keeps the key for the rest of that period.

        A job waits again while jobs before it have not ended. A job that needs their success is
        refused if one of them ended without it: kick that job first.

        A barrier (``RunOn.BARRIER``) never runs: kick the failed jobs before it. Only a barrier
        that somebody cancelled is kicked itself. It waits again, or ends by how those jobs ended.
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

    def purge(self, queue: str) -> int:
        """Delete all jobs of a queue that are neither running nor finished; return how many."""
        ...

    def purge_kept(self, queue: str, purge_id: str) -> KeptPurge:
        """Cancel the jobs that ``purge`` would delete; ``restore`` can bring them back.

        The error of these jobs is :func:`tidemill.core.purge_mark.purged`. The jobs count as
        purged, not as cancelled, and are kept as long as failed jobs. If the caller dies during the
        call, only some jobs may be purged.
        """
        ...

    def restore(self, job_ids: Iterable[str], purge_id: str) -> list[bool]:
        """Bring purged jobs back, with their sequence, priority, due time, attempts and key.

        A restored job has its key until the job ends; a ``Unique.period`` does not go on. A job
        that waited for other jobs waits again, or starts if the other jobs have ended. To restore a
        flow, restore its jobs one by one, and begin with the job that was put last. The answer is
        False for a job that the purge does not have, or whose key another job has now. It is also
        False if the job waited for the success of another job, and the other job did not succeed.
        """
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
