"""Ending with the process that started this one, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

__all__ = ["end_with"]

EVERY = 1.0
"""Seconds between two looks where the kernel does not tell."""


def end_with(parent: int) -> None:
    """Have this process told to end (TERM) when ``parent``, which started it, is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), signal.SIGTERM)
        return

    def look() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(EVERY)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="tidemill-parent", daemon=True).start()
