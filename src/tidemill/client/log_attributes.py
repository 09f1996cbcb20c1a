"""The attributes of log records that name the running job.

A factory of records sets the attributes, so the records of the app and of libraries have them, too.
:mod:`logging` raises a KeyError for an ``extra`` that has the name of an attribute. So the names
have a prefix, and a user's ``extra={"task": …}`` works.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from tidemill.client.context import JobContext, running_job
from tidemill.core.envelope import Envelope

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
        record.tidemill_task = job.task if job else ""
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
    return f"{envelope.task}[{envelope.id}]"


@contextlib.contextmanager
def logged_as(context: JobContext) -> Iterator[None]:
    """Make the log records of this block name a job, even if the job has ended."""
    token = running_job.set(context)
    try:
        yield
    finally:
        running_job.reset(token)
