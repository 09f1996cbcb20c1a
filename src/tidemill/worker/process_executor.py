"""The executor of a worker process: a run has a timeout, a scoreboard row and a supervisor."""

from __future__ import annotations

import collections
import sys
from asyncio import current_task, get_running_loop
from collections.abc import Callable
from threading import get_ident, get_native_id
from typing import Any

from tidemill.client.context import JobContext, Waits, running_job
from tidemill.client.log_attributes import logged_as
from tidemill.client.runtime import Runtime
from tidemill.core.clock import clock
from tidemill.core.job import Note, Verdict
from tidemill.core.scoreboard import Scoreboard
from tidemill.core.stopping import Stopping
from tidemill.worker import verdicts
from tidemill.worker.child_protocol import Setup
from tidemill.worker.execute import Executor
from tidemill.worker.forked_children import end_child, is_child, perform
from tidemill.worker.outbox import Outbox
from tidemill.worker.run import Run
from tidemill.worker.run_log import RunLog
from tidemill.worker.safe_logging import SafeLog
from tidemill.worker.task_signals import TaskSignals
from tidemill.worker.timeouts import Timeouts, cancellation_reason, raise_if_interrupted
from tidemill.worker.waiting_job import WaitingJob

log = SafeLog("tidemill.worker")


class ProcessExecutor(Executor):
    """Runs jobs for threads, the main thread and the event loop of one worker process."""

    def __init__(
        self,
        mill: Runtime,
        setup: Setup,
        out: Outbox,
        timeouts: Timeouts,
        scoreboard: Scoreboard,
        waits: Waits,
        stopping: Stopping,
        run_log: RunLog,
    ) -> None:
        super().__init__(mill, setup.queues)
        self._out = out
        self._worker = setup.worker
        self._timeouts = timeouts
        self._scoreboard = scoreboard
        self._waits = waits
        self._stopping = stopping
        self._run_log = run_log if run_log.wanted or run_log.slow else None
        # Rows are used in turn: a row is reused only when its last job has long been settled.
        self._rows = collections.deque(range(setup.first_slot + 1, setup.first_slot + setup.share))
        self.success = verdicts.success  # type: ignore[method-assign]

    def use_main_thread(self) -> None:
        """Put back signal handlers: jobs will run in the calling thread, the main thread."""
        self.restore = TaskSignals().put_back  # type: ignore[method-assign]

    def start(self, job: WaitingJob) -> Run:
        """Give a run its context and its deadline, and show the run on the scoreboard."""
        lease, envelope = job.lease, job.envelope
        context = JobContext(
            *(envelope, lease.attempt, lease.token, self._say, self._waits, self._stopping),
            self._worker,
        )
        run = Run(job, context, get_ident(), clock.wall())
        if self._logs_debug:
            self._log_start(run)
        if envelope.timeout:
            run.deadline = clock.machine() + envelope.timeout
        if job.task.is_async:
            run.asyncio_task, run.loop = current_task(), get_running_loop()
            self._timeouts.begin(run)
        run.row = self._rows.popleft()
        self._scoreboard.start(run.row, run.token, get_native_id(), run.started, run.deadline)
        return run

    def call(self, run: Run, call: Callable[[], Any]) -> Any:
        """Call a sync task; a timeout may interrupt it from here to its return."""
        return self._timeouts.guarded(run, _call_sync, run.context, call)

    async def call_async(self, run: Run, call: Callable[[], Any]) -> Any:
        """Await an async task; a timeout may cancel it from here to its return."""
        try:
            running_job.set(run.context)
            return raise_if_interrupted(run, await call())
        finally:
            if is_child():
                end_child(sys.exc_info()[1])

    call_function = staticmethod(perform)
    """Ends a child that the task forks: the child must not return into the middleware."""

    def end_forked_child(self, error: BaseException) -> None:
        """In a child that the task has forked, end the child: an exception has left its task."""
        if is_child():
            end_child(error)

    def failure(self, run: Run, error: BaseException) -> Verdict:
        """The verdict on a task that raised an error, was interrupted, or could not be called."""
        if run.asyncio_task is not None:
            error = cancellation_reason(run, error)
        return verdicts.failure(run, error)

    def report(self, run: Run, verdict: Verdict) -> None:
        """Clear the timeout and send the verdict, unless the job was given up as stuck."""
        if self._timeouts.finished(run):
            self._out.conclude(verdict, run.lease, run.envelope)
            if self._run_log is not None:
                self._run_log.ended(run, verdict)
        self._rows.append(run.row)

    @staticmethod
    def _log_start(run: Run) -> None:
        envelope, attempt = run.envelope, run.lease.attempt
        with logged_as(run.context):
            line = "%s[%s] started (queue %s, attempt %d)"
            log.debug(line, envelope.task, envelope.id, envelope.queue, attempt)

    def _say(self, note: Note) -> None:
        """Send progress of a job, or a line of its log."""
        self._out.notes.append(note)
        self._out.ring()


def _call_sync(context: JobContext, call: Callable[[], Any]) -> Any:
    running_job.set(context)
    try:
        return call()
    finally:
        if is_child():
            end_child(sys.exc_info()[1])
