"""Results of Django's framework, made from the records of jobs.

The framework has four states, tidemill has eight:

    waiting, scheduled (also for a retry), ready    READY
    running                                         RUNNING
    succeeded                                       SUCCESSFUL
    failed, cancelled, expired                      FAILED; the last of ``errors`` names the state

Each attempt has one entry in ``worker_ids``, and each failed attempt one in ``errors``.
"""

from __future__ import annotations

import builtins
import datetime as dt
import re
import traceback
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.core.exceptions import SuspiciousOperation
from django.utils.module_loading import import_string

import tidemill
from tidemill.core.clock import clock
from tidemill.core.codec import unpack, unpack_pickle
from tidemill.core.envelope import Envelope, priority_of
from tidemill.core.job import Attempt, Outcome, Record, State
from tidemill.django.framework import Framework

ALIAS = "django-tasks"  # the header of a job that names the alias of its backend
_READY = {State.WAITING, State.SCHEDULED, State.READY}
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?::|$)")
_ENDS = {
    State.CANCELLED: "tidemill.errors.JobCancelled",
    State.EXPIRED: "tidemill.errors.JobExpired",
    State.FAILED: "tidemill.errors.JobFailed",
}


def moment_of(seconds: float) -> dt.datetime | None:
    """A time as a datetime: in UTC with ``USE_TZ``, else local; None for an unknown time."""
    if not seconds:
        return None
    return dt.datetime.fromtimestamp(seconds, dt.UTC if settings.USE_TZ else None)


def arguments_of(envelope: Envelope) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = (unpack_pickle if envelope.pickled else unpack)(envelope.body)
    return args, kwargs


def found_task(framework: Framework, record: Record, func: Callable[..., Any] | None) -> Any:
    """The task of a job, with its options. Raises ImportError or SuspiciousOperation."""
    envelope = record.envelope
    task = import_string(envelope.task)
    if not isinstance(task, framework.base.Task):
        raise SuspiciousOperation(f"Task {envelope.id} does not point to a Task ({envelope.task})")
    return task.using(
        priority=int(priority_of(record.rank)),
        queue_name=envelope.queue,
        run_after=moment_of(envelope.at),
        backend=envelope.headers[ALIAS],
    )


def new_result(framework: Framework, task: Any, **known: Any) -> Any:
    """A result of the framework with these attributes; the others are empty."""
    empty = dict.fromkeys(("started_at", "finished_at", "last_attempted_at"))
    return framework.base.TaskResult(
        task=task, **{**empty, "errors": [], "worker_ids": [], **known}
    )


def result_of(framework: Framework, task: Any, record: Record) -> Any:
    envelope = record.envelope
    args, kwargs = arguments_of(envelope)
    attempts = record.attempts
    first = attempts[0].started or attempts[0].leased if attempts else 0.0
    last = attempts[-1].started or attempts[-1].leased if attempts else 0.0
    workers = [attempt.worker for attempt in attempts]
    if record.state is State.RUNNING:
        first, last = first or record.leased, record.leased or last
        workers.append(record.worker)
    result = new_result(
        framework,
        task,
        id=envelope.id,
        status=_status(framework, record.state),
        enqueued_at=moment_of(envelope.created),
        started_at=moment_of(first),
        finished_at=moment_of(record.finished) if record.state.finished else None,
        last_attempted_at=moment_of(last),
        args=args,
        kwargs=kwargs,
        backend=envelope.headers[ALIAS],
        errors=_errors(framework, record),
        worker_ids=workers,
    )
    if record.state is State.SUCCEEDED:
        object.__setattr__(result, "_return_value", record.result)
    return result


def end_failed(framework: Framework, result: Any, error: BaseException) -> None:
    kind, base = type(error), framework.base
    trace = "".join(traceback.format_exception(error))
    path = f"{kind.__module__}.{kind.__qualname__}"
    result.errors.append(base.TaskError(exception_class_path=path, traceback=trace))
    object.__setattr__(result, "status", base.TaskResultStatus.FAILED)
    object.__setattr__(result, "finished_at", moment_of(clock.wall()))


def _status(framework: Framework, state: State) -> Any:
    status = framework.base.TaskResultStatus
    if state in _READY:
        return status.READY
    if state is State.RUNNING:
        return status.RUNNING
    return status.SUCCESSFUL if state is State.SUCCEEDED else status.FAILED


def _errors(framework: Framework, record: Record) -> list[Any]:
    make = framework.base.TaskError
    errors = [
        make(
            exception_class_path=_path(attempt.error), traceback=attempt.traceback or attempt.error
        )
        for attempt in record.attempts
        if attempt.outcome != Outcome.SUCCESS and attempt.error
    ]
    if record.state in _ENDS and not _told(record):
        path = _ENDS[record.state]
        errors.append(make(exception_class_path=path, traceback=record.error))
    return errors


def _told(record: Record) -> bool:
    """True when the job failed and its last attempt has the error."""
    last: Attempt | None = record.attempts[-1] if record.attempts else None
    return record.state is State.FAILED and last is not None and bool(last.error)


def _path(error: str) -> str:
    """The dotted path of the exception in an error such as ``shop.errors.Late: message``."""
    found = _EXCEPTION.match(error)
    name = found[1] if found else ""
    if "." in name:
        return name
    if isinstance(getattr(builtins, name, None), type):
        return f"builtins.{name}"
    return f"tidemill.{name}" if name in tidemill.__all__ else _ENDS[State.FAILED]
