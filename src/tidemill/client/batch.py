"""A batch: the jobs that are enqueued while it is open are stored in one commit at its end."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import Any

from tidemill.client.job_handle import Job
from tidemill.client.runtime import Runtime
from tidemill.core.errors import TidemillError
from tidemill.core.job import Envelope
from tidemill.core.locks import Lock
from tidemill.core.signals import SignalsDeferred

__all__ = ["Batch"]


class Batch:
    """A context manager for ``with``, and for ``async with`` in event loops."""

    def __init__(self, mill: Runtime, current: contextvars.ContextVar[Batch | None]) -> None:
        self._mill = mill
        self._current = current
        self._lock = Lock()
        self._open = False
        self._envelopes: list[Envelope] = []
        self._jobs: list[Job[Any]] = []

    def add(self, envelopes: Sequence[Envelope]) -> list[Job[Any]] | None:
        """Add jobs; None when the batch has ended.

        An asyncio task that began inside the batch keeps the batch in its context after its end.
        """
        with self._lock:
            if not self._open:
                return None
            jobs: list[Job[Any]] = [Job(self._mill, envelope.id) for envelope in envelopes]
            self._envelopes += envelopes
            self._jobs += jobs
            return jobs

    def holds(self, job_id: str) -> bool:
        """True while the job is in the open batch, and not in the store."""
        return self._open and any(envelope.id == job_id for envelope in self._envelopes)

    @property
    def is_open(self) -> bool:
        """True between the batch's start and end."""
        return self._open

    def __enter__(self) -> None:
        around = self._current.get()
        if around is not None and around.is_open:
            raise TidemillError(
                "a batch inside a batch: leave the inner batch out, the outer one commits all"
            )
        if self._envelopes:
            raise TidemillError("this batch has ended; mill.batch() makes a new batch")
        try:
            with SignalsDeferred():
                self._open = True
                self._token = self._current.set(self)
        except BaseException:  # a signal handler has raised
            self._end()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end()
        if kind is None:
            self._commit()

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end()
        if kind is None:
            await self._mill.threaded(self._commit)

    def _end(self) -> None:
        try:
            self._leave()
        except BaseException:  # a signal handler has raised
            self._leave()  # an open batch would take later jobs
            raise

    def _leave(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._current.reset(self._token)

    def _commit(self) -> None:
        if not self._envelopes:
            return
        for job, put in zip(self._jobs, self._mill.broker.put(self._envelopes), strict=True):
            job.id, job.placed = put.id, put.placed  # a job with a key may be an older job
