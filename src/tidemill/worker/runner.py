"""Running one job, as steps over one value: verify, resolve, decode, perform, conclude."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.app import Tidemill
from tidemill.clock import wall_time
from tidemill.codec import pack, unpack, unpack_pickle, verify
from tidemill.config import storable
from tidemill.context import JobContext
from tidemill.errors import CodecError, JobCancelled
from tidemill.inputs import Filler
from tidemill.job import GUARD, Envelope, Lease, Outcome, Verdict, decode_envelope
from tidemill.middleware import Middleware, compose
from tidemill.openings import keep_guard
from tidemill.options import Options
from tidemill.retry import (
    Fail,
    JobTerminated,
    JobTimeout,
    Retry,
    Snooze,
    WorkerStopping,
    backoff,
)
from tidemill.task import Task, import_task, make_task
from tidemill.worker.fork import perform
from tidemill.worker.safelog import SafeLog
from tidemill.worker.tracebacks import format_traceback

if TYPE_CHECKING:
    from tidemill.worker.interrupt import Run

__all__ = ["Runner", "describe", "stuck_verdict", "timed_out"]

log = SafeLog("tidemill.worker")

ERROR_MOST = 2_000
"""Characters that are kept of an error."""


class Runner:
    """Runs jobs of one app. Holds no state of any job."""

    def __init__(self, mill: Tidemill) -> None:
        self.mill = mill
        self._talks = log.talks(logging.DEBUG)  # asked once: this is for every job
        self._imported: dict[str, Task[..., Any]] = {}

    def admit(self, lease: Lease) -> tuple[Envelope, Task[..., Any]] | Verdict:
        """The job and its task, or the verdict on a job that must not or cannot run."""
        try:
            return self._admitted(lease)
        except BaseException as error:
            return self.refused(lease, f"the job cannot be prepared: {describe(error)[0]}")

    def _admitted(self, lease: Lease) -> tuple[Envelope, Task[..., Any]] | Verdict:
        try:
            envelope = decode_envelope(lease.envelope)
        except Exception as error:
            return self.refused(lease, f"the job cannot be decoded: {error}")
        refusal = self.refuse(envelope)
        if refusal:
            return self.refused(lease, refusal)
        try:
            task = self.resolve(envelope.task)
        except BaseException as error:  # importing runs code
            text, _ = describe(error)
            return self.refused(lease, f"{envelope.task} cannot be imported: {text}")
        return self.unknown(lease, envelope) if task is None else (envelope, task)

    @staticmethod
    def refused(lease: Lease, reason: str) -> Verdict:
        """The verdict on a job that is not run."""
        log.error("a job was refused: %s", reason)
        now = wall_time()
        return Verdict(lease.token, Outcome.FAIL, error=reason, started=now, ended=now)

    def resolve(self, name: str) -> Task[..., Any] | None:
        """The task of that name, declared or importable; None when there is none."""
        task = self.mill.tasks.get(name) or self._imported.get(name)
        if task is None and name == GUARD:

            def guard(groups: list[str]) -> None:
                keep_guard(self.mill, groups)

            task = self._imported[name] = make_task(self.mill, guard, name, Options())
        if task is None and self.mill.may_import(name):
            try:
                function = import_task(name)
            except (ImportError, AttributeError):
                return None
            task = self._imported[name] = make_task(self.mill, function, name, self.mill.defaults)
        return task

    def refuse(self, envelope: Envelope) -> str:
        """Why the job must not run at all; empty when it may."""
        if self.mill.keys:
            try:
                verify(envelope, self.mill.keys)
            except CodecError as error:
                return str(error)
        elif envelope.pickled:
            return "bad signature: a pickled body is only opened when it is signed"
        if envelope.pickled and not self.mill.pickles:
            return "the body is pickled and this app does not use serializer='pickle'"
        return ""

    def prepare(
        self, lease: Lease, envelope: Envelope, task: Task[..., Any], context: JobContext
    ) -> Callable[[], Any]:
        """The job as a call without arguments.

        Raises:
            Fail: the arguments cannot be decoded or do not fit the task, or a result that is one
                of them is missing.
        """
        try:
            decode = unpack_pickle if envelope.pickled else unpack
            args, kwargs = decode(envelope.body)
            if envelope.links is not None:
                args, kwargs = Filler(self.mill, lease, envelope).fill([args, kwargs])
            args, kwargs = task.bind(args, kwargs)
        except (CodecError, TypeError, ValueError) as error:
            raise Fail(f"the arguments cannot be used: {error}") from error
        function = task.function
        layers = self.mill.middleware
        if not layers:
            return functools.partial(function, *args, **kwargs)
        try:
            # Found later, inside the onion, it would look like an error of the task's own.
            task.arguments.check(tuple(args), kwargs)
        except TypeError as error:
            raise Fail(f"the arguments do not fit the task: {error}") from error
        if task.is_async:
            called = functools.partial(function, *args, **kwargs)
            return lambda: _through_async(layers, called, context)
        # A child that the task forks must not go on through the middleware.
        performed = functools.partial(perform, function, args, kwargs)
        return lambda: _through(layers, performed, context)

    @staticmethod
    def unknown(lease: Lease, envelope: Envelope) -> Verdict:
        """The verdict on a job whose task this app does not have; the supervisor completes it."""
        error = f"no worker knows task {envelope.task!r}{_of(envelope)}"
        return Verdict(lease.token, Outcome.UNKNOWN, error=error)

    def started(self, run: Run) -> None:
        """Say that a run begins."""
        if self._talks:
            e = run.envelope
            log.debug("job %s (%s) started, attempt %d", e.id, e.task, run.lease.attempt)

    def success(self, run: Run, value: Any) -> Verdict:
        """The verdict on a job whose task returned."""
        result, now = b"", wall_time()
        if value is not None:
            try:
                result = pack(value)
            except BaseException as error:  # encoding may run the value's own code
                reason = f"the task ended well, but its result cannot be kept: {describe(error)[0]}"
                return _failed(run.lease, run.envelope, Outcome.FAIL, reason, "", run.started)
        if self._talks:
            e = run.envelope
            log.debug("job %s (%s) succeeded in %.3f s", e.id, e.task, now - run.started)
        return Verdict(run.token, 0, result, 0.0, "", "", run.started, now)

    def failure(self, run: Run, error: BaseException) -> Verdict:
        """The verdict on a job whose task raised, whatever the exception's own code does."""
        try:
            return self._failure(run, error)
        except BaseException as inner:
            text = f"{name_of(error)}: its exception cannot be read: {name_of(inner)}"
            return _failed(run.lease, run.envelope, Outcome.RETRY, text, "", run.started)

    def _failure(self, run: Run, error: BaseException) -> Verdict:
        lease, envelope, started = run.lease, run.envelope, run.started
        if isinstance(error, Snooze):
            return Verdict(lease.token, Outcome.SNOOZE, delay=error.delay, error=describe(error)[0])
        if isinstance(error, WorkerStopping) and run.context.stopping:
            run.context.log(f"interrupted after {wall_time() - started:.3f} s: its worker stops")
            return Verdict(lease.token, Outcome.RELEASE, started=started)
        text, trace = describe(error)
        if isinstance(error, JobTerminated):
            return _failed(lease, envelope, Outcome.CANCELLED, "terminated", trace, started)
        if isinstance(error, JobCancelled) and run.context.cancelled:
            reason = storable(str(error)) or "it stopped when it was asked to"
            return _failed(lease, envelope, Outcome.CANCELLED, reason, "", started)
        if isinstance(error, JobTimeout):
            return timed_out(lease, envelope, trace, started)
        if isinstance(error, Fail):
            return _failed(lease, envelope, Outcome.FAIL, text, trace, started)
        if _does_not_fit(error):
            reason = f"the arguments do not fit the task: {text}"
            return _failed(lease, envelope, Outcome.FAIL, reason, "", started)
        delay = error.delay if isinstance(error, Retry) else None
        return _failed(lease, envelope, Outcome.RETRY, text, trace, started, delay)


def _of(envelope: Envelope) -> str:
    """Whose job it is, if a schedule put it."""
    return f" of schedule {envelope.planned.schedule!r}" if envelope.planned else ""


def _failed(
    lease: Lease,
    envelope: Envelope,
    outcome: Outcome,
    text: str,
    trace: str,
    started: float,
    delay: float | None = None,
) -> Verdict:
    if outcome is Outcome.RETRY and delay is None:
        delay = backoff(envelope.retries, lease.attempt)
    if outcome is Outcome.CANCELLED:
        log.info("job %s (%s) is cancelled: %s", envelope.id, envelope.task, text)
    else:
        _report(lease, envelope, text, trace, delay if outcome is Outcome.RETRY else None)
    return Verdict(lease.token, outcome, b"", delay or 0.0, text, trace, started, wall_time())


def _report(lease: Lease, envelope: Envelope, text: str, trace: str, delay: float | None) -> None:
    """A line in the log: which attempt failed, why, and what comes next; where, after the last."""
    most = envelope.retries.max_attempts
    again = delay is not None and (not most or lease.attempt < most)
    log.log(
        logging.WARNING if again else logging.ERROR,
        "job %s (%s) attempt %d of %s: %s; %s%s",
        envelope.id,
        envelope.task,
        lease.attempt,
        most or "any number",
        text,
        f"again in {delay:.3g} s" if again else "not again",
        f"\n{trace.rstrip()}" if trace and not again else "",
    )


def _through(layers: Sequence[Middleware], call: Callable[[], Any], context: JobContext) -> Any:
    value = compose(layers, call, context)
    return asyncio.run(_outcome(value)) if inspect.isawaitable(value) else value


async def _through_async(
    layers: Sequence[Middleware], call: Callable[[], Any], context: JobContext
) -> Any:
    value = compose(layers, call, context)
    return await value if inspect.isawaitable(value) else value


async def _outcome(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def stuck_verdict(
    lease: Lease, envelope: Envelope, trace: str, started: float, terminated: bool
) -> Verdict:
    """The verdict on a job that could not be interrupted."""
    if terminated:
        return _failed(lease, envelope, Outcome.CANCELLED, "terminated", trace, started)
    return timed_out(lease, envelope, trace, started)


def timed_out(lease: Lease, envelope: Envelope, trace: str, started: float) -> Verdict:
    """The verdict on a job that ran past its timeout, with the stack it was stuck in."""
    error = f"JobTimeout: not finished after its timeout of {envelope.timeout:g} s"
    delay = backoff(envelope.retries, lease.attempt)
    _report(lease, envelope, error, trace, delay)
    return Verdict(
        lease.token,
        Outcome.RETRY,
        delay=delay,
        error=error,
        traceback=trace,
        started=started,
        ended=wall_time(),
    )


def describe(error: BaseException) -> tuple[str, str]:
    """(``Type: message``, traceback) of an exception, whatever its own code does."""
    name = name_of(error)
    try:
        message = str.__str__(str(error))[
            :ERROR_MOST
        ]  # it may be of a subclass with code of its own
    except BaseException as inner:
        message = f"<its message cannot be printed: {name_of(inner)}>"
    try:
        trace = format_traceback(error, _users_part(error))
    except BaseException as inner:
        trace = f"<its traceback cannot be printed: {name_of(inner)}>"
    text = f"{name}: {message}" if message else name
    return storable(text[:ERROR_MOST])[:ERROR_MOST], storable(trace)


def name_of(error: BaseException) -> str:
    """The name of the exception's type, which no metaclass can withhold."""
    return str(type.__dict__["__qualname__"].__get__(type(error)))


def _users_part(error: BaseException) -> Any:
    """The traceback from the first frame outside this package on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(
        ("tidemill.worker", "tidemill.middleware")
    ):
        trace = trace.tb_next
    return trace or error.__traceback__


def _does_not_fit(error: BaseException) -> bool:
    """True for the TypeError of a call that never got into the task."""
    if not isinstance(error, TypeError):
        return False
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        if not name.startswith(("tidemill.worker", "tidemill.middleware", "contextvars")):
            return False
        trace = trace.tb_next
    return True
