"""A batch: jobs that are enqueued while a batch is open are stored in one commit at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tidemill.client.job_handle import Job
from tidemill.client.pending_puts import PendingPuts
from tidemill.client.topics import Publication
from tidemill.core.envelope import Envelope
from tidemill.core.errors import TidemillError
from tidemill.core.locks import Lock
from tidemill.core.signals import SignalsDeferred

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


class OpenBatch(Protocol):
    """What a put may join: a batch, or in a Django project a transaction."""

    def add(self, envelopes: Sequence[Envelope]) -> list[Job[Any]] | None:
        """Add jobs; None when the batch has ended."""

    def publish(self, made: Publication) -> bool:
        """Add a publication; False when the batch has ended."""


class Batch:
    """A context manager for ``with``, and for ``async with`` in event loops."""

    def __init__(self, mill: Runtime) -> None:
        self._mill = mill
        self._current = mill.batch_variable
        self._lock = Lock()
        self._open = False
        self._pending = PendingPuts(mill)

    def add(self, envelopes: Sequence[Envelope]) -> list[Job[Any]] | None:
        """Add jobs; None when the batch has ended.

        An asyncio task that began inside the batch keeps the batch in its context, also after the
        end.
        """
        with self._lock:
            if not self._open:
                return None
            return self._pending.add(envelopes)

    def publish(self, made: Publication) -> bool:
        """Add a publication; False when the batch has ended. The commit finds the queues."""
        with self._lock:
            if self._open:
                self._pending.publish(made)
            return self._open

    def holds(self, job_id: str) -> bool:
        """True while the job is in the open batch, and not in the store."""
        return self._open and self._pending.holds(job_id)

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
        if self._pending:
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
            await self._mill.threaded_put(self._commit)

    def _end(self) -> None:
        try:
            self._leave()
        except BaseException:  # a signal handler has raised
            self._leave()  # a batch that stays open would take later jobs
            raise

    def _leave(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._current.reset(self._token)

    def _commit(self) -> None:
        if self._pending:
            self._mill.commit_batch(self._pending)
