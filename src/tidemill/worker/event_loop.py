"""Async jobs: one event loop runs them all, each as a task with a context of its own.

The loop belongs to the worker process, but tasks can end it: ``sys.exit`` in a subtask or a
callback, or ``loop.stop()``. The same loop is then run again, so that its other jobs go on. A loop
that cannot run again (it was closed, or its descriptors were) ends the worker process; see
:meth:`LoopHost.give_up`.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from asyncio import Task as AsyncioTask
from collections.abc import Callable, Iterable
from contextvars import Context
from threading import get_ident
from time import monotonic
from typing import Any, Protocol

from tidemill.client.context import running_job
from tidemill.worker.execute import Executor
from tidemill.worker.forked_children import end_child, is_child, isolate_children
from tidemill.worker.run import Run
from tidemill.worker.safe_logging import SafeLog
from tidemill.worker.timeouts import Timeouts
from tidemill.worker.verdicts import describe
from tidemill.worker.waiting_job import WaitingJob

__all__ = ["Loop", "LoopHost"]

log = SafeLog("tidemill.worker")

BLOCKED_AFTER = 1.0
"""Seconds without a sign of life after which the loop counts as held up."""


class LoopHost(Protocol):
    """The parts of a worker process that its event loop uses."""

    @property
    def executor(self) -> Executor:
        """Runs the jobs."""
        ...

    @property
    def timeouts(self) -> Timeouts:
        """Knows the running jobs."""
        ...

    def start_thread(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start a thread that belongs to the process."""
        ...

    def async_job_ended(self) -> list[WaitingJob]:
        """Free the slot of an async job; returns the async jobs to start in free slots."""
        ...

    def give_back(self, token: int) -> None:
        """Return a job to the supervisor that was not started."""
        ...

    def refuse(self, job: WaitingJob, reason: str) -> None:
        """Fail a job that cannot begin."""
        ...

    def retire(self, why: str, jobs: Iterable[WaitingJob] = ()) -> None:
        """Start no more jobs, give back these that have a slot, and finish the running ones."""
        ...

    def give_up(self, why: str, error: BaseException | None = None) -> None:
        """End the process at once: it cannot go on."""
        ...


class Loop:
    """The event loop and its thread; both begin with the first async job."""

    def __init__(self, host: LoopHost) -> None:
        self._host = host
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # ident
        self._over = False
        self.was_stopped = False  # by a task
        self._lock = threading.Lock()
        self._asked = 0.0  # machine time at which the loop was asked for a sign of life
        self._answered = True
        self._open: set[int] = set()  # tokens of jobs that have no verdict yet
        self._tasks: set[asyncio.Task[None]] = set()  # the loop keeps only weak references
        isolate_children(self)

    def launch(self, jobs: list[WaitingJob]) -> None:
        """Start jobs, from any thread."""
        if not jobs:
            return
        try:
            loop = self._begun()
        except Exception as error:  # no thread, no descriptor, or a module that a task has changed
            self._host.retire(f"no event loop can be started: {error}", jobs)
            return
        try:
            loop.call_soon_threadsafe(self._start, jobs)
        except RuntimeError as error:
            self._host.give_up(f"the event loop cannot be used: {error}")

    def blocks(self, runs: Iterable[Run], now: float) -> bool:
        """True when all these runs are coroutines, and a task holds up the loop they are on.

        A loop that a task has closed ends the process: none of its coroutines can go on.
        """
        on_loop = [run.asyncio_task is not None for run in list(runs)]
        if self._loop is None or self._over or not any(on_loop):
            return False
        # A thread may close a loop that is just beginning to run: then only its pipe is gone.
        if self.was_stopped and getattr(self._loop, "_csock", self._loop) is None:
            self._host.give_up("a task closed the event loop")
        if not self._answered:
            return all(on_loop) and now - self._asked > BLOCKED_AFTER
        self._asked, self._answered = now, False
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError as error:
            self._host.give_up(f"the event loop cannot be used: {error}")
        return False

    def _answer(self) -> None:
        self._answered = True

    def _begun(self) -> asyncio.AbstractEventLoop:
        """The loop, begun now at the latest."""
        with self._lock:
            if self._loop is None:
                runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
                loop = runner.get_loop()
                loop.time = monotonic  # type: ignore[method-assign] # a task may replace the module's
                try:
                    self._host.start_thread("tidemill-loop", self._serve, runner)
                except BaseException:
                    runner.close()
                    raise
                self._loop = loop
            return self._loop

    # -- the loop's thread ----------------------------------------------------------------------

    def _serve(self, runner: asyncio.Runner) -> None:
        self._thread = get_ident()
        loop = runner.get_loop()
        with runner:  # at its end it cancels what is left and closes the loop
            while self._run_loop(loop):
                pass

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Run the loop until something ends it; True when it is to be run again."""
        reached: list[bool] = []
        error: BaseException | None = None
        try:
            loop.call_soon(reached.append, True)
            loop.run_forever()
        except BaseException as raised:
            error = raised
        if is_child():
            end_child(error)
        if self._over:
            return False
        self.was_stopped = True
        if error is None:
            log.warning("a task stopped the event loop of its worker process; the loop goes on")
        elif isinstance(error, (SystemExit, KeyboardInterrupt)):
            self._blame(error)
        elif not reached:  # the loop did not even come to its first callback
            self._host.give_up(f"the event loop cannot go on: {describe(error)[0]}")
            return False
        return True

    def _blame(self, error: BaseException) -> None:
        """Fail the job whose subtask or callback raised what would end a program."""
        context = _job_of(error)
        text = describe(error)[0]
        run = self._host.timeouts.running.get(context.token) if context is not None else None
        if run is None or run.asyncio_task is None:
            log.error("a subtask raised %s; the event loop of its worker process goes on", text)
            return
        run.fault = RuntimeError(f"a subtask or callback of the job raised {text}")
        run.fault.__cause__ = error
        run.asyncio_task.cancel()

    def stop(self) -> None:
        """End the loop, if it ever began."""
        self._over = True
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._loop.stop)
            except RuntimeError:
                pass  # a task closed it

    def after_fork_child(self) -> None:
        """A coroutine has forked: the child runs none of what else waits in the loop."""
        if self._loop is not None and self._thread == get_ident():
            self._loop.stop()
            ready = getattr(self._loop, "_ready", None)  # of asyncio's own loops
            if ready is not None:
                ready.clear()

    # -- jobs -----------------------------------------------------------------------------------

    def _start(self, jobs: list[WaitingJob]) -> None:
        assert self._loop is not None
        for job in jobs:
            self._open.add(job.token)
            coroutine = self._run(job)
            try:
                # Not by create_task: a task may have set a task factory that raises.
                task = AsyncioTask(coroutine, loop=self._loop, context=Context())
            except BaseException as error:
                coroutine.close()
                self._host.refuse(job, f"its task cannot be made: {describe(error)[0]}")
                self._never_began(job)
            else:
                self._tasks.add(task)
                task.add_done_callback(functools.partial(self._check, job))

    async def _run(self, job: WaitingJob) -> None:
        await self._host.executor.execute(job)
        self._open.discard(job.token)
        self._start(self._host.async_job_ended())

    def _never_began(self, job: WaitingJob) -> None:
        """Free the slot of a job that never began, and soon start the jobs that get a slot."""
        self._open.discard(job.token)
        jobs = self._host.async_job_ended()
        if jobs and self._loop is not None:
            self._loop.call_soon(self._start, jobs)

    def _check(self, job: WaitingJob, task: asyncio.Task[None]) -> None:
        """Note the end of a task, which has settled its job unless cancelled before its start."""
        self._tasks.discard(task)
        if job.token not in self._open:
            return
        if task.cancelled():
            self._host.give_back(job.token)
            self._never_began(job)
        else:
            error = task.exception()
            why = describe(error)[0] if error is not None else "its task ended without a verdict"
            self._host.give_up(f"a job could not be settled: {why}")


def _job_of(error: BaseException) -> Any:
    """The job in whose context the loop called what raised the error; None when nobody knows."""
    trace = error.__traceback__
    while trace is not None:
        handle = trace.tb_frame.f_locals.get("self")
        if isinstance(handle, asyncio.Handle):
            # asyncio has no public name for the context of a handle.
            return handle._context.get(running_job)  # type: ignore[attr-defined]
        trace = trace.tb_next
    return None
