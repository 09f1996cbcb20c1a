"""The app, its middleware, and a function that passes options on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, Unpack

from tidemill import Job, JobContext, Retries, Task, Tidemill
from tidemill.typing import CallOptions

log = logging.getLogger("shop")
P = ParamSpec("P")
R = TypeVar("R")


def logged(call_next: Callable[[], Any], context: JobContext) -> Any:
    log.info("%s begins, attempt %d", context.task, context.attempt)
    return call_next()


mill = Tidemill(retries=Retries(5, delay=60), timeout=timedelta(minutes=5), middleware=[logged])


def enqueue_later(
    task: Task[P, R], options: CallOptions, *args: P.args, **kwargs: P.kwargs
) -> Job[R]:
    """Enqueue a call with a delay, and with options of the caller."""
    return task.using(delay=0.5).using(**options).enqueue(*args, **kwargs)


def enqueue_soon(task: Task[[], R], **options: Unpack[CallOptions]) -> Job[R]:
    """Enqueue a task without arguments."""
    return task.using(**options).enqueue()
