"""Inline mode (``sync=True``): a call runs at once, in the caller, without a store.

The app keeps the records of the last jobs (:mod:`tidemill.client.inline_jobs`).

A composition runs one call after the other. An exception ends the composition and is raised in the
caller after the failure hooks. Members of a group do not stop each other.
"""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.brokers.contract.inspection import GROUPS
from tidemill.client.compositions import MEMBER_COUNT, member_id
from tidemill.client.context import JobContext
from tidemill.client.job_handle import Job
from tidemill.client.task import HOOKS, Call, Ended, import_task, make_task
from tidemill.core.clock import clock
from tidemill.core.codec import pack, unpack
from tidemill.core.envelope import Envelope, Ref
from tidemill.core.job import (
    GROUP,
    Attempt,
    Lease,
    Note,
    Outcome,
    Placed,
    Record,
    RunOn,
    State,
    Verdict,
    whole_progress,
)
from tidemill.core.retry import Fail, Skip
from tidemill.worker.event_loop import run_awaitable
from tidemill.worker.execute import Executor, Run, WaitingJob, run_sync
from tidemill.worker.verdicts import describe
from tidemill.workflows.compose import Chain, Flow, FlowNode, Node, as_node, check_with_first
from tidemill.workflows.enqueue import id_of
from tidemill.workflows.handles import JobChain, JobGroup
from tidemill.workflows.planner import step_id

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

log = logging.getLogger("tidemill")

_PLACES = (Ref(()),)  # stands in the body for the first argument, which passes through no codec


def run_inline(runtime: Runtime, call: Call[Any], *, job_id: str = "", first: Any = ()) -> Job[Any]:
    """Run a call with the codec and the middleware of a worker; raises the call's exception.

    ``first`` are arguments that precede the arguments of the call and pass through no codec.
    """
    task = runtime.tasks.get(call.task)
    if first:
        if task is not None:
            check_with_first(task, call, (*first, *call.args), call.kwargs)
        # The call now has all arguments.
        call = Call(call.task, call.args, call.kwargs, call.options)
    args = (*_PLACES[: len(first)], *call.args)
    sent = Call[Any](call.task, args, call.kwargs, call.options, call.missing)
    envelope = runtime.envelope(sent, job_id)
    if task is None:
        task = make_task(runtime, import_task(call.task), call.task, call.options)
    executor = InlineExecutor(runtime, call, first)
    lease = Lease(0, 1, envelope.rank, 0, 0, 0.0, 0.0, 0.0, b"")
    steps = executor.execute(WaitingJob(0, envelope.rank, 0, 0, lease, envelope, task))
    if task.is_async:
        run_awaitable(steps, runtime.run_coroutine)
    else:
        run_sync(steps)
    return executor.job(envelope)


class InlineExecutor(Executor):
    """Runs one call in the caller, with no timeout and no retry."""

    def __init__(self, runtime: Runtime, call: Call[Any], first: Sequence[Any]) -> None:
        super().__init__(runtime)
        self.run_coroutine = runtime.run_coroutine
        self._called = call
        self._first = first
        self._value: Any = None
        self._error: BaseException | None = None
        self._notes: list[Note] = []
        self._started = 0.0

    def start(self, job: WaitingJob) -> Run:
        context = JobContext(job.envelope, attempt=1, send=self._notes.append, worker="inline")
        self._started = clock.wall()
        return Run(job.token, job.lease, job.envelope, job.task, context, 0, self._started)

    def arguments(self, run: Run) -> tuple[list[Any], dict[str, Any]]:
        if self.runtime.pickles:
            return [*self._first, *self._called.args], dict(self._called.kwargs)
        args, kwargs = unpack(run.envelope.body)
        return run.task.arguments.bind([*self._first, *args[len(self._first) :]], kwargs)

    def bind(self, run: Run, args: list[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
        """Bind the arguments; as in a plain call, arguments that do not fit raise TypeError."""
        try:
            return super().bind(run, args, kwargs)
        except Fail as fail:
            raise fail.__cause__ or fail from None

    def success(self, run: Run, value: Any) -> Verdict:
        self._value = value
        return Verdict(run.token, Outcome.SUCCESS)

    def failure(self, run: Run, error: BaseException) -> Verdict:
        # Ctrl-C: asyncio turns the cancellation into a KeyboardInterrupt
        if isinstance(error, CancelledError):
            raise error
        if isinstance(error, Skip):
            # The job succeeds without a value.
            return super().failure(run, error)
        self._error = error
        return Verdict(run.token, Outcome.FAIL)

    def report(self, run: Run, verdict: Verdict) -> None:
        """Do nothing: :meth:`job` returns the outcome to the caller."""

    def job(self, envelope: Envelope) -> Job[Any]:
        """Keep the job that has run, and return its handle; raises the job's exception."""
        record = self._record(envelope)
        self.runtime.inline_jobs.keep(record)
        if self._error is not None:
            raise self._error
        job: Job[Any] = Job(self.runtime, envelope.id, Placed.CREATED)
        job.remember(record)
        return job

    def _record(self, envelope: Envelope) -> Record:
        state, outcome, error, trace = State.SUCCEEDED, Outcome.SUCCESS, "", ""
        if self._error is not None:
            state, outcome, (error, trace) = State.FAILED, Outcome.FAIL, describe(self._error)
        started, ended = self._started, clock.wall()
        attempt = Attempt(1, "inline", started, started, ended, outcome, error, trace)
        steps = [note for note in self._notes if note.done >= 0]
        return Record(
            envelope=envelope,
            state=state,
            seq=0,
            rank=envelope.rank,
            max_attempts=1,
            attempt=1,
            finished=ended,
            raw_result=pack(self._value) if self._value is not None else b"",
            error=error,
            attempts=[attempt],
            progress=whole_progress(steps[-1].done, steps[-1].total) if steps else None,
            progress_text=steps[-1].text if steps else "",
            log=[(note.time, note.line) for note in self._notes if note.line],
        )


class _Inline:
    """Runs one composition in the caller."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._values: dict[FlowNode, Any] = {}

    def run(self, node: Node, job_id: str, first: tuple[Any, ...] = ()) -> tuple[Any, Any]:
        """The handle and result of a node; ``first`` is the result of the previous step, if any."""
        try:
            handle, value = self._run(node, job_id, first)
        except Exception as error:
            end = Ended(job_id, State.FAILED, error=describe(error)[0], failed=job_id)
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
            job = run_inline(self._runtime, call, job_id=job_id, first=first)
            return job, job.result()
        if isinstance(node, Chain):
            steps = []
            for index, step in enumerate(node.steps):
                handle, value = self.run(step, step_id(node, job_id, index), first)
                steps.append(handle)
                first = (value,)
            return JobChain.done(self._runtime, job_id, steps), first[0]
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
                continue  # a later node of a flow may need the result that is missing now
            try:
                handle, value = self.run(member, member_id(job_id, index), own)
            except Exception as error:
                errors.append(error)
                continue
            handles.append(handle)
            values.append(value)
            if part is not None:
                self._values[part] = value
        self._keep_group(job_id, len(handles) + len(errors), len(errors))
        if errors:
            raise errors[0]
        return JobGroup(self._runtime, job_id, handles), values

    def _keep_group(self, group_id: str, count: int, failures: int) -> None:
        envelope = Envelope(
            id=group_id,
            queue=GROUPS,
            task=GROUP,
            created=clock.wall(),
            headers={MEMBER_COUNT: str(count)},
        )
        state, error = State.SUCCEEDED, ""
        if failures:
            state, error = State.FAILED, f"{failures} of its jobs did not succeed"
        self._runtime.inline_jobs.keep(
            Record(
                envelope=envelope,
                state=state,
                seq=0,
                rank=envelope.rank,
                failures=failures,
                finished=envelope.created,
                error=error,
            )
        )

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
                    run_inline(self._runtime, call, job_id=f"{end.id}.{HOOKS[waits]}", first=(end,))
                except Exception:  # a failed hook does not change the outcome
                    log.exception("hook %s of %s failed", hook, end.id)


def run_composed(runtime: Runtime, node: Node) -> Any:
    """Run a composition; return its handle with the results, or raise the first error."""
    return _Inline(runtime).run(node, id_of(node))[0]
