"""The verdict on a run: what the end of a task, or its exception, makes of the job."""

from __future__ import annotations

import logging
from typing import Any

from tidemill.core.clock import wall_time
from tidemill.core.codec import pack
from tidemill.core.config import storable
from tidemill.core.errors import JobCancelled
from tidemill.core.job import Envelope, Lease, Outcome, Verdict
from tidemill.core.retry import (
    Fail,
    JobTerminated,
    JobTimeout,
    Retry,
    Snooze,
    WorkerStopping,
    backoff,
)
from tidemill.worker.run import Run
from tidemill.worker.safe_logging import SafeLog
from tidemill.worker.tracebacks import format_traceback

__all__ = ["describe", "failure", "refused", "stuck", "success", "unknown"]

log = SafeLog("tidemill.worker")

ERROR_MOST = 2_000
"""Characters that are kept of an error."""


def refused(lease: Lease, reason: str) -> Verdict:
    """The verdict on a job that must not run, or cannot begin."""
    log.error("a job was refused: %s", reason)
    now = wall_time()
    return Verdict(lease.token, Outcome.FAIL, error=reason, started=now, ended=now)


def unknown(lease: Lease, envelope: Envelope) -> Verdict:
    """The verdict on a job whose task this app lacks; the supervisor completes the verdict."""
    schedule = f" of schedule {envelope.planned.schedule!r}" if envelope.planned else ""
    error = f"no worker knows task {envelope.task!r}{schedule}"
    return Verdict(lease.token, Outcome.UNKNOWN, error=error)


def success(run: Run, value: Any) -> Verdict:
    """The verdict on a job whose task returned ``value``."""
    result, now = b"", wall_time()
    if value is not None:
        try:
            result = pack(value)
        except BaseException as error:  # encoding may run the value's own code
            reason = f"the task ended well, but its result cannot be kept: {describe(error)[0]}"
            return _failed(run.lease, run.envelope, Outcome.FAIL, reason, "", run.started)
    return Verdict(run.token, 0, result, 0.0, "", "", run.started, now)


def failure(run: Run, error: BaseException) -> Verdict:
    """The verdict on a job whose task raised, whatever the exception's own code does."""
    try:
        return _failure(run, error)
    except BaseException as inner:
        text = f"{name_of(error)}: its exception cannot be read: {name_of(inner)}"
        return _failed(run.lease, run.envelope, Outcome.RETRY, text, "", run.started)


def _failure(run: Run, error: BaseException) -> Verdict:
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
        return _timed_out(lease, envelope, trace, started)
    if isinstance(error, Fail):
        return _failed(lease, envelope, Outcome.FAIL, text, trace, started)
    if _does_not_fit(error):
        reason = f"the arguments do not fit the task: {text}"
        return _failed(lease, envelope, Outcome.FAIL, reason, "", started)
    delay = error.delay if isinstance(error, Retry) else None
    return _failed(lease, envelope, Outcome.RETRY, text, trace, started, delay)


def stuck(
    lease: Lease, envelope: Envelope, trace: str, started: float, terminated: bool
) -> Verdict:
    """The verdict on a job that could not be interrupted, with the stack it is stuck in."""
    if terminated:
        return _failed(lease, envelope, Outcome.CANCELLED, "terminated", trace, started)
    return _timed_out(lease, envelope, trace, started)


def _timed_out(lease: Lease, envelope: Envelope, trace: str, started: float) -> Verdict:
    """The verdict on a job that ran past its timeout."""
    error = f"JobTimeout: not finished after its timeout of {envelope.timeout:g} s"
    return _failed(lease, envelope, Outcome.RETRY, error, trace, started)


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
    """Log which attempt failed, why, and what follows; the last attempt with its traceback."""
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


def describe(error: BaseException) -> tuple[str, str]:
    """(``Type: message``, traceback) of an exception, whatever its own code does."""
    name = name_of(error)
    try:
        text = str.__str__(str(error))  # of a subclass of str, perhaps, with code of its own
        message = text[:ERROR_MOST]
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
        ("tidemill.worker", "tidemill.client.middleware")
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
        if not name.startswith(("tidemill.worker", "tidemill.client.middleware", "contextvars")):
            return False
        trace = trace.tb_next
    return True
