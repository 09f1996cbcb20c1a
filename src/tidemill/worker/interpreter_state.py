"""Put back after each job the interpreter state that the worker needs.

Tasks may change what all threads of a process share, and leave it so. Most of that is the app's
own affair: the current folder, the environment, warnings. State that would harm later jobs is
put back as it was when the app was loaded:

- a longer switch interval, with which a thread that computes keeps all others from running
- a lower recursion limit, with which the worker's own code fails
- signal handlers and timers of the main thread, where jobs run in it: a handler may raise after
  its task has ended, and a timeout needs its own
- functions that `threading.settrace` and `threading.setprofile` have set for threads to come
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from sys import getrecursionlimit, getswitchinterval, setrecursionlimit, setswitchinterval
from threading import Thread, get_ident
from typing import Any

__all__ = ["InterpreterState"]

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
    """The interpreter as the app left it; made before the first job."""

    def __init__(self) -> None:
        self._interval = getswitchinterval()
        self._depth = getrecursionlimit()
        self._hooks = threading.gettrace(), threading.getprofile()
        self._handlers: list[tuple[int, Any]] = []
        self._wakeup = -1
        self._main = 0  # ident of the main thread, when jobs run in it

    def watch_signals(self) -> None:
        """Jobs will run in this thread, the main one: its signal handlers are put back, too."""
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
        """Put back also what a job in the main thread has changed; async jobs run elsewhere."""
        self.after_job()
        if get_ident() != self._main:
            return
        try:
            self._restore_signals()
        except BaseException:  # a handler of the task's own; its timer is stopped now, or soon
            self._restore_signals()

    def _restore_signals(self) -> None:
        for signum, handler in self._handlers:
            now = _getsignal(signum)
            if now is not handler:
                if signum in _TIMERS:
                    _setitimer(_TIMERS[signum], 0)
                if handler is not None:  # of C code, which nobody can put back
                    _setsignal(signum, handler)
        _set_wakeup_fd(self._wakeup)

    def start(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> Thread:
        """Start a thread of the worker, without what a task has set for threads to come."""
        trace, profile = self._hooks
        if threading.gettrace() is not trace:
            threading.settrace(trace)
        if threading.getprofile() is not profile:
            threading.setprofile(profile)
        thread = Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        return thread
