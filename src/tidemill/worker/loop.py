"""Async jobs: one event loop runs them all, each as a task with a context of its own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import TYPE_CHECKING, Any

from tidemill.clock import wall_time
from tidemill.context import running_job
from tidemill.job import Envelope, Lease
from tidemill.task import Task

if TYPE_CHECKING:
    from tidemill.worker.process import Process

__all__ = ["Item", "Loop"]

Item = tuple[int, int, int, int, Lease, Envelope, Task[..., Any]]
"""A job that waits for a slot: place of its queue, rank, seq and token, by which it sorts."""


class Loop:
    """The event loop and its thread; both begin with the first async job."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop keeps only weak references

    def launch(self, items: list[Item]) -> None:
        """Start jobs, from any thread."""
        if not items:
            return
        with self._lock:
            if self._loop is None:
                runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
                self._loop = runner.get_loop()
                self._process.employ("tidemill-loop", self._serve, runner)
        self._loop.call_soon_threadsafe(self._start, items)

    def _serve(self, runner: asyncio.Runner) -> None:
        with runner:  # at its end it cancels what is left and closes the loop
            runner.get_loop().run_forever()

    def stop(self) -> None:
        """End the loop, if it ever began."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self, items: list[Item]) -> None:
        assert self._loop is not None
        for item in items:
            task = self._loop.create_task(self._run(item), context=contextvars.Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, item: Item) -> None:
        process = self._process
        lease, envelope, task = item[4], item[5], item[6]
        started = wall_time()
        run = process.begin(lease, envelope, started)
        run.task, run.loop = asyncio.current_task(), self._loop
        running_job.set(run.context)
        process.interrupter.begin(run)
        if run.deadline or run.wanted:
            process.out.ring()
        try:
            call = process.runner.prepare(lease, envelope, task, run.context)
            value = await call()
            if run.interrupted is not None:
                raise run.interrupted()  # it swallowed the cancellation
        except BaseException as error:
            if run.interrupted is not None and isinstance(error, asyncio.CancelledError):
                error = run.interrupted().with_traceback(error.__traceback__)
            verdict = process.runner.failure(run, error)
        else:
            verdict = process.runner.success(run, value)
        process.end(run, verdict)
        self._start(process.ended_elsewhere())
