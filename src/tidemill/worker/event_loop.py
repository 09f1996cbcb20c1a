"""The event loop of a worker process, for its async jobs and for the app's start and stop.

One loop runs all async jobs, each as an asyncio task with its own context.

A task can end the loop by ``sys.exit`` in a subtask or a callback. The worker then runs the same
loop again, so that the other jobs go on. When a task has stopped or closed the loop, the worker
process ends (:meth:`Child.give_up`).
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from asyncio import Task as AsyncioTask
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import Context
from threading import get_ident
from typing import TYPE_CHECKING, Any

from tidemill.client.context import running_job
from tidemill.errors import BrokerUnavailable, TidemillError
from tidemill.worker.forked_children import end_child, is_child
from tidemill.worker.safe_logging import SafeLog
from tidemill.worker.verdicts import describe

if TYPE_CHECKING:
    from tidemill.runtime import Runtime
    from tidemill.worker.child import Child
    from tidemill.worker.execute import Run, WaitingJob

log = SafeLog("tidemill.worker")

BLOCKED_AFTER = 1.0  # seconds without an answer after which the loop counts as blocked


def new_runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=asyncio.new_event_loop)


class Loop:
    """The event loop and its thread; both start with the first async job."""

    def __init__(self, child: Child, runner: asyncio.Runner | None = None) -> None:
        self._child = child
        self._runner = runner  # the runner of the async functions for the start, if any
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # ident of the loop's thread
        self._over = False
        self._lock = threading.Lock()
        self._asked = 0.0  # machine time at which the loop was asked to run ``_answer``
        self._answered = True
        # The tasks of jobs that have no verdict yet, by token. The loop has only weak references.
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def launch(self, jobs: list[WaitingJob]) -> None:
        """Start jobs, from any thread."""
        try:
            loop = self.begun()
        except (OSError, RuntimeError) as error:  # no descriptor or no thread is left
            self._child.retire(f"no event loop can be started: {error}", jobs)
            return
        loop.call_soon_threadsafe(self._start, jobs)

    def blocks(self, runs: Iterable[Run], now: float) -> bool:
        """True when all these runs are coroutines, and one coroutine blocks the event loop."""
        on_loop = [run.asyncio_task is not None for run in list(runs)]
        if self._loop is None or self._over or not any(on_loop):
            return False
        if not self._answered:
            return all(on_loop) and now - self._asked > BLOCKED_AFTER
        self._asked, self._answered = now, False
        self._loop.call_soon_threadsafe(self._answer)
        return False

    def _answer(self) -> None:
        self._answered = True

    def begun(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                runner = self._runner or new_runner()
                loop = runner.get_loop()
                try:
                    self._child.start_thread("tidemill-loop", self._serve, runner)
                except BaseException:
                    runner.close()
                    raise
                self._loop = loop
            return self._loop

    def _serve(self, runner: asyncio.Runner) -> None:
        self._thread = get_ident()
        loop = runner.get_loop()
        with runner:  # at the end the runner cancels the remaining tasks and closes the loop
            while not self._over:
                self._run_loop(loop)

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        error: BaseException | None = None
        try:
            loop.run_forever()
        except BaseException as raised:
            error = raised
        if is_child():
            end_child(error)
        if self._over:
            return
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            self._blame(error)
        else:
            self._over = True
            self._child.give_up("a task ended the event loop", error)

    def _blame(self, error: BaseException) -> None:
        """Fail the job whose subtask or callback raised SystemExit or KeyboardInterrupt."""
        context = _job_of(error)
        text = describe(error)[0]
        run = self._child.timeouts.running.get(context.token) if context is not None else None
        if run is None or run.asyncio_task is None:
            log.error("a subtask raised %s; the event loop of its worker process goes on", text)
            return
        run.fault = RuntimeError(f"a subtask or callback of the job raised {text}")
        run.fault.__cause__ = error
        run.asyncio_task.cancel()

    def stop(self) -> None:
        self._over = True
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._loop.stop)
            except RuntimeError:
                pass  # a task closed the loop

    def after_fork_child(self) -> None:
        """Stop the loop in a child that a coroutine has forked: other callbacks must not run."""
        if self._loop is not None and self._thread == get_ident():
            self._loop.stop()
            # Only the loops of asyncio itself have ``_ready``.
            ready = getattr(self._loop, "_ready", None)
            if ready is not None:
                ready.clear()

    def _start(self, jobs: list[WaitingJob]) -> None:
        assert self._loop is not None
        for job in jobs:
            # Not ``create_task``: the app's task factory is for the tasks of the app.
            task = AsyncioTask(self._run(job), loop=self._loop, context=Context())
            self._tasks[job.token] = task
            task.add_done_callback(functools.partial(self._check, job))

    async def _run(self, job: WaitingJob) -> None:
        await self._child.executor.execute(job)
        del self._tasks[job.token]
        self._start(self._child.async_job_ended())

    def _never_began(self, job: WaitingJob) -> None:
        """Free the slot of a job that never began; the loop then starts jobs that get a slot."""
        jobs = self._child.async_job_ended()
        if jobs and self._loop is not None:
            self._loop.call_soon(self._start, jobs)

    def _check(self, job: WaitingJob, task: asyncio.Task[None]) -> None:
        """Handle the end of an asyncio task that has settled no job."""
        # A task that was cancelled before its start gives its job back. Any other end is an error
        # of the worker, which ends the process.
        if self._tasks.pop(job.token, None) is None:
            return
        if task.cancelled():
            self._child.out.returned.append(job.token)
            self._never_began(job)
        else:
            error = task.exception()
            why = describe(error)[0] if error is not None else "its task ended without a verdict"
            self._child.give_up(f"a job could not be settled: {why}")


def _job_of(error: BaseException) -> Any:
    """The job whose callback raised, by the context of the callback; None when unknown."""
    trace = error.__traceback__
    while trace is not None:
        handle = trace.tb_frame.f_locals.get("self")
        if isinstance(handle, asyncio.Handle):
            # Before Python 3.12, asyncio has no public name for the context of a handle.
            public = getattr(handle, "get_context", None)
            context = public() if public else getattr(handle, "_context", None)
            return context.get(running_job) if context is not None else None
        trace = trace.tb_next
    return None


class ProcessEvents:
    """The app's functions at the start and the stop of a worker process: ``mill.on(…)``.

    Async functions run on the event loop that later runs the async jobs, so a connection pool that
    a function opens there serves the jobs. Sync functions run in the main thread. ``runner`` exists
    once an async function has run.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._handlers = runtime.event_handlers
        self.runner: asyncio.Runner | None = None

    def start(self) -> None:
        """Call the functions for the start, in order; a TidemillError has the traceback of one."""
        for function in self._handlers["process_start"]:
            try:
                awaitable = function()
                if inspect.isawaitable(awaitable):
                    self._run(awaitable)
            except BaseException as error:
                _, trace = describe(error)
                kind = BrokerUnavailable if isinstance(error, BrokerUnavailable) else TidemillError
                raise kind(
                    f"{_name(function)}, called at process_start, raised:\n{trace}"
                ) from error

    def _run(self, awaitable: Awaitable[Any]) -> None:
        """Run an awaitable on the loop of the process, which has no thread yet."""
        # The calling thread may have a running loop of its own, so another thread runs the
        # awaitable.
        self.runner = self.runner or new_runner()
        runner = self.runner
        _in_thread("tidemill-start", lambda: runner.run(_await(awaitable)))

    def stop(self, loop: Loop) -> None:
        """Call the functions for the stop, in the opposite order; exceptions are logged."""
        for function in reversed(self._handlers["process_stop"]):
            try:
                awaitable = function()
                if inspect.isawaitable(awaitable):
                    asyncio.run_coroutine_threadsafe(_await(awaitable), loop.begun()).result()
            except BaseException:
                log.exception("%s, called at process_stop, raised", _name(function))


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def run_awaitable(
    awaitable: Awaitable[Any],
    run_coroutine: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run,
) -> Any:
    """Await something from sync code. ``run_coroutine`` runs it where no event loop runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_coroutine(_await(awaitable))
    # A thread cannot run two event loops, so another thread runs the awaitable.
    return _in_thread("tidemill-inline", lambda: asyncio.run(_await(awaitable)))


def _in_thread(name: str, function: Callable[[], Any]) -> Any:
    """Run a function in a thread of its own; Ctrl-C ends the wait, and not the function."""
    # An executor would join its thread, so that Ctrl-C would have to wait for the function.
    context = contextvars.copy_context()
    box: list[tuple[Any, BaseException | None]] = []

    def target() -> None:
        try:
            box.append((context.run(function), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=target, name=name)
    thread.start()
    thread.join()
    value, error = box[0]
    if error is not None:
        raise error
    return value


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
