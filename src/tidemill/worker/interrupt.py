"""Ending what runs too long, without hitting anything else.

A running job is in ``running``. Whoever takes it out, by one atomic ``dict.pop``, decides its
fate: the worker thread at the end of the job, or the clerk that interrupts it. An exception sent to
a thread (``PyThreadState_SetAsyncExc``) arrives a little later, so a thread that loses the race
waits, still inside the job, for the mark ``sent``: a late exception can land nowhere else.

What cannot be interrupted (a blocking system call in a thread, a C call) is *stuck* after
``PATIENCE``: its verdict falls without it, and the process has to go.

In the main thread an alarm signal does it, whose handler makes the same pop; it gets through
blocking system calls too. Async jobs are cancelled, again and again until they are done.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from tidemill.context import JobContext
from tidemill.job import Envelope, Lease
from tidemill.retry import JobTerminated, JobTimeout
from tidemill.shield import aim, shielded, take_off

__all__ = ["PATIENCE", "Interrupter", "Run"]

PATIENCE = 0.4
"""Seconds an interrupted job has to end before it counts as stuck."""

NUDGE = 0.15
"""Seconds between two cancellations of an async job: its clean-up may await something, too."""

Kind = type[JobTimeout] | type[JobTerminated]
_HERE = os.path.dirname(__file__)

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_async_exc.restype = ctypes.c_int


class Run:
    """One run of one job."""

    __slots__ = (
        "asked",
        "context",
        "deadline",
        "envelope",
        "generation",
        "ident",
        "interrupted",
        "lease",
        "loop",
        "nudged",
        "sent",
        "started",
        "task",
        "token",
        "wanted",
    )

    def __init__(
        self, lease: Lease, envelope: Envelope, context: JobContext, generation: int, ident: int
    ) -> None:
        self.lease = lease
        self.token = lease.token
        self.envelope = envelope
        self.context = context
        self.generation = generation
        self.ident = ident
        self.started = 0.0
        self.deadline = 0.0  # machine time, 0 for none
        self.wanted: Kind | None = None  # asked for by a terminate
        self.interrupted: Kind | None = None
        self.asked = 0.0  # machine time of the first try
        self.nudged = 0.0  # … and of the latest
        self.sent: Any = None
        self.task: asyncio.Task[Any] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None


class Interrupter:
    """All runs of one process, and the power to end them."""

    def __init__(self) -> None:
        self.running: dict[int, Run] = {}
        self.orders: dict[int, bool] = {}  # token → terminate, of jobs that are just starting
        self._interrupted: dict[int, Run] = {}
        self.main = 0  # ident of the main thread when jobs run in it
        self._alarm: Run | None = None

    # -- in the thread of the job ---------------------------------------------------------------

    def guarded(self, run: Run, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function; from here to the return it may be interrupted, and nowhere else."""
        try:
            run.sent = threading.Lock()
            run.sent.acquire()
            self.begin(run)
            value = function(*args)
        except BaseException as error:
            if run.interrupted is None or not isinstance(error, run.interrupted):
                self._disarm(run)
            raise
        self._disarm(run)
        return value

    def begin(self, run: Run) -> None:
        """From now on the run can be reached, also by what was ordered before."""
        self.running[run.token] = run
        if self.orders:
            terminate = self.orders.pop(run.token, None)
            if terminate is not None:
                self._apply(run, terminate)

    def _disarm(self, run: Run) -> None:
        if self.running.pop(run.token, None) is not None:
            return
        run.sent.acquire()  # the clerk was first: its exception is set once this is free
        for _ in range(1000):
            pass  # … and lands here, if it had not landed in the job
        assert run.interrupted is not None
        raise run.interrupted

    def on_alarm(self, signum: int, frame: Any) -> None:
        """The handler of the main thread: the same race, decided by the same pop."""
        run, self._alarm = self._alarm, None
        if run is None or shielded(self.main):
            return  # the clerk asks again
        if self.running.pop(run.token, None) is not None:
            kind = self._mark(run)
            run.sent.release()
            raise kind

    def finished(self, run: Run) -> bool:
        """The run is over. False when its verdict has fallen without it."""
        self.running.pop(run.token, None)
        return run.interrupted is None or self._interrupted.pop(run.token, None) is not None

    # -- orders ---------------------------------------------------------------------------------

    def order(self, token: int, terminate: bool) -> None:
        """Have a running job see that it is cancelled, or end it; one that is starting likewise."""
        if token not in self.running:
            self.orders[token] = terminate  # it may start between these two looks
        run = self.running.get(token)
        if run is not None:
            self.orders.pop(token, None)
            self._apply(run, terminate)

    @staticmethod
    def _apply(run: Run, terminate: bool) -> None:
        run.context.cancelled = True
        if terminate:
            run.wanted = JobTerminated

    # -- in the clerk ---------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Machine time of the next thing to look at; None when there is nothing."""
        times = [run.deadline for run in list(self.running.values()) if run.deadline]
        times += [
            min(run.asked + PATIENCE, run.nudged + NUDGE)
            for run in list(self._interrupted.values())
        ]
        return min(times, default=None)

    def look(self, now: float) -> list[Run]:
        """Interrupt what is overdue or asked to end; returns what has turned out to be stuck."""
        for run in list(self.running.values()):
            if run.wanted is None and run.deadline and now >= run.deadline:
                run.wanted = JobTimeout
            if run.wanted is not None:
                run.asked = run.asked or now
                self._interrupt(run, now)
        stuck = []
        for run in list(self._interrupted.values()):
            if now - run.asked >= PATIENCE:
                if self._interrupted.pop(run.token, None) is not None:
                    stuck.append(run)
            elif now - run.nudged >= NUDGE:
                run.nudged = now
                if run.loop is not None and run.task is not None:
                    run.loop.call_soon_threadsafe(run.task.cancel)
        return stuck

    def _mark(self, run: Run) -> Kind:
        kind = run.interrupted = run.wanted or JobTimeout
        run.nudged = run.nudged or run.asked
        self._interrupted[run.token] = run
        return kind

    def _interrupt(self, run: Run, now: float) -> None:
        if run.ident == self.main:
            if now - run.asked < PATIENCE:
                self._alarm = run
                signal.pthread_kill(self.main, signal.SIGALRM)
            elif self.running.pop(run.token, None) is not None:  # no handler ever ran: stuck
                self._mark(run)
                run.sent.release()
            return
        if run.task is not None and run.loop is not None:
            if self.running.pop(run.token, None) is not None:
                self._mark(run)
                run.loop.call_soon_threadsafe(run.task.cancel)
            return
        try:
            if aim(run.ident) and self.running.pop(run.token, None) is not None:
                _set_async_exc(run.ident, self._mark(run))
                run.sent.release()
        finally:
            take_off(run.ident)

    def stack_of(self, run: Run) -> str:
        """Where the run is at this moment, as text."""
        title = "Stack of the task when it was given up:\n"
        if run.task is not None and not _inside(run.task):
            stack = traceback.StackSummary.extract((f, f.f_lineno) for f in _awaiting(run.task))
        else:
            frame = sys._current_frames().get(run.ident)
            stack = traceback.extract_stack(frame) if frame else traceback.StackSummary()
        ours = [i for i, entry in enumerate(stack) if entry.filename.startswith(_HERE)]
        users = stack[ours[-1] + 1 :] if ours else stack
        return title + "".join(traceback.StackSummary.from_list(users or stack).format())


def _inside(task: asyncio.Task[Any]) -> bool:
    """True when the loop is executing the task itself: it blocks the loop."""
    return bool(getattr(task.get_coro(), "cr_running", False))


def _awaiting(task: asyncio.Task[Any]) -> list[FrameType]:
    """The frames of a suspended task, outermost first: what awaits what."""
    frames: list[FrameType] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        for kind, link in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                frames.append(frame)
                awaited = getattr(awaited, link, None)
                break
        else:
            return frames
    return frames
