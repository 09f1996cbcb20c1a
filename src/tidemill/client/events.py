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
from typing import Any, Literal, TypeVar, overload

from tidemill.client.call import Call
from tidemill.client.options import check_headers
from tidemill.core.errors import InvalidOption
from tidemill.core.suggest import hint

Event = Literal["process_start", "process_stop", "enqueue"]
ProcessHandler = Callable[[], Awaitable[None] | None]
EnqueueHandler = Callable[["NewJob"], None]
P = TypeVar("P", bound=ProcessHandler)
E = TypeVar("E", bound=EnqueueHandler)


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


class Events:
    """The part of :class:`tidemill.Tidemill` that calls functions at events."""

    def __init__(self) -> None:
        self.event_handlers: dict[str, list[Callable[..., Any]]] = {
            "process_start": [],
            "process_stop": [],
            "enqueue": [],
        }

    @overload
    def on(self, event: Literal["process_start", "process_stop"], /) -> Callable[[P], P]: ...
    @overload
    def on(self, event: Literal["enqueue"], /) -> Callable[[E], E]: ...
    def on(self, event: Event, /) -> Callable[[Any], Any]:
        """Declare a function that the app calls at an event: ``@mill.on("process_start")``.

        - ``process_start``: in each worker process, after the import of the app and before the
          first job. The function takes no argument and may be async. If it raises, the process
          cannot start, as if the import had failed.
        - ``process_stop``: in each worker process that ends properly, after its last job, in the
          opposite order. The function takes no argument and may be async. An exception is logged.
          A process that is killed calls nothing.
        - ``enqueue``: for each job of this app, before it is stored. The function takes a
          :class:`NewJob`, whose ``headers`` it may change, and is not async. If it raises, nothing
          is stored.

        Raises:
            InvalidOption: there is no such event, or the function does not fit the event.
        """
        if event not in self.event_handlers:
            raise InvalidOption(
                f"there is no event {event!r}; {hint(str(event), self.event_handlers)}"
            )

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            _check(event, function)
            self.event_handlers[event].append(function)
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
