"""End this process when its parent process has ended, also by SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

EVERY = 1.0
"""Seconds between two checks where the kernel sends no signal."""


def end_with(parent: int) -> None:
    """Send TERM to this process when ``parent``, which started it, is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent died before the call of prctl
            os.kill(os.getpid(), signal.SIGTERM)
        return

    def look() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(EVERY)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="tidemill-parent", daemon=True).start()
