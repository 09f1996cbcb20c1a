"""Read the stacks of a worker process without any risk for the process.

For the stacks of all threads, ``faulthandler`` walks the frames of running threads without the
interpreter lock. That may end a busy process in SIGSEGV. So this module reads stacks in two ways:

- If the timekeeper of the process gets the interpreter lock, :func:`own_stacks` walks the frames of
  all threads in Python.
- If a task keeps the lock, the timekeeper cannot run. Then the supervisor sends a signal to each
  thread that runs a job, and a C handler writes the stack of that thread alone. No other thread can
  change its frames, and the thread cannot leave the handler meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable

_TGKILL = {"x86_64": 234, "aarch64": 131}
"""Numbers of the system call that signals one thread of another process; libc has no name for it
before glibc 2.30."""

PATIENCE = 0.3
"""Seconds that the threads have to write their stacks."""

_LOOK = 0.005  # seconds between two looks at the file
_STILL = 10  # looks without a change, after which a stack counts as whole whatever its end is

_OUTERMOST = (" in _bootstrap\n", " in _run_module_as_main\n", "  ...\n")
"""The ends of a whole stack: of a thread, of the main thread, and of a very deep stack."""


def own_stacks() -> str:
    """The stacks of all threads of this process; needs the interpreter lock."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"Thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)


def stacks_of_threads(
    path: str, pid: int, threads: Iterable[int], patience: float = PATIENCE
) -> str:
    """The stacks of some threads of another process, without its interpreter lock.

    ``path`` is the file that the process has given to ``faulthandler.register``.
    """
    until = time.monotonic() + patience
    parts = [_stack_of_thread(path, pid, thread, until) for thread in dict.fromkeys(threads)]
    return "\n".join(part for part in parts if part)


def _stack_of_thread(path: str, pid: int, thread: int, until: float) -> str:
    try:
        before = size = os.path.getsize(path)
        if not _signal_thread(pid, thread):
            return ""
        pause, still, text = threading.Event(), 0, ""
        while time.monotonic() < until and still < _STILL and not text.endswith(_OUTERMOST):
            pause.wait(_LOOK)
            last, size = size, os.path.getsize(path)
            # The handler writes piece by piece, and a busy machine may stop its thread in between.
            still = still + 1 if before < size == last else 0
            text = _text_from(path, before)
        return text or _text_from(path, before)
    except OSError:
        return ""


def _text_from(path: str, start: int) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        file.seek(start)
        return file.read()


def _signal_thread(pid: int, thread: int) -> bool:
    """Send SIGUSR1 to one thread; False when the system cannot do so."""
    number = _TGKILL.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(number, pid, thread, int(signal.SIGUSR1)) == 0)
