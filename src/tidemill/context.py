"""What a running task can ask and say about its own job."""

from __future__ import annotations

import contextlib
import contextvars
import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from tidemill.clock import wall_time
from tidemill.config import storable
from tidemill.job import Envelope, Note, priority_of
from tidemill.stopping import NEVER, Stopping

__all__ = ["JobContext", "Waits", "current_job", "running_job", "waiting_for"]


class Waits(Protocol):
    """Who waits for other jobs in this worker; see :mod:`tidemill.worker.waits`."""

    def begin(self, context: JobContext, job_id: str) -> None:
        """The job is about to wait for another.

        Raises:
            TidemillError: all slots would wait, and nobody could run what they wait for.
        """
        ...

    def end(self, context: JobContext) -> None:
        """It waits no longer."""
        ...


class JobContext:
    """The job that runs now, as its own task sees it.

    Attributes:
        id, task, queue, key, tags, headers: as they were put.
        attempt: number of this run, from 1.
        max_attempts: runs at most; 0 for no limit.
        state: a dict for middleware to leave things in; lives as long as this run.
    """

    __slots__ = (
        "_envelope",
        "_say",
        "_stopping",
        "_token",
        "_waits",
        "attempt",
        "cancelled",
        "state",
        "waiting",
    )

    def __init__(
        self,
        envelope: Envelope,
        attempt: int,
        token: int = 0,
        say: Callable[[Note], None] | None = None,
        waits: Waits | None = None,
        stopping: Stopping = NEVER,
    ) -> None:
        self._envelope = envelope
        self._say = say
        self._waits = waits
        self._stopping = stopping
        self.waiting = 0  # for how many other jobs it waits now
        self.attempt = attempt
        self._token = token
        self.cancelled = False
        """True once somebody asked for the job to be cancelled: stop when it suits, and raise
        ``JobCancelled`` so that the job ends ``cancelled``; one that returns has succeeded."""
        self.state: dict[str, Any] = {}

    @property
    def token(self) -> int:
        """Number of the lease under which it runs."""
        return self._token

    @property
    def id(self) -> str:
        """Id of the job."""
        return self._envelope.id

    @property
    def task(self) -> str:
        """Name of the task."""
        return self._envelope.task

    @property
    def queue(self) -> str:
        """Name of the queue."""
        return self._envelope.queue

    @property
    def priority(self) -> float:
        """The priority it was put with, -100 to 100."""
        return priority_of(self._envelope.rank)

    @property
    def key(self) -> str:
        """The job's key, or an empty string."""
        return self._envelope.key

    @property
    def tags(self) -> tuple[str, ...]:
        """The job's tags."""
        return self._envelope.tags

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers it was put with."""
        return self._envelope.headers

    @property
    def schedule(self) -> str:
        """Name of the schedule that put it, or an empty string."""
        planned = self._envelope.planned
        return planned.schedule if planned else ""

    @property
    def planned(self) -> dt.datetime | None:
        """The time of its schedule that it was put for, in UTC; None without one."""
        planned = self._envelope.planned
        return dt.datetime.fromtimestamp(planned.time, dt.UTC) if planned else None

    @property
    def max_attempts(self) -> int:
        """How often the job runs at most; 0 for no limit."""
        return self._envelope.retries.max_attempts

    @property
    def stopping(self) -> bool:
        """True once the worker was told to stop. The job has time until the shutdown timeout, and
        gets ``WorkerStopping`` shortly before. The task may also raise ``WorkerStopping`` itself,
        to go back uncounted."""
        return self._stopping.is_set()

    def wait_stopping(self, timeout: float | None = None) -> bool:
        """Block until the worker is told to stop; False when the time is over before."""
        return self._stopping.wait(timeout)

    async def await_stopping(self, timeout: float | None = None) -> bool:
        """As ``wait_stopping``, for async tasks."""
        return await self._stopping.await_set(timeout)

    def progress(self, done: float, total: float = 0.0) -> None:
        """Say how far the job is; a total of 0 means it is not known."""
        self._tell(Note(self._token, done=float(done), total=float(total)))

    def log(self, line: str) -> None:
        """Add a line to the job's trail; the last 100 are kept, 2,000 characters each."""
        self._tell(Note(self._token, line=storable(str(line)[:2000]), time=wall_time()))

    def _tell(self, note: Note) -> None:
        if self._say is not None:
            self._say(note)


running_job: contextvars.ContextVar[JobContext | None] = contextvars.ContextVar(
    "tidemill_job", default=None
)


def current_job() -> JobContext | None:
    """The job this code runs in, or None outside of one."""
    return running_job.get()


@contextlib.contextmanager
def waiting_for(job_id: str) -> Iterator[None]:
    """Around every wait for a job: inside a task it is counted, so that no worker starves itself.

    Raises:
        TidemillError: the wait would never end.
    """
    context = running_job.get()
    waits = context._waits if context is not None else None
    if context is None or waits is None:
        yield
        return
    waits.begin(context, job_id)
    try:
        yield
    finally:
        waits.end(context)
