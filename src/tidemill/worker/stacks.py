"""Stacks of a worker process, taken without any risk for the process.

``faulthandler`` with all threads walks the frames of running threads without the interpreter lock.
That ends a busy process in SIGSEGV. So there are two ways, by who has the interpreter lock:

- The timekeeper of the process gets it: :func:`own_stacks` walks the frames of all threads in
  Python.
- A task keeps it, and the timekeeper cannot run. The supervisor sends a signal to each thread that
  runs a job, and a C handler writes the stack of that thread alone. No other thread can change its
  frames, and the thread cannot leave the handler meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Iterable

from tidemill.core.clock import machine_time

__all__ = ["own_stacks", "stacks_of_threads"]

_TGKILL = {"x86_64": 234, "aarch64": 131}
"""Numbers of the system call that signals one thread of another process; libc has no name for it
before glibc 2.30."""

PATIENCE = 0.3
"""Seconds that the threads have to write their stacks."""


def own_stacks() -> str:
    """The stacks of all threads of this process, by a thread that has the interpreter lock."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        try:
            stack = "".join(traceback.format_stack(frame))
        except BaseException:  # loaders of source run the app's code
            stack = "(the app's code does not let it be shown)\n"
        parts.append(f"Thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)


def stacks_of_threads(path: str, pid: int, threads: Iterable[int]) -> str:
    """The stacks of some threads of another process, whoever has its interpreter lock.

    ``path`` is the file that the process has given to ``faulthandler.register``.
    """
    until = machine_time() + PATIENCE
    parts = [_stack_of_thread(path, pid, thread, until) for thread in dict.fromkeys(threads)]
    return "\n".join(part for part in parts if part)


def _stack_of_thread(path: str, pid: int, thread: int, until: float) -> str:
    try:
        before = size = os.path.getsize(path)
        if not _signal_thread(pid, thread):
            return ""
        pause = threading.Event()
        while machine_time() < until:
            pause.wait(0.005)
            last, size = size, os.path.getsize(path)
            if before < size == last:
                break
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(before)
            return file.read()
    except OSError:
        return ""


def _signal_thread(pid: int, thread: int) -> bool:
    """Send SIGUSR1 to one thread; False where the system has no way to do so."""
    number = _TGKILL.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(number, pid, thread, int(signal.SIGUSR1)) == 0)
