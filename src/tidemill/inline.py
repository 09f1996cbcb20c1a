"""``sync=True``: the call is made at once, in the caller, and stores nothing. For tests and debugging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidemill.codec import pack, unpack
from tidemill.context import JobContext, running_job
from tidemill.handle import Job
from tidemill.job import Attempt, Outcome, Placed, Record, State
from tidemill.middleware import compose
from tidemill.task import Call, Task, import_task, run_here

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["run_inline"]


def run_inline(mill: Tidemill, call: Call[Any]) -> Job[Any]:
    """Run a call through the same codec and middleware as a worker would; raises what it raises."""
    envelope = mill.envelope(call)
    task = mill.tasks.get(call.task) or Task(mill, import_task(call.task), call.task, call.options)
    args, kwargs = unpack(envelope.body) if not mill.pickles else (list(call.args), dict(call.kwargs))
    args, kwargs = task.bind(args, kwargs)
    context = JobContext(envelope, attempt=1)
    token = running_job.set(context)
    try:
        value = compose(mill.middleware, lambda: run_here(task.function, args, kwargs), context)
    finally:
        running_job.reset(token)
    job: Job[Any] = Job(mill, envelope.id, Placed.CREATED)
    now = envelope.created
    job._record = Record(
        envelope=envelope,
        state=State.SUCCEEDED,
        seq=0,
        rank=envelope.rank,
        attempt=1,
        finished=now,
        result=pack(value) if value is not None else b"",
        attempts=[Attempt(1, "inline", now, now, now, Outcome.SUCCESS)],
    )
    return job
