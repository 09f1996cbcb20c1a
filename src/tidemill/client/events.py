"""Events of an app: a worker process starts or stops, a job is about to be enqueued.

@mill.on("process_start")
def connect(): ...

@mill.on("enqueue")
def tag(job):
    job.headers["request"] = request_id.get()
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from tidemill.client.options import check_headers
from tidemill.client.task import Call
from tidemill.core.suggest import hint
from tidemill.errors import InvalidOption

Event = Literal["process_start", "process_stop", "enqueue"]
ProcessHandler = Callable[[], Awaitable[None] | None]
EnqueueHandler = Callable[["NewJob"], None]


class NewJob:
    """A job that is about to be enqueued, for the handlers of ``enqueue``.

    Attributes:
        task, queue: names.
        args, kwargs: the arguments of the call.
        tags: the tags of the job.
        headers: the headers of the job, which map strings to strings. A handler may change them.
    """

    __slots__ = ("args", "headers", "kwargs", "queue", "tags", "task")

    def __init__(self, call: Call[Any], queue: str, tags: Sequence[str]) -> None:
        self.task = call.task
        self.queue = queue
        self.args = tuple(call.args)
        self.kwargs: Mapping[str, Any] = dict(call.kwargs)
        self.tags = tuple(tags)
        self.headers: dict[str, str] = dict(call.options.headers)


def no_handlers() -> dict[str, list[Callable[..., Any]]]:
    """The events of an app, each without a handler."""
    return {"process_start": [], "process_stop": [], "enqueue": []}


def handler_of(
    handlers: Mapping[str, list[Callable[..., Any]]], event: str
) -> Callable[[Any], Any]:
    """The decorator that adds a handler of an event: see :meth:`tidemill.Tidemill.on`."""
    if event not in handlers:
        raise InvalidOption(f"there is no event {event!r}; {hint(str(event), handlers)}")

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        _check(event, function)
        handlers[event].append(function)
        return function

    return declare


def _check(event: str, function: Callable[..., Any]) -> None:
    takes = (None,) if event == "enqueue" else ()
    try:
        inspect.signature(function, follow_wrapped=False).bind(*takes)
    except TypeError:
        what = "one argument, the new job" if takes else "no argument"
        raise InvalidOption(f"on({event!r}): {function!r} must take {what}") from None
    if takes and inspect.iscoroutinefunction(function):
        raise InvalidOption(
            f"on('enqueue'): {function!r} is async; a function that is not async serves "
            "enqueue and aenqueue alike"
        )


def headers_of(
    handlers: Sequence[EnqueueHandler], call: Call[Any], queue: str, tags: Sequence[str]
) -> dict[str, str]:
    """The headers of a new job, after all handlers of ``enqueue``."""
    job = NewJob(call, queue, tags)
    for handler in handlers:
        handler(job)
    return dict(check_headers(job.headers))
