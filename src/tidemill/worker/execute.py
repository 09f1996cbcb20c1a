"""The steps of a job's run, in order, wherever it runs.

:meth:`Executor.admit` has the steps before a job waits for a slot. :meth:`Executor.execute` has the
steps of the run itself. Worker threads, the main thread, the event loop and the testing worker run
these steps through :class:`~tidemill.worker.process_executor.ProcessExecutor`. Inline mode has its
own executor (:mod:`tidemill.worker.inline`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import copy_context
from typing import Any

from tidemill.client.context import JobContext, running_job
from tidemill.client.middleware import Layer, compose
from tidemill.client.runtime import DeclaredTask, Runtime
from tidemill.core.codec import unpack, unpack_pickle, verify
from tidemill.core.envelope import Envelope, decode_envelope
from tidemill.core.errors import CodecError
from tidemill.core.job import Lease, Verdict
from tidemill.core.retry import Fail
from tidemill.core.signatures import hands_on, sign_handed_on
from tidemill.core.verdicts import given_back
from tidemill.worker import verdicts
from tidemill.worker.run import Run
from tidemill.worker.run_awaitable import run_awaitable
from tidemill.worker.safe_logging import SafeLog
from tidemill.worker.verdicts import describe
from tidemill.worker.waiting_job import WaitingJob
from tidemill.workflows.parent_results import ParentResults

log = SafeLog("tidemill.worker")


class Refused(Exception):
    """The job must not run, or cannot begin."""


class Executor:
    """Runs jobs of one app. Subclasses define ``start``, ``call`` and ``report``.

    If the worker serves its queues in strict order, ``queues`` are its queues in this order.
    """

    def __init__(self, mill: Runtime, queues: Sequence[str] = ()) -> None:
        self.mill = mill
        self._places = {name: place for place, name in enumerate(queues)}
        self._logs_debug = log.talks(logging.DEBUG)  # read once here, since every job uses it
        self._imported: dict[str, DeclaredTask] = {}
        # The data of one job must not reach the error report of another job.
        sentry = sys.modules.get("sentry_sdk")
        self._sentry_scope = getattr(sentry, "isolation_scope", contextlib.nullcontext)

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
                self.end_forked_child(error)
                self.restore()
                verdict = self.failure(run, error)  # logs the error, in the scope of this run
            else:
                self.restore()
                verdict = self.success(run, value)
            if hands_on(run.envelope):
                sign_handed_on(verdict, run.envelope.id, self.mill.keys)
            self.report(run, verdict)

    # -- steps of admission ---------------------------------------------------------------------

    def decode(self, lease: Lease) -> Envelope:
        """Decode the envelope of a lease."""
        try:
            return decode_envelope(lease.envelope)
        except Exception as error:
            raise Refused(f"the job cannot be decoded: {error}") from error

    def verify(self, envelope: Envelope) -> None:
        """Check the signature of a job, and that this app may open its body."""
        if self.mill.keys:
            try:
                verify(envelope, self.mill.keys)
            except CodecError as error:
                raise Refused(str(error)) from error
        elif envelope.pickled:
            raise Refused("bad signature: a pickled body is only opened when it is signed")
        if envelope.pickled and not self.mill.pickles:
            raise Refused("the body is pickled and this app does not use serializer='pickle'")

    def resolve(self, name: str) -> DeclaredTask | None:
        """The task of that name, declared or importable; None when there is none."""
        task = self.mill.tasks.get(name) or self._imported.get(name)
        if task is not None:
            return task
        try:
            task = self.mill.find_task(name)
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
        """Decode the arguments, fill in results of earlier jobs, convert to the annotated types.

        Raises:
            Fail: the arguments cannot be decoded or converted, or a result is missing.
        """
        envelope = run.envelope
        try:
            decode = unpack_pickle if envelope.pickled else unpack
            args, kwargs = decode(envelope.body)
            if envelope.links is not None:
                args, kwargs = ParentResults(self.mill, run.lease, envelope).fill([args, kwargs])
            return run.task.bind(args, kwargs)
        except (CodecError, TypeError, ValueError) as error:
            raise Fail(f"the arguments cannot be used: {error}") from error

    def bind(self, run: Run, args: list[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
        """Bind the arguments to the task's function, inside the app's middleware.

        Raises:
            Fail: the task does not take these arguments.
        """
        task, layers, context = run.task, self.mill.layers, run.context
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
        return self.run_awaitable(value) if inspect.isawaitable(value) else value

    def run_awaitable(self, awaitable: Awaitable[Any]) -> Any:
        """Await something for a sync task."""
        return run_awaitable(awaitable)

    def call(self, run: Run, call: Callable[[], Any]) -> Any:
        """Call a sync task."""
        running_job.set(run.context)
        return call()

    async def call_async(self, run: Run, call: Callable[[], Any]) -> Any:
        """Await an async task. Its asyncio task already has a context of its own."""
        running_job.set(run.context)
        return await call()

    def end_forked_child(self, error: BaseException) -> None:
        """In a child that the task has forked, end the child: an exception has left its task."""

    def restore(self) -> None:
        """Put back the signal handlers that the task has changed."""

    def success(self, run: Run, value: Any) -> Verdict:
        """The verdict on a task that returned ``value``."""
        return verdicts.success(run, value)

    def failure(self, run: Run, error: BaseException) -> Verdict:
        """The verdict on a task that raised an exception, or on a job that cannot be prepared."""
        return verdicts.failure(run, error)

    def report(self, run: Run, verdict: Verdict) -> None:
        """Hand over the verdict."""
        raise NotImplementedError


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
