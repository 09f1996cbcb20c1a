"""The context of a running job: a task reads its job here, reports progress, writes log lines.

A factory of log records adds attributes that name the running job, so the records of the app and of
libraries have them, too. :mod:`logging` raises a KeyError for an ``extra`` that has the name of an
attribute. So the names have a prefix, and a user's ``extra={"task": …}`` works.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime as dt
import logging
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from tidemill.brokers.contract.features import Feature
from tidemill.core.clock import clock
from tidemill.core.config import storable
from tidemill.core.envelope import Envelope, priority_of
from tidemill.core.job import Note
from tidemill.core.locks import NEVER, Stopping
from tidemill.errors import TidemillError

if TYPE_CHECKING:
    from tidemill.runtime import Runtime
    from tidemill.worker.slots import Waits


_NONE: tuple[list[Any], dict[str, Any]] = ([], {})


class JobContext:
    """The job that runs now, for its own task.

    Attributes:
        attempt: the number of this attempt, from 1.
        worker: the name of the worker; empty when no worker runs the job.
        state: a dict for middleware to store values in; it lives as long as this attempt.
    """

    __slots__ = (
        *("_envelope", "_given", "_send", "_stopping", "_token", "_waits"),
        *("attempt", "cancelled", "state", "waiting", "worker"),
    )

    _given: tuple[list[Any], dict[str, Any]]  # the arguments; missing until they are decoded

    def __init__(
        self,
        envelope: Envelope,
        attempt: int,
        token: int = 0,
        send: Callable[[Note], None] | None = None,
        waits: Waits | None = None,
        stopping: Stopping = NEVER,
        worker: str = "",
    ) -> None:
        self._envelope = envelope
        self._send = send
        self._waits = waits
        self._stopping = stopping
        self.waiting = 0  # the number of jobs that this job waits for now
        self.attempt = attempt
        self.worker = worker
        self._token = token
        self.cancelled = False
        """True once somebody has asked to cancel the job. The task decides when to stop. The job
        ends ``cancelled`` if the task raises ``JobCancelled``, and ``succeeded`` if it returns."""
        self.state: dict[str, Any] = {}

    @property
    def token(self) -> int:
        """Number of the lease under which the job runs."""
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
    def args(self) -> tuple[Any, ...]:
        """The positional arguments, as the function gets them; empty until they are decoded."""
        return tuple(getattr(self, "_given", _NONE)[0])

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The keyword arguments, as the function gets them; empty until they are decoded."""
        return MappingProxyType(getattr(self, "_given", _NONE)[1])

    @property
    def created(self) -> dt.datetime:
        """The time at which the job was put, in UTC."""
        return dt.datetime.fromtimestamp(self._envelope.created, dt.UTC)

    @property
    def queue(self) -> str:
        """Name of the queue."""
        return self._envelope.queue

    @property
    def priority(self) -> float:
        """The priority of the job, -100 to 100."""
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
        """The headers of the job."""
        return self._envelope.headers

    @property
    def schedule(self) -> str:
        """Name of the schedule that put the job, or an empty string."""
        planned = self._envelope.planned
        return planned.schedule if planned else ""

    @property
    def planned(self) -> dt.datetime | None:
        """The scheduled time of the job, in UTC; None for a job without a schedule."""
        planned = self._envelope.planned
        return dt.datetime.fromtimestamp(planned.time, dt.UTC) if planned else None

    @property
    def max_attempts(self) -> int:
        """The largest number of attempts at the job; 0 for no limit."""
        return self._envelope.retries.max_attempts

    @property
    def stopping(self) -> bool:
        """True once the worker was told to stop. The job may run until the shutdown timeout;
        shortly before, the task gets ``WorkerStopping``. A task may also raise ``WorkerStopping``:
        its job goes back to the queue, and the attempt does not count."""
        return self._stopping.is_set()

    def wait_stopping(self, timeout: float | None = None) -> bool:
        """Block until the worker is told to stop; False after ``timeout`` seconds."""
        return self._stopping.wait(timeout)

    async def await_stopping(self, timeout: float | None = None) -> bool:
        """As ``wait_stopping``, for async tasks."""
        return await self._stopping.await_set(timeout)

    def progress(self, done: float, total: float = 0.0, text: str = "") -> None:
        """Report the progress of the job in whole numbers; fractions are cut off.

        A total of 0 means that the total is unknown. ``text`` says what the task does now. Each
        report replaces the numbers and the text of the report before.
        """
        done, total = float(done), float(total)
        self._report(Note(self._token, done=done, total=total, text=_line(text)))

    def log(self, line: str) -> None:
        """Add a line to the job's trail. The last 100 lines stay, cut to 2,000 characters each."""
        self._report(Note(self._token, line=_line(line), time=clock.wall()))

    def _report(self, note: Note) -> None:
        if self._send is not None:
            self._send(note)


def _line(text: str) -> str:
    return storable(str(text)[:2000])


D = TypeVar("D")

_RAISE: Any = object()  # in place of a default: ``this_job`` raises outside of a job

running_job: contextvars.ContextVar[JobContext | None] = contextvars.ContextVar(
    "tidemill_job", default=None
)


@overload
def this_job() -> JobContext: ...
@overload
def this_job(default: D) -> JobContext | D: ...
def this_job(default: Any = _RAISE) -> Any:
    """The job in which this code runs: ``this_job().progress(1, 2)`` in a task.

    Args:
        default: what to return outside of a job, such as None.

    Raises:
        TidemillError: this code runs outside of a job, and there is no ``default``.
    """
    context = running_job.get()
    if context is not None:
        return context
    if default is _RAISE:
        raise TidemillError(
            "this_job() is called outside of a job, where no job runs; enqueue the task, or use "
            "this_job(None), which is None here"
        )
    return default


@contextlib.contextmanager
def waiting_for(runtime: Runtime, job_id: str, count: int = 1) -> Iterator[None]:
    """Surround every wait for a job. The worker counts waiting tasks, so some slot stays free.

    If Ctrl-C ends a wait outside of tasks, the last line of the traceback says what goes on.
    ``count`` is the number of jobs that have not ended; ``job_id`` is one of them.

    Raises:
        TidemillError: the wait would never end.
    """
    context = running_job.get()
    waits = context._waits if context is not None else None
    if context is None or waits is None:
        try:
            yield
        except KeyboardInterrupt as interrupt:
            if not runtime.sync and Feature.PROCESSES in runtime.broker.features:
                one = f"{job_id} goes on; tidemill cancel {job_id} stops it"
                many = f"{count:,} jobs go on; tidemill cancel ID stops one of them"
                interrupt.add_note(one if count == 1 else many)
            raise
        return
    waits.begin(context, job_id)
    try:
        yield
    finally:
        waits.end(context)


# -- the import of an app ------------------------------------------------------------------------

# Each process of a worker imports the app, and so does each command that names the app. A module
# that enqueues without the guard ``if __name__ == "__main__"`` would store one more job each time.
# A thread that the import starts has a context of its own, and may enqueue.
# An asyncio task that the import creates copies the context, and may live on. So the context holds
# a list, which is empty after the import.
_importing: contextvars.ContextVar[list[bool]] = contextvars.ContextVar("importing")


def is_importing() -> bool:
    """True while the import of an app by its name runs in this thread."""
    return bool(_importing.get(None))


LIBRARIES = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib"))
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


@contextlib.contextmanager
def app_import() -> Iterator[None]:
    running = [True]
    token = _importing.set(running)
    try:
        yield
    finally:
        running.clear()
        _importing.reset(token)


def users_frames(frame: FrameType | None) -> list[traceback.FrameSummary]:
    """The frames of a stack in the modules of the app and its libraries, the innermost last."""
    stack = traceback.extract_stack(frame)
    names = [each.filename for each in stack]
    start = max((at for at, name in enumerate(names) if name.endswith("app_loader.py")), default=0)
    return [each for each in stack[start:] if not each.filename.startswith(("<frozen", _OURS))]


# -- log records that name the running job ---------------------------------------------------------


TraceIds = Callable[[JobContext | None], tuple[str, str]]
"""Returns the ids of trace and span for a log record of the running job; empty without a trace."""

_find_trace: list[TraceIds] = []  # empty, or one function if an app of this process is traced


class _Factory:
    """Makes records with ``make`` and adds the attributes, which are empty outside of jobs."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        record, job = self._make(*args, **kwargs), running_job.get()
        record.tidemill_job_id = job.id if job else ""
        record.tidemill_task = job._envelope.called if job else ""
        record.tidemill_queue = job.queue if job else ""
        record.tidemill_attempt = job.attempt if job else ""
        for find in _find_trace:
            record.tidemill_trace_id, record.tidemill_span_id = find(job)
        return record


def mark_records() -> None:
    """Make the records of this process name the running job, by wrapping the app's factory."""
    make = logging.getLogRecordFactory()
    if not isinstance(make, _Factory):
        logging.setLogRecordFactory(_Factory(make))


def trace_ids_from(find: TraceIds) -> None:
    """Add the ids of trace and span to the log records of this process."""
    _find_trace[:] = [find]
    mark_records()


def job_name(envelope: Envelope) -> str:
    """The name of a job in log lines."""
    return f"{envelope.called}[{envelope.id}]"


@contextlib.contextmanager
def logged_as(context: JobContext) -> Iterator[None]:
    """Make the log records of this block name a job, even if the job has ended."""
    token = running_job.set(context)
    try:
        yield
    finally:
        running_job.reset(token)
