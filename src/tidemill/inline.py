"""``sync=True``: calls are made at once, in the caller, and stored nowhere. For tests.

A composition is made one call after the other. What raises stops it and is raised in the caller,
after the hooks it was for; members of a group do not stop each other.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from tidemill.clock import wall_time
from tidemill.codec import pack, unpack
from tidemill.compose import Chain, Flow, FlowNode, Node, as_node
from tidemill.context import JobContext, running_job
from tidemill.groups import JobChain, JobGroup
from tidemill.handle import Job
from tidemill.hooks import HOOKS, Ended
from tidemill.inputs import member_id
from tidemill.job import Attempt, Note, Outcome, Placed, Record, State, Waits
from tidemill.middleware import compose
from tidemill.plan import step_id
from tidemill.task import Call, import_task, make_task

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["run_composed", "run_inline"]

log = logging.getLogger("tidemill")


def run_inline(mill: Tidemill, call: Call[Any], *, job_id: str = "", first: Any = ()) -> Job[Any]:
    """Run a call through the same codec and middleware as a worker would; raises what it raises.

    ``first`` are arguments before its own that need no codec.
    """
    task = mill.tasks.get(call.task)
    if first:
        if task is not None:
            task.arguments.check((*first, *call.args), call.kwargs)
        call = Call(call.task, call.args, call.kwargs, call.options)  # it lacks nothing more
    envelope = mill.envelope(call, job_id)
    if task is None:
        task = make_task(mill, import_task(call.task), call.task, call.options)
    function = task.function
    args, kwargs = list(call.args), dict(call.kwargs)
    if not mill.pickles:
        args, kwargs = unpack(envelope.body)
        args, kwargs = task.bind([*first, *args], kwargs)
    else:
        args = [*first, *args]
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


class _Inline:
    """One composition, run in the caller."""

    def __init__(self, mill: Tidemill) -> None:
        self._mill = mill
        self._values: dict[FlowNode, Any] = {}

    def run(self, node: Node, job_id: str, first: tuple[Any, ...] = ()) -> tuple[Any, Any]:
        """(handle, result) of a node; ``first`` is the result before it."""
        try:
            handle, value = self._run(node, job_id, first)
        except Exception as error:
            text = f"{type(error).__qualname__}: {error}"
            end = Ended(job_id, State.FAILED, error=text, failed=job_id)
            self._call_hooks(node, end, (Waits.FAILURE, Waits.ANY))
            raise
        end = Ended(job_id, State.SUCCEEDED, result=value)
        self._call_hooks(node, end, (Waits.SUCCESS, Waits.ANY))
        return handle, value

    def _run(self, node: Node, job_id: str, first: tuple[Any, ...]) -> tuple[Any, Any]:
        if isinstance(node, Call):
            args = tuple(self._filled(value) for value in node.args)
            kwargs = {name: self._filled(value) for name, value in node.kwargs.items()}
            call: Call[Any] = Call(node.task, args, kwargs, node.options, node.lacks)
            job = run_inline(self._mill, call, job_id=job_id, first=first)
            return job, job.result()
        if isinstance(node, Chain):
            steps = []
            for index, step in enumerate(node.steps):
                handle, value = self.run(step, step_id(job_id, index, len(node.steps)), first)
                steps.append(handle)
                first = (value,)
            return JobChain.done(self._mill, job_id, steps), first[0]
        parts = (
            [(part.node, part) for part in node.nodes]
            if isinstance(node, Flow)
            else ((member, None) for member in node.members)
        )
        return self._side_by_side(parts, job_id, first)

    def _side_by_side(
        self, parts: Iterable[tuple[Node, FlowNode | None]], job_id: str, first: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        handles: list[Any] = []
        values: list[Any] = []
        errors: list[Exception] = []
        for index, (member, part) in enumerate(parts):
            own = first if part is None or not part.after else ()
            if errors and part is not None:
                continue  # a flow: something after it may need what there is not
            try:
                handle, value = self.run(member, member_id(job_id, index), own)
            except Exception as error:
                errors.append(error)
                continue
            handles.append(handle)
            values.append(value)
            if part is not None:
                self._values[part] = value
        if errors:
            raise errors[0]
        return JobGroup(self._mill, job_id, handles), values

    def _filled(self, value: Any) -> Any:
        if isinstance(value, FlowNode):
            return self._values[value]
        if type(value) is list:
            return [self._filled(item) for item in value]
        if type(value) is tuple:
            return tuple([self._filled(item) for item in value])
        return value

    def _call_hooks(self, node: Node, end: Ended, when: tuple[Waits, ...]) -> None:
        for waits, hook in node.hooks:
            if waits in when:
                try:
                    call = as_node(hook)
                    assert isinstance(call, Call)
                    run_inline(self._mill, call, job_id=f"{end.id}.{HOOKS[waits]}", first=(end,))
                except Exception:  # it changes nothing
                    log.exception("hook %s of %s failed", hook, end.id)


def run_composed(mill: Tidemill, node: Node, job_id: str) -> Any:
    """Run a composition; the handle, whose results are there. Raises what the first call raises."""
    return _Inline(mill).run(node, job_id)[0]


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
