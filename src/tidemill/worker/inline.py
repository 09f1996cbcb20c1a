"""Inline mode (``sync=True``): a call runs at once, in the caller, and is stored nowhere.

A composition runs one call after the other. An exception ends the composition and is raised in the
caller after the failure hooks. Members of a group do not stop each other.
"""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tidemill.client.call import Call
from tidemill.client.callbacks import HOOKS, Ended
from tidemill.client.context import JobContext
from tidemill.client.job_handle import Job
from tidemill.client.results import member_id
from tidemill.client.runtime import Runtime
from tidemill.client.task import import_task, make_task
from tidemill.core.clock import wall_time
from tidemill.core.codec import pack, unpack
from tidemill.core.job import (
    Attempt,
    Envelope,
    Lease,
    Note,
    Outcome,
    Placed,
    Record,
    RunOn,
    State,
    Verdict,
)
from tidemill.core.retry import Fail
from tidemill.worker.execute import Executor, run_sync
from tidemill.worker.run import Run
from tidemill.worker.run_awaitable import run_awaitable
from tidemill.worker.waiting_job import WaitingJob
from tidemill.workflows.compose import Chain, Flow, FlowNode, Node, as_node
from tidemill.workflows.enqueue import id_of
from tidemill.workflows.handles import JobChain, JobGroup
from tidemill.workflows.planner import step_id

__all__ = ["run_composed", "run_inline"]

log = logging.getLogger("tidemill")


def run_inline(mill: Runtime, call: Call[Any], *, job_id: str = "", first: Any = ()) -> Job[Any]:
    """Run a call with the codec and the middleware of a worker; raises what the call raises.

    ``first`` are arguments before the call's own. They pass through no codec.
    """
    task = mill.tasks.get(call.task)
    if first:
        if task is not None:
            task.arguments.check((*first, *call.args), call.kwargs)
        call = Call(call.task, call.args, call.kwargs, call.options)  # it lacks nothing more
    envelope = mill.envelope(call, job_id)
    if task is None:
        task = make_task(mill, import_task(call.task), call.task, call.options)
    executor = InlineExecutor(mill, call, first)
    lease = Lease(0, 1, envelope.rank, 0, 0, 0.0, 0.0, 0.0, b"")
    steps = executor.execute(WaitingJob(0, envelope.rank, 0, 0, lease, envelope, task))
    if task.is_async:
        run_awaitable(steps)
    else:
        run_sync(steps)
    return executor.job(envelope)


class InlineExecutor(Executor):
    """Runs one call in the caller, with no timeout and no retry."""

    def __init__(self, mill: Runtime, call: Call[Any], first: Sequence[Any]) -> None:
        super().__init__(mill)
        self._called = call
        self._first = first
        self._value: Any = None
        self._error: BaseException | None = None
        self._notes: list[Note] = []

    def start(self, job: WaitingJob) -> Run:
        """Give the run its context, which keeps the notes of the job."""
        context = JobContext(job.envelope, attempt=1, send=self._notes.append)
        return Run(job, context, 0, wall_time())

    def arguments(self, run: Run) -> tuple[list[Any], dict[str, Any]]:
        """Pass the arguments through the codec, unless they are pickled."""
        if self.mill.pickles:
            return [*self._first, *self._called.args], dict(self._called.kwargs)
        args, kwargs = unpack(run.envelope.body)
        return run.task.bind([*self._first, *args], kwargs)

    def bind(self, run: Run, args: list[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
        """Bind the arguments; raises the TypeError of a plain call when they do not fit."""
        try:
            return super().bind(run, args, kwargs)
        except Fail as fail:
            raise fail.__cause__ or fail from None

    def success(self, run: Run, value: Any) -> Verdict:
        """Keep the result for the job handle."""
        self._value = value
        return Verdict(run.token, Outcome.SUCCESS)

    def failure(self, run: Run, error: BaseException) -> Verdict:
        """Keep the exception for the caller."""
        if isinstance(error, CancelledError):  # the event loop turns it into KeyboardInterrupt
            raise error
        self._error = error
        return Verdict(run.token, Outcome.FAIL)

    def report(self, run: Run, verdict: Verdict) -> None:
        """Report to nobody: the caller asks for :meth:`job`."""

    def job(self, envelope: Envelope) -> Job[Any]:
        """The handle of the job that has run, with its result; raises what the job raised."""
        if self._error is not None:
            raise self._error
        job: Job[Any] = Job(self.mill, envelope.id, Placed.CREATED)
        started, ended = envelope.created, wall_time()
        steps = [note for note in self._notes if note.done >= 0]
        job.remember(
            Record(
                envelope=envelope,
                state=State.SUCCEEDED,
                seq=0,
                rank=envelope.rank,
                attempt=1,
                finished=ended,
                result=pack(self._value) if self._value is not None else b"",
                attempts=[Attempt(1, "inline", started, started, ended, Outcome.SUCCESS)],
                progress=(steps[-1].done, steps[-1].total) if steps else None,
                log=[(note.time, note.line) for note in self._notes if note.line],
            )
        )
        return job


class _Inline:
    """Runs one composition in the caller."""

    def __init__(self, mill: Runtime) -> None:
        self._mill = mill
        self._values: dict[FlowNode, Any] = {}

    def run(self, node: Node, job_id: str, first: tuple[Any, ...] = ()) -> tuple[Any, Any]:
        """(handle, result) of a node; ``first`` is the result before it."""
        try:
            handle, value = self._run(node, job_id, first)
        except Exception as error:
            text = f"{type(error).__qualname__}: {error}"
            end = Ended(job_id, State.FAILED, error=text, failed=job_id)
            self._call_hooks(node, end, (RunOn.FAILURE, RunOn.ANY))
            raise
        end = Ended(job_id, State.SUCCEEDED, result=value)
        self._call_hooks(node, end, (RunOn.SUCCESS, RunOn.ANY))
        return handle, value

    def _run(self, node: Node, job_id: str, first: tuple[Any, ...]) -> tuple[Any, Any]:
        if isinstance(node, Call):
            args = tuple(self._filled(value) for value in node.args)
            kwargs = {name: self._filled(value) for name, value in node.kwargs.items()}
            call: Call[Any] = Call(node.task, args, kwargs, node.options, node.missing)
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

    def _call_hooks(self, node: Node, end: Ended, when: tuple[RunOn, ...]) -> None:
        for waits, hook in node.hooks:
            if waits in when:
                try:
                    call = as_node(hook)
                    assert isinstance(call, Call)
                    run_inline(self._mill, call, job_id=f"{end.id}.{HOOKS[waits]}", first=(end,))
                except Exception:  # it changes nothing
                    log.exception("hook %s of %s failed", hook, end.id)


def run_composed(mill: Runtime, node: Node) -> Any:
    """Run a composition; the handle, whose results are there. Raises what the first call raises."""
    return _Inline(mill).run(node, id_of(node))[0]
