"""Timeouts: interrupt a job that runs too long, and no other code.

A running job is in the dictionary ``running``. The worker thread takes the job out at its end, and
the timekeeper takes the job out to interrupt it. Both use ``dict.pop``, which is atomic: the first
pop decides. An exception sent to a thread (``PyThreadState_SetAsyncExc``) arrives a little later.
So a worker thread that comes second stays inside the job until the lock ``sent`` is free. Then a
late exception lands in the job and not in other code.

A job in a store step is shielded (:mod:`tidemill.core.signals`): the exception lands when the
shield ends.

A job that still runs a while after its interruption (``Waits.stuck``) is *stuck*: in a blocking
system call, a C call or a long store step. The timekeeper settles the job, and its process is
replaced.

A job in the main thread is interrupted by an alarm signal, which also ends blocking system calls.
The signal handler makes the same pop. Async jobs are cancelled again and again until they end.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from signal import pthread_kill
from threading import Lock
from traceback import StackSummary, extract_stack
from types import FrameType
from typing import TYPE_CHECKING, Any

from tidemill.core.retry import JobTerminated, JobTimeout, WorkerStopping
from tidemill.core.signals import aim_at, end_aim, handle_again

if TYPE_CHECKING:
    from tidemill.worker.execute import Interrupt, Run

CANCEL_AGAIN = 0.15  # seconds between two cancellations of an async job, whose clean-up may await
ALARM_AGAIN = 0.05  # seconds between two alarms: one may come just before a system call that blocks
_HERE = os.path.dirname(__file__)

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_async_exc.restype = ctypes.c_int


class Timeouts:
    """All runs of one process, and the ways to end them.

    An interrupted run has ``patience`` seconds to end. ``ring`` wakes the timekeeper.
    """

    def __init__(self, patience: float, ring: Callable[[], None] = lambda: None) -> None:
        self.patience = patience
        self._ring = ring
        self.running: dict[int, Run] = {}
        # Commands for jobs that are starting: token → True to terminate.
        self.orders: dict[int, bool] = {}
        self._interrupted: dict[int, Run] = {}
        self._unsent: dict[int, Run] = {}  # runs whose exception waits for their shield
        self.stop_at = 0.0  # machine time at which all runs get WorkerStopping; 0 for never
        self.main = 0  # ident of the main thread if jobs run there, else 0
        self._alarm: Run | None = None

    # -- in the thread of the job ---------------------------------------------------------------

    def guarded(self, run: Run, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function. An interruption can land only during this call."""
        try:
            run.sent = Lock()
            run.sent.acquire()
            self.begin(run)
            value = function(*args)
        except BaseException as error:
            if run.interrupted is WorkerStopping or not isinstance(error, run.interrupted or ()):
                self._disarm(run, returned=False)
            raise
        self._disarm(run, returned=True)
        return value

    def begin(self, run: Run) -> None:
        """Make the run interruptible, and carry out a command that came before its start."""
        self.running[run.token] = run
        if self.orders:
            terminate = self.orders.pop(run.token, None)
            if terminate is not None:
                self._apply(run, terminate)
        if run.deadline or run.interrupt_by:
            self._ring()  # tell the timekeeper of the run and its deadline

    def _disarm(self, run: Run, *, returned: bool) -> None:
        if self.running.pop(run.token, None) is not None:
            return
        try:
            # The timekeeper was first: wait until it has sent the exception.
            run.sent.acquire()
            for _ in range(1000):
                pass  # let the exception land here if it did not land in the job
            run.caught = returned
        except BaseException as error:
            if not isinstance(error, run.interrupted or ()):
                raise
        assert run.interrupted is not None
        # After WorkerStopping, the task's own outcome counts.
        if run.interrupted is not WorkerStopping:
            raise run.interrupted

    def on_alarm(self, signum: int, frame: Any) -> None:
        """Interrupt the job in the main thread. This is a signal handler."""
        run, self._alarm = self._alarm, None
        if run is None or run.token not in self.running:
            return
        if not aim_at(self.main, self._ring):
            # In a section that defers signals, the end of the section calls this handler again.
            if handle_again(signum):
                self._alarm = run
                end_aim(self.main)
            # When the shield ends, this thread rings, and the timekeeper sends another alarm.
            return
        end_aim(self.main)
        if self.running.pop(run.token, None) is not None:
            kind = self._mark(run)
            run.sent.release()
            raise kind

    def finished(self, run: Run) -> bool:
        """Forget a run that has ended; False when its job was already settled as a stuck job."""
        if self.running.pop(run.token, None) is not None:
            return True
        while run.asyncio_task is not None and run.interrupted is None:
            time.sleep(0)  # the timekeeper was first, and is about to mark the run
        return run.interrupted is None or self._interrupted.pop(run.token, None) is not None

    # -- commands ---------------------------------------------------------------------------------

    def order(self, token: int, terminate: bool) -> None:
        """Cancel or terminate a running job, or a job that is just starting."""
        if token not in self.running:
            # Look again below: the job may have started between the first check and this line.
            self.orders[token] = terminate
        run = self.running.get(token)
        if run is not None:
            self.orders.pop(token, None)
            self._apply(run, terminate)

    @staticmethod
    def _apply(run: Run, terminate: bool) -> None:
        run.context.cancelled = True
        if terminate:
            run.interrupt_by = JobTerminated

    # -- in the timekeeper ---------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Machine time of the next look; None when none is due."""
        times = []
        for run in list(self.running.values()):
            if run.first_try:
                again = run.latest_try + ALARM_AGAIN if run.ident == self.main else math.inf
                times.append(min(run.first_try + self._patience_with(run), again))
            elif run.deadline or self.stop_at:
                times.append(min(run.deadline or math.inf, self.stop_at or math.inf))
        times += [
            min(run.first_try + self.patience, run.latest_try + CANCEL_AGAIN)
            for run in list(self._interrupted.values())
            if run.interrupted is not WorkerStopping
        ]
        return min(times, default=None)

    def look(self, now: float) -> list[Run]:
        """Interrupt runs that are overdue or to be ended; returns the runs that are stuck."""
        for run in list(self.running.values()):
            if run.interrupt_by is None and run.deadline and now >= run.deadline:
                run.interrupt_by = JobTimeout
            elif run.interrupt_by is None and self.stop_at and now >= self.stop_at:
                run.interrupt_by = WorkerStopping
            if run.interrupt_by is not None:
                run.first_try = run.first_try or now
                self._interrupt(run, now)
        for run in list(self._unsent.values()):
            self._send(run)
        stuck = []
        for run in list(self._interrupted.values()):
            if run.interrupted in (None, WorkerStopping):
                continue  # not stuck: the job may clean up until the process is killed
            if now - run.first_try >= self.patience:
                if self._interrupted.pop(run.token, None) is not None:
                    stuck.append(run)
            elif now - run.latest_try >= CANCEL_AGAIN:
                run.latest_try = now
                _cancel(run)
        return stuck

    def _patience_with(self, run: Run) -> float:
        """Seconds that an interrupted run has to end before it counts as stuck."""
        return math.inf if run.interrupt_by is WorkerStopping else self.patience

    def _mark(self, run: Run) -> Interrupt:
        run.latest_try = run.latest_try or run.first_try
        self._interrupted[run.token] = run
        # This comes last, since ``finished`` waits for it.
        kind = run.interrupted = run.interrupt_by or JobTimeout
        return kind

    def _interrupt(self, run: Run, now: float) -> None:
        late = now - run.first_try >= self._patience_with(run)
        if run.ident == self.main:
            if not late:
                self._alarm, run.latest_try = run, now
                pthread_kill(self.main, signal.SIGALRM)
            elif self.running.pop(run.token, None) is not None:
                # The handler of the alarm never ran: the job is stuck.
                self._mark(run)
                run.sent.release()
                end_aim(self.main)
        elif run.asyncio_task is not None and run.loop is not None:
            if self.running.pop(run.token, None) is not None:
                self._mark(run)
                _cancel(run)
        elif aim_at(run.ident, self._ring) or late:
            if self.running.pop(run.token, None) is None:
                end_aim(run.ident)
            else:
                self._mark(run)
                self._send(run)
        elif run.token not in self.running:
            # The run has ended, so the shield belongs to the next job of its thread.
            end_aim(run.ident)

    def _send(self, run: Run) -> None:
        """Send the exception to a thread, now or when its shield ends."""
        if not aim_at(run.ident, self._ring):
            self._unsent[run.token] = run
            return
        try:
            assert run.interrupted is not None
            _set_async_exc(run.ident, run.interrupted)
            self._unsent.pop(run.token, None)
            run.sent.release()
        finally:
            end_aim(run.ident)

    def stack_of(self, run: Run) -> str:
        """The stack of the run at this moment, as text."""
        if run.asyncio_task is not None and not _inside(run.asyncio_task):
            stack = StackSummary.extract((f, f.f_lineno) for f in _awaiting(run.asyncio_task))
        else:
            frame = sys._current_frames().get(run.ident)
            stack = extract_stack(frame) if frame else StackSummary()
        ours = [i for i, entry in enumerate(stack) if entry.filename.startswith(_HERE)]
        users = stack[ours[-1] + 1 :] if ours else stack
        lines = StackSummary.from_list(users or stack).format()
        return "".join(["Stack of the task when it was given up:\n", *lines])


def raise_if_interrupted(run: Run, value: Any) -> Any:
    """Return the value of an async task; raise if the task has swallowed its cancellation."""
    if run.interrupted not in (None, WorkerStopping):
        run.caught = run.asyncio_task is not None and run.asyncio_task.cancelling() > 0
        raise run.interrupted()
    return value


def cancellation_reason(run: Run, error: BaseException) -> BaseException:
    """The error that ended an async task; for a cancellation by this module, its reason."""
    if not isinstance(error, asyncio.CancelledError):
        return error
    if run.interrupted is not None:
        return run.interrupted().with_traceback(error.__traceback__)
    return run.fault or error


def _cancel(run: Run) -> None:
    if run.loop is not None and run.asyncio_task is not None:
        try:
            run.loop.call_soon_threadsafe(run.asyncio_task.cancel)
        except RuntimeError:
            pass  # the loop is closed, which its own thread notices


def _inside(task: asyncio.Task[Any]) -> bool:
    """True when the loop executes this task at this moment, so the task blocks the loop."""
    return bool(getattr(task.get_coro(), "cr_running", False))


def _awaiting(task: asyncio.Task[Any]) -> list[FrameType]:
    """The frames of a suspended task, outermost first: each awaits the next."""
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
