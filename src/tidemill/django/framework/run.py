"""Run a task of Django's framework as a job: its context, its signals, its JSON.

``task_started`` is sent at the start of each attempt. ``task_finished`` is sent once for a job, at
the end of its last attempt, before this end is stored. Both are sent in the worker process. A job
that ends in another way sends no signal. Examples are a killed worker, a cancel and an expiry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tidemill.client.context import JobContext, this_job
from tidemill.core.clock import clock
from tidemill.core.retry import Fail, JobTerminated, Skip, Snooze, WorkerStopping
from tidemill.django.framework import Framework
from tidemill.django.framework.results import ALIAS, end_failed, moment_of, new_result, result_of
from tidemill.errors import JobCancelled, TidemillError


def runner(framework: Framework, task: Any) -> Callable[..., Any]:
    """The function of the job: it takes JSON, calls the task, and returns JSON."""
    func = task.func
    run: Callable[..., Any]
    if inspect.iscoroutinefunction(func):

        async def run_async(*args: Any, **kwargs: Any) -> Any:
            attempt = _Attempt(framework, task, args, kwargs)
            await attempt.asay(framework.signals.task_started)
            try:
                value = framework.normalize_json(await func(*attempt.args, **kwargs))
            except BaseException as error:
                if attempt.failed(error):
                    await attempt.asay(framework.signals.task_finished)
                raise
            attempt.succeeded(value)
            await attempt.asay(framework.signals.task_finished)
            return value

        run = run_async
    else:

        def run_sync(*args: Any, **kwargs: Any) -> Any:
            attempt = _Attempt(framework, task, args, kwargs)
            attempt.say(framework.signals.task_started)
            try:
                value = framework.normalize_json(func(*attempt.args, **kwargs))
            except BaseException as error:
                if attempt.failed(error):
                    attempt.say(framework.signals.task_finished)
                raise
            attempt.succeeded(value)
            attempt.say(framework.signals.task_finished)
            return value

        run = run_sync
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(run, name, getattr(func, name))
    return run


class _Attempt:
    """One attempt, and the result that the context and the signals show."""

    def __init__(self, framework: Framework, task: Any, args: Any, kwargs: Any) -> None:
        self._framework = framework
        self._job = this_job()
        self._alias = self._job.headers.get(ALIAS, task.backend)
        self._backend = framework.backends[self._alias]
        self._result = self._running(task, args, kwargs)
        context = framework.base.TaskContext(task_result=self._result)
        self.args = (context, *args) if task.takes_context else args

    def _running(self, task: Any, args: Any, kwargs: Any) -> Any:
        """The result of the running job. From the second attempt on, this reads the store."""
        job, now = self._job, moment_of(clock.wall())
        result = new_result(
            self._framework,
            task,
            id=job.id,
            status=self._framework.base.TaskResultStatus.RUNNING,
            enqueued_at=moment_of(job.created.timestamp()),
            started_at=now,
            last_attempted_at=now,
            args=list(args),
            kwargs=kwargs,
            backend=self._alias,
            worker_ids=[job.worker] * job.attempt,
        )
        if job.attempt > 1:
            self._add_history(result)
        return result

    def _add_history(self, result: Any) -> None:
        try:
            record = self._backend.mill.runtime.job_store.get(self._job.id)
        except TidemillError:
            return  # the store cannot be read, and the task runs without the earlier attempts
        if record is not None:
            known = result_of(self._framework, result.task, record)
            for name in ("started_at", "errors"):
                object.__setattr__(result, name, getattr(known, name))
            earlier = [attempt.worker for attempt in record.attempts]
            object.__setattr__(result, "worker_ids", [*earlier, self._job.worker])

    def succeeded(self, value: Any) -> None:
        status = self._framework.base.TaskResultStatus.SUCCESSFUL
        object.__setattr__(self._result, "status", status)
        object.__setattr__(self._result, "finished_at", moment_of(clock.wall()))
        object.__setattr__(self._result, "_return_value", value)

    def failed(self, error: BaseException) -> bool:
        """Set the end of the job in the result; False when this error does not end the job."""
        if isinstance(error, Skip):
            self.succeeded(None)
            return True
        if not _is_last(self._backend.declared(self._result.task).task, self._job, error):
            return False
        end_failed(self._framework, self._result, error)
        return True

    def say(self, signal: Any) -> None:
        """Send a signal. An error of a receiver is logged, and does not fail the job."""
        signal.send_robust(sender=type(self._backend), task_result=self._result)

    async def asay(self, signal: Any) -> None:
        await signal.asend_robust(sender=type(self._backend), task_result=self._result)


def _is_last(task: Any, job: JobContext, error: BaseException) -> bool:
    """True when the job ends with this error: no attempt is left, or the error is not retried."""
    if isinstance(error, Snooze) or (isinstance(error, WorkerStopping) and job.stopping):
        return False
    if isinstance(error, (Fail, JobTerminated)):
        return True
    if isinstance(error, JobCancelled) and job.cancelled:
        return True
    rule = task.options.retry_rule
    if rule is not None and rule.refusal(error):
        return True
    return bool(job.max_attempts) and job.attempt >= job.max_attempts
