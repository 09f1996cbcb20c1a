"""``sync=True``: calls are made at once, in the caller, and stored nowhere. For tests."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tidemill.clock import wall_time
from tidemill.codec import pack, unpack
from tidemill.context import JobContext, running_job
from tidemill.handle import Job
from tidemill.job import Attempt, Note, Outcome, Placed, Record, State
from tidemill.middleware import compose
from tidemill.task import Call, import_task, make_task

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["run_inline"]


def run_inline(mill: Tidemill, call: Call[Any]) -> Job[Any]:
    """Run a call through the same codec and middleware as a worker would; raises what it raises."""
    envelope = mill.envelope(call)
    task = mill.tasks.get(call.task)
    if task is None:
        task = make_task(mill, import_task(call.task), call.task, call.options)
    function = task.function
    args, kwargs = list(call.args), dict(call.kwargs)
    if not mill.pickles:
        args, kwargs = task.bind(*unpack(envelope.body))
    notes: list[Note] = []
    context = JobContext(envelope, attempt=1, say=notes.append)

    def perform() -> Any:
        running_job.set(context)
        value = compose(mill.middleware, lambda: function(*args, **kwargs), context)
        return _run_awaitable(value) if inspect.isawaitable(value) else value

    value = contextvars.copy_context().run(perform)
    job: Job[Any] = Job(mill, envelope.id, Placed.CREATED)
    started, ended = envelope.created, wall_time()
    steps = [note for note in notes if note.done >= 0]
    job.remember(
        Record(
            envelope=envelope,
            state=State.SUCCEEDED,
            seq=0,
            rank=envelope.rank,
            attempt=1,
            finished=ended,
            result=pack(value) if value is not None else b"",
            attempts=[Attempt(1, "inline", started, started, ended, Outcome.SUCCESS)],
            progress=(steps[-1].done, steps[-1].total) if steps else None,
            log=[(note.time, note.line) for note in notes if note.line],
        )
    )
    return job


def _run_awaitable(awaitable: Awaitable[Any]) -> Any:
    """The result of an async task; in an event loop of its own."""

    async def run() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    # A loop runs in this thread already, and cannot run another: the caller waits for a thread.
    return _in_thread(lambda: asyncio.run(run()))


def _in_thread(function: Callable[[], Any]) -> Any:
    context = contextvars.copy_context()
    box: list[tuple[Any, BaseException | None]] = []

    def target() -> None:
        try:
            box.append((context.run(function), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=target, name="tidemill-inline")
    thread.start()
    thread.join()
    value, error = box[0]
    if error is not None:
        raise error
    return value
