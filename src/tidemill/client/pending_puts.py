"""Jobs and publications that are stored later, in one commit; their handles exist at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.client.job_handle import UNCOMMITTED, Job
from tidemill.client.topics import Publication
from tidemill.core.envelope import Envelope

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


class PendingPuts:
    """The jobs and publications that one commit stores, in order."""

    def __init__(self, mill: Runtime) -> None:
        self._mill = mill
        self._parts: list[Envelope | Publication] = []
        self._jobs: list[Job[Any]] = []

    def __bool__(self) -> bool:
        """True when there is something to store."""
        return bool(self._parts)

    def add(self, envelopes: Sequence[Envelope]) -> list[Job[Any]]:
        """Add jobs, and return their handles."""
        jobs: list[Job[Any]] = [
            Job(self._mill, envelope.id, pending=UNCOMMITTED) for envelope in envelopes
        ]
        self._parts += envelopes
        self._jobs += jobs
        return jobs

    def publish(self, made: Publication) -> None:
        """Add a publication. Its queues are found when the publication is stored."""
        self._parts.append(made)

    def holds(self, job_id: str) -> bool:
        """True when the job is among these puts."""
        return any(job.id == job_id for job in self._jobs)

    def names(self) -> list[str]:
        """The task and the id of each job, and the topic of each publication, in order."""
        return [
            f"publication {part.topic}"
            if isinstance(part, Publication)
            else f"{part.task or 'message'} {part.id}"
            for part in self._parts
        ]

    def store(self, txn: Any = None) -> None:
        """Store all in one commit, or in the caller's transaction, and complete the handles.

        Raises:
            DuplicateJob, QueueFull, StoreFull, Unroutable: nothing was stored.
        """
        if not self._parts:
            return
        jobs = [part for part in self._parts if isinstance(part, Envelope)]
        if len(jobs) == len(self._parts):
            handles, puts = self._jobs, self._mill.broker.put(jobs, txn=txn)
        else:
            puts = self._mill.topics.put(self._parts, txn)
            handles = list(self._all_handles())
        pending = UNCOMMITTED if txn is not None else ""
        for job, put in zip(handles, puts, strict=True):
            job.confirm(put.id, put.placed, pending=pending)  # a key may keep an older job

    def _all_handles(self) -> Iterator[Job[Any]]:
        """The handles of all jobs and copies, in the order of the puts."""
        jobs = iter(self._jobs)
        for part in self._parts:
            if isinstance(part, Publication):
                yield from part.jobs
            else:
                yield next(jobs)
