"""A batch: what is enqueued while it is open becomes one commit when it ends."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidemill.deferral import Deferred
from tidemill.errors import TidemillError
from tidemill.handle import Job
from tidemill.job import Envelope
from tidemill.locks import Lock

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["Batch"]


class Batch:
    """``with mill.batch():`` or, where that would block an event loop, ``async with``."""

    def __init__(self, mill: Tidemill, current: contextvars.ContextVar[Batch | None]) -> None:
        self._mill = mill
        self._current = current
        self._lock = Lock()
        self._open = False
        self._envelopes: list[Envelope] = []
        self._jobs: list[Job[Any]] = []

    def add(self, envelopes: Sequence[Envelope]) -> list[Job[Any]] | None:
        """Take jobs in; None when the batch is over.

        An asyncio task that was started inside still has it in its context when it has ended.
        """
        with self._lock:
            if not self._open:
                return None
            jobs: list[Job[Any]] = [Job(self._mill, envelope.id) for envelope in envelopes]
            self._envelopes += envelopes
            self._jobs += jobs
            return jobs

    def holds(self, job_id: str) -> bool:
        """True while the job is only promised."""
        return self._open and any(envelope.id == job_id for envelope in self._envelopes)

    @property
    def is_open(self) -> bool:
        """True between start and end."""
        return self._open

    def __enter__(self) -> None:
        around = self._current.get()
        if around is not None and around.is_open:
            raise TidemillError(
                "a batch inside a batch: the outer one commits both, leave the inner out"
            )
        if self._envelopes:
            raise TidemillError("this batch has been used; mill.batch() makes a new one")
        try:
            with Deferred():
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
        except BaseException:  # a signal handler has raised; an open batch would take what follows
            self._leave()
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
            job.id, job.placed = put.id, put.placed  # with a key it may be an older job's
