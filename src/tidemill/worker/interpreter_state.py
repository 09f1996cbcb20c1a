"""Put back after each job the interpreter state that the worker needs.

A task may change state that all threads of a process share. The worker leaves most changes in
place, such as a new current folder or warning filter. It undoes only changes that would harm later
jobs, and restores the state from after the load of the app:

- a longer switch interval: a thread that computes would keep all other threads from running
- a lower recursion limit: the worker's own code would fail
- signal handlers and timers, where jobs run in the main thread: a task's handler may raise after
  the task has ended, and timeouts need the worker's handler
- functions that `threading.settrace` and `threading.setprofile` have set for new threads
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from sys import getrecursionlimit, getswitchinterval, setrecursionlimit, setswitchinterval
from threading import Thread, get_ident
from typing import Any

# The signal module's own functions make an enum of each handler, which costs more than the job.
_getsignal, _setsignal = (getattr(signal, name) for name in ("getsignal", "signal"))
_raw = sys.modules.get("_signal")
if _raw is not None:
    _getsignal, _setsignal = _raw.getsignal, _raw.signal
_setitimer, _set_wakeup_fd = signal.setitimer, signal.set_wakeup_fd

_TIMERS: dict[int, int] = {
    signal.SIGALRM: signal.ITIMER_REAL,
    signal.SIGVTALRM: signal.ITIMER_VIRTUAL,
    signal.SIGPROF: signal.ITIMER_PROF,
}
_SIGNALS = (*_TIMERS, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


class InterpreterState:
    """The state of the interpreter as the app left it; recorded before the first job."""

    def __init__(self) -> None:
        self._interval = getswitchinterval()
        self._depth = getrecursionlimit()
        self._hooks = threading.gettrace(), threading.getprofile()
        self._handlers: list[tuple[int, Any]] = []
        self._wakeup = -1
        self._main = 0  # ident of the main thread if jobs run there, else 0

    def watch_signals(self) -> None:
        """Also put back signal handlers from now on: jobs run in this thread, the main thread."""
        self._main = get_ident()
        self._handlers = [(signum, _getsignal(signum)) for signum in map(int, _SIGNALS)]
        self._wakeup = _set_wakeup_fd(-1)
        _set_wakeup_fd(self._wakeup)

    def after_job(self) -> None:
        """Put back what a job has changed for all threads."""
        if getswitchinterval() > self._interval:
            setswitchinterval(self._interval)
        if getrecursionlimit() < self._depth:
            setrecursionlimit(self._depth)

    def after_main_job(self) -> None:
        """Put back signal handlers, too, after a job in the main thread (not after async jobs)."""
        self.after_job()
        if get_ident() != self._main:
            return
        try:
            self._restore_signals()
        except BaseException:
            # A handler of the task raised during the first try; the second try stops its timer.
            self._restore_signals()

    def _restore_signals(self) -> None:
        for signum, handler in self._handlers:
            now = _getsignal(signum)
            if now is not handler:
                if signum in _TIMERS:
                    _setitimer(_TIMERS[signum], 0)
                # None stands for a handler of C code, which Python cannot set
                if handler is not None:
                    _setsignal(signum, handler)
        _set_wakeup_fd(self._wakeup)

    def start(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> Thread:
        """Start a thread of the worker without the trace and profile functions of tasks."""
        trace, profile = self._hooks
        if threading.gettrace() is not trace:
            threading.settrace(trace)
        if threading.getprofile() is not profile:
            threading.setprofile(profile)
        thread = Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        return thread
