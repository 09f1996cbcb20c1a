"""Put back the worker's signal handlers after a job in the main thread (``-c 1``).

A task may set handlers for SIGALRM, SIGTERM and SIGINT. Its handler must not raise after the task
has ended, and timeouts need the worker's handler of SIGALRM.
"""

from __future__ import annotations

import signal
import sys
from threading import get_ident
from typing import Any

# The signal module's own functions make an enum of each handler, which costs more than the job.
_signal: Any = sys.modules.get("_signal") or signal
_SIGNALS = tuple(map(int, (signal.SIGALRM, signal.SIGTERM, signal.SIGINT)))


class TaskSignals:
    """The handlers of the worker, recorded before the first job, in the thread that runs jobs."""

    def __init__(self) -> None:
        self._main = get_ident()
        self._handlers = [(signum, _signal.getsignal(signum)) for signum in _SIGNALS]

    def put_back(self) -> None:
        """Put back the handlers after a job in the main thread, and stop its alarm."""
        if get_ident() != self._main:
            return
        try:
            self._put_back()
        except BaseException:
            # A handler of the task raised during the first try; its alarm is stopped now.
            self._put_back()

    def _put_back(self) -> None:
        for signum, handler in self._handlers:
            if _signal.getsignal(signum) is not handler:
                signal.setitimer(signal.ITIMER_REAL, 0)
                if handler is not None:  # None stands for a handler of C code
                    _signal.signal(signum, handler)
