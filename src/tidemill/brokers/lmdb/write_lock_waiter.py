"""A thread that waits for the write lock in place of the callers of this process."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

log = logging.getLogger("tidemill")


class Writer:
    """A thread that runs ``work`` once or more after each :meth:`call`; the first call starts it.

    The thread is a daemon: it may wait forever for another process, and holds nothing while it
    waits.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._called = threading.Lock()
        self._called.acquire()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def call(self) -> bool:
        """Have ``work`` run soon; False when no thread can be started."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="tidemill-writer", daemon=True)
                    try:
                        thread.start()
                    except RuntimeError:  # the process may have no more threads
                        return False
                    self._thread = thread
        with contextlib.suppress(RuntimeError):  # the thread was called already
            self._called.release()
        return True

    def _run(self) -> None:
        while True:
            self._called.acquire()
            if self._closed:
                return
            try:
                self._work()
            except Exception:
                log.exception("the writer of a store failed; the next call tries again")

    def close(self) -> None:
        """End the thread after its present work."""
        self._closed = True
        with contextlib.suppress(RuntimeError):
            self._called.release()
