"""One run of one job: its steps, in order, wherever the job runs.

:meth:`Executor.admit` has the steps before a job waits for a slot. :meth:`Executor.execute` has the
steps of the run itself. Worker threads, the main thread, the event loop and the testing worker run
these steps through :class:`ProcessExecutor`. Inline mode has its own executor
(:mod:`tidemill.worker.inline`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import inspect
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from threading import get_ident, get_native_id
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.client.context import JobContext, logged_as, running_job
from tidemill.client.middleware import Layer, compose
from tidemill.core.clock import clock
from tidemill.core.codec import unpack, unpack_pickle
from tidemill.core.envelope import Envelope, decode_envelope
from tidemill.core.job import Lease, Note, Verdict
from tidemill.core.retry import Fail, JobTerminated, JobTimeout, WorkerStopping
from tidemill.core.signatures import hands_on, sign_handed_on, trusted
from tidemill.core.verdicts import given_back
from tidemill.errors import BadSignature, CodecError
from tidemill.worker import verdicts
from tidemill.worker.event_loop import run_awaitable
from tidemill.worker.forked_children import end_if_child, perform
from tidemill.worker.safe_logging import SafeLog
from tidemill.worker.timeouts import cancellation_reason, raise_if_interrupted
from tidemill.worker.verdicts import describe
from tidemill.workflows.parent_results import ParentResults

if TYPE_CHECKING:
    from tidemill.client.task import Configured
    from tidemill.runtime import Runtime
    from tidemill.worker.child import Child

log = SafeLog("tidemill.worker")

# The signal module's own functions make an enum of each handler, which costs more than the job.
_signal: Any = sys.modules.get("_signal") or signal
_SIGNALS = tuple(map(int, (signal.SIGALRM, signal.SIGTERM, signal.SIGINT)))

Interrupt = type[JobTimeout] | type[JobTerminated] | type[WorkerStopping]
"""The exceptions that end a run from outside."""


class WaitingJob(msgspec.Struct, frozen=True, order=True, gc=False):
    """A job whose envelope is decoded, whose task is known, and that waits for a slot.

    Waiting jobs sort by the position of their queue in the worker's list of queues, then by rank,
    then by sequence number. Tokens are unique, so a comparison never compares leases.
    """

    queue_place: int
    rank: int
    seq: int
    token: int
    lease: Lease
    envelope: Envelope
    task: Configured[..., Any, Any]


class Run(msgspec.Struct, eq=False):
    """One run of one job.

    Attributes:
        ident: names the thread.
        started: wall time.
        row: the run's row on the scoreboard.
        deadline: machine time, 0 for none.
        interrupt_by: the exception by which a terminate, timeout or stop is to end the run.
        interrupted: the interruption that came before the end of the job.
        caught: True when the task caught the interruption and returned.
        first_try: machine time of the first try to interrupt.
        latest_try: machine time of the latest try to interrupt.
        fault: the error of the job when its subtask raised SystemExit.
        sent: a lock, released once the exception is sent.
        asyncio_task: the asyncio task of an async job; ``loop`` is its loop.
    """

    token: int
    lease: Lease
    envelope: Envelope
    task: Configured[..., Any, Any]
    context: JobContext
    ident: int
    started: float
    row: int = 0
    deadline: float = 0.0
    interrupt_by: Interrupt | None = None
    interrupted: Interrupt | None = None
    caught: bool = False
    first_try: float = 0.0
    latest_try: float = 0.0
    fault: BaseException | None = None
    sent: Any = None
    asyncio_task: asyncio.Task[Any] | None = None
    loop: asyncio.AbstractEventLoop | None = None


class Refused(Exception):
    """The job must not run, or cannot begin."""


class Executor:
    """Runs jobs of one app. Subclasses define ``start``, ``call`` and ``report``.

    If the worker serves its queues in strict order, ``queues`` are its queues in this order.
    """

    def __init__(self, runtime: Runtime, queues: Sequence[str] = ()) -> None:
        self.runtime = runtime
        self._places = {name: place for place, name in enumerate(queues)}
        self._logs_debug = log.talks(logging.DEBUG)  # read once here, since every job uses it
        self._imported: dict[str, Configured[..., Any, Any]] = {}
        # The data of one job must not reach the error report of another job.
        sentry = sys.modules.get("sentry_sdk")
        self._sentry_scope = getattr(sentry, "isolation_scope", contextlib.nullcontext)

    run_coroutine: Callable[[Coroutine[Any, Any, Any]], Any] = staticmethod(asyncio.run)
    """Runs a coroutine for the middleware of a sync task."""

    # -- before the job waits for a slot --------------------------------------------------------

    def admit(self, lease: Lease) -> WaitingJob | Verdict:
        """Decode, verify and resolve a job. Returns a verdict if the job cannot run."""
        try:
            envelope = self.decode(lease)
            self.verify(envelope)
            task = self.resolve(envelope.task)
        except Refused as refusal:
            return verdicts.refused(lease, str(refusal))
        except BaseException as error:
            reason = f"the job cannot be prepared: {describe(error)[0]}"
            return verdicts.refused(lease, reason)
        if task is None:
            return given_back(lease.token, envelope)
        envelope.rank = lease.rank  # somebody may have changed the rank since the put
        place = self._places.get(envelope.queue, 0)
        return WaitingJob(place, lease.rank, lease.seq, lease.token, lease, envelope, task)

    # -- the run --------------------------------------------------------------------------------

    async def execute(self, job: WaitingJob) -> None:
        """Run a job, from its start to its report. The steps of a sync job await nothing."""
        with self._sentry_scope():
            run = self.start(job)
            try:
                args, kwargs = self.arguments(run)
                call = self.bind(run, args, kwargs)
                if job.task.is_async:
                    value = await self.call_async(run, call)
                else:
                    value = self.call(run, call)
            except BaseException as error:
                self.end_forked_child()
                self.restore()
                if not self.finish(run):
                    return
                verdict = self.failure(run, error)  # logs the error, in the scope of this run
            else:
                self.restore()
                if not self.finish(run):
                    return
                verdict = self.success(run, value)
            if self.runtime.keys and hands_on(run.envelope):
                sign_handed_on(verdict, run.envelope.id, self.runtime.keys)
            self.report(run, verdict)

    # -- steps of admission ---------------------------------------------------------------------

    def decode(self, lease: Lease) -> Envelope:
        try:
            return decode_envelope(lease.envelope)
        except Exception as error:
            raise Refused(f"the job cannot be decoded: {error}") from error

    def verify(self, envelope: Envelope) -> None:
        """Check the signature of a job, and that this app may open its body."""
        if self.runtime.keys or envelope.pickled:
            try:
                trusted(envelope, self.runtime.keys)
            except BadSignature as error:
                raise Refused(str(error)) from error
        if envelope.pickled and not self.runtime.pickles:
            raise Refused("the body is pickled and this app does not use serializer='pickle'")

    def resolve(self, name: str) -> Configured[..., Any, Any] | None:
        """The task of that name, declared or importable; None when there is none."""
        task = self.runtime.tasks.get(name) or self._imported.get(name)
        if task is not None:
            return task
        try:
            task = self.runtime.find_task(name)
        except BaseException as error:  # the import runs code of the app
            raise Refused(f"{name} cannot be imported: {describe(error)[0]}") from error
        if task is not None:
            self._imported[name] = task
        return task

    # -- steps of the run -----------------------------------------------------------------------

    def start(self, job: WaitingJob) -> Run:
        """Begin a run in the calling thread."""
        raise NotImplementedError

    def arguments(self, run: Run) -> tuple[list[Any], dict[str, Any]]:
        """Decode the arguments, fill in results, convert to the annotated types. Raises Fail."""
        envelope = run.envelope
        try:
            decode = unpack_pickle if envelope.pickled else unpack
            args, kwargs = decode(envelope.body)
            if envelope.links is not None:
                args, kwargs = ParentResults(self.runtime, run.lease, envelope).fill([args, kwargs])
            return run.task.arguments.bind(args, kwargs)
        except (CodecError, TypeError, ValueError) as error:
            raise Fail(f"the arguments cannot be used: {error}") from error

    def bind(self, run: Run, args: list[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
        """Bind the arguments to the function, in the middleware. Raises Fail if they do not fit."""
        task, layers, context = run.task, self.runtime.layers, run.context
        context._given = args, kwargs
        if not layers:
            return functools.partial(task.function, *args, **kwargs)
        try:
            # Inside the middleware, this TypeError would look like an error of the task.
            task.arguments.check(tuple(args), kwargs)
        except TypeError as error:
            raise Fail(f"the arguments do not fit the task: {error}") from error
        if task.is_async:
            call = functools.partial(task.function, *args, **kwargs)
            return lambda: _through_async(layers, call, context)
        call = functools.partial(self.call_function, task.function, args, kwargs)
        return lambda: self.through(layers, call, context)

    @staticmethod
    def call_function(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the task's function, inside all middleware."""
        return function(*args, **kwargs)

    def through(self, layers: Sequence[Layer], call: Callable[[], Any], context: JobContext) -> Any:
        """Call a sync task inside the middleware, and await what this call returns, if need be."""
        value = compose(layers, call, context, awaits=False)
        return run_awaitable(value, self.run_coroutine) if inspect.isawaitable(value) else value

    def call(self, run: Run, call: Callable[[], Any]) -> Any:
        running_job.set(run.context)
        return call()

    async def call_async(self, run: Run, call: Callable[[], Any]) -> Any:
        """Await an async task. Its asyncio task already has a context of its own."""
        running_job.set(run.context)
        return await call()

    @staticmethod
    def end_forked_child() -> None:
        """In a child that the task has forked, end the child: an exception has left its task."""

    def restore(self) -> None:
        """Put back the signal handlers that the task has changed."""

    def finish(self, run: Run) -> bool:
        """End the timeout of the run; False when its job was settled as a stuck job."""
        return True

    success = staticmethod(verdicts.success)
    """The verdict on a task that returned a value."""

    def failure(self, run: Run, error: BaseException) -> Verdict:
        """The verdict on a task that raised an exception, or on a job that cannot be prepared."""
        return verdicts.failure(run, error)

    def report(self, run: Run, verdict: Verdict) -> None:
        raise NotImplementedError


class ProcessExecutor(Executor):
    """Runs jobs for threads, the main thread and the event loop of one worker process."""

    def __init__(self, child: Child) -> None:
        setup, run_log = child.setup, child.run_log
        super().__init__(child.runtime, setup.queues)
        self._out = child.out
        self._worker = setup.worker
        self._timeouts = child.timeouts
        self._scoreboard = child.scoreboard
        self._waits = child.waits
        self._stopping = child.stopping
        self._run_log = run_log if run_log.wanted or run_log.slow else None
        # Rows are used in turn: a row is reused only when its last job has long been settled.
        self._rows = collections.deque(range(setup.first_slot + 1, setup.first_slot + setup.share))
        self._signals: TaskSignals | None = None

    def use_main_thread(self) -> None:
        """Put back signal handlers: jobs will run in the calling thread, the main thread."""
        self._signals = TaskSignals()

    def restore(self) -> None:
        if self._signals is not None:
            self._signals.put_back()

    def start(self, job: WaitingJob) -> Run:
        lease, envelope = job.lease, job.envelope
        context = JobContext(
            *(envelope, lease.attempt, lease.token, self._say, self._waits, self._stopping),
            self._worker,
        )
        run = Run(job.token, lease, envelope, job.task, context, get_ident(), clock.wall())
        if self._logs_debug:
            self._log_start(run)
        if envelope.timeout:
            run.deadline = clock.machine() + envelope.timeout
        if job.task.is_async:
            run.asyncio_task, run.loop = asyncio.current_task(), asyncio.get_running_loop()
            self._timeouts.begin(run)
        run.row = self._rows.popleft()
        self._scoreboard.start(run.row, run.token, get_native_id(), run.started, run.deadline)
        return run

    def call(self, run: Run, call: Callable[[], Any]) -> Any:
        """Call a sync task; a timeout may interrupt it from here to its return."""
        return self._timeouts.guarded(run, _call_sync, run.context, call)

    async def call_async(self, run: Run, call: Callable[[], Any]) -> Any:
        try:
            running_job.set(run.context)
            return raise_if_interrupted(run, await call())
        finally:
            end_if_child()

    call_function = staticmethod(perform)
    """Ends a child that the task forks: the child must not return into the middleware."""

    end_forked_child = staticmethod(end_if_child)

    def finish(self, run: Run) -> bool:
        if self._timeouts.finished(run):
            return True
        self._rows.append(run.row)
        return False

    def failure(self, run: Run, error: BaseException) -> Verdict:
        if run.asyncio_task is not None:
            error = cancellation_reason(run, error)
        return verdicts.failure(run, error)

    def report(self, run: Run, verdict: Verdict) -> None:
        self._out.conclude(verdict, run.lease, run.envelope)
        if self._run_log is not None:
            self._run_log.ended(run, verdict)
        self._rows.append(run.row)

    @staticmethod
    def _log_start(run: Run) -> None:
        envelope, attempt = run.envelope, run.lease.attempt
        with logged_as(run.context):
            line = "%s[%s] started (queue %s, attempt %d)"
            log.debug(line, envelope.called, envelope.id, envelope.queue, attempt)

    def _say(self, note: Note) -> None:
        self._out.notes.append(note)
        self._out.ring()


def _call_sync(context: JobContext, call: Callable[[], Any]) -> Any:
    running_job.set(context)
    try:
        return call()
    finally:
        end_if_child()


class TaskSignals:
    """The worker's signal handlers, put back after a job in the main thread (``-c 1``).

    A task may set handlers for SIGALRM, SIGTERM and SIGINT. Its handler must not raise after the
    task has ended, and timeouts need the worker's handler of SIGALRM. The handlers are recorded
    before the first job, in the thread that runs jobs.
    """

    def __init__(self) -> None:
        self._main = get_ident()
        self._handlers = [(signum, _signal.getsignal(signum)) for signum in _SIGNALS]

    def put_back(self) -> None:
        """Put back the handlers after a job in the main thread, and stop its alarm."""
        if get_ident() != self._main:
            return
        try:
            self._put_back()
        except BaseException:
            # A handler of the task raised during the first try; its alarm is stopped now.
            self._put_back()

    def _put_back(self) -> None:
        for signum, handler in self._handlers:
            if _signal.getsignal(signum) is not handler:
                signal.setitimer(signal.ITIMER_REAL, 0)
                if handler is not None:  # None stands for a handler of C code
                    _signal.signal(signum, handler)


def run_sync(steps: Coroutine[Any, Any, None]) -> None:
    """Run the steps of a sync job in a context of its own: no variable reaches the next job."""
    copy_context().run(_run_sync, steps)


def _run_sync(steps: Coroutine[Any, Any, None]) -> None:
    try:
        steps.send(None)  # completes all steps, since they await nothing
    except StopIteration:
        return
    raise RuntimeError("the run of a sync job awaits something")


async def _through_async(
    layers: Sequence[Layer], call: Callable[[], Any], context: JobContext
) -> Any:
    value = compose(layers, call, context, awaits=True)
    return await value if inspect.isawaitable(value) else value
