"""The stacks of a worker process, read once or as a profile, without any risk for the process.

For the stacks of all threads, ``faulthandler`` walks the frames of running threads without the
interpreter lock. That may end a busy process in SIGSEGV. So this module reads stacks in two ways:

- If the timekeeper of the process gets the interpreter lock, :func:`own_stacks` walks the frames of
  all threads in Python.
- If a task keeps the lock, the timekeeper cannot run. Then the supervisor sends a signal to each
  thread that runs a job, and a C handler writes the stack of that thread alone. No other thread can
  change its frames, and the thread cannot leave the handler meanwhile.
"""

from __future__ import annotations

import collections
import ctypes
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import CodeType, FrameType

_TGKILL = {"x86_64": 234, "aarch64": 131}
"""Numbers of the system call that signals one thread of another process; libc has no name for it
before glibc 2.30."""

PATIENCE = 0.3  # seconds that the threads have to write their stacks
_LOOK = 0.005  # seconds between two looks at the file
_STILL = 10  # looks without a change, after which a stack counts as whole whatever its end is

_OUTERMOST = (" in _bootstrap\n", " in _run_module_as_main\n", "  ...\n")
"""The ends of a whole stack: of a thread, of the main thread, and of a very deep stack."""


Stacks = dict[str, int]
"""Collapsed stacks: the functions from the outermost on, joined by ``;``, with their samples."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RUNS = os.path.join(_PACKAGE, "worker", "execute.py")
_DEEPEST = 200  # the most frames of a stack
_DIFFERENT = 20_000  # different stacks of one profile; further stacks are counted together
_TOO_MANY = "(more different stacks)"

_Key = tuple[str, tuple[CodeType, ...]]


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
    """The stacks of some threads of another process, without its interpreter lock."""
    # ``path`` is the file that the process has given to ``faulthandler.register``.
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


class Sampler(threading.Thread):
    """A profile of this process: the stacks of its jobs, read many times a second.

    The thread takes samples for some seconds, then calls ``done`` with the stacks and the number of
    samples. Samples count wall time: a job that waits counts as much as a job that computes. A C
    call that keeps the interpreter lock also stops the sampling. Only the sample after the call
    shows the call.

    A stack begins at the function of the task. Threads that a task has started appear under their
    names. Threads of tidemill that run no job do not appear.
    """

    def __init__(self, seconds: float, hertz: float, done: Callable[[Stacks, int], None]) -> None:
        super().__init__(name="tidemill-sampler", daemon=True)
        self._seconds = seconds
        self._every = 1 / hertz
        self._done = done
        self._counts: collections.Counter[_Key] = collections.Counter()

    def run(self) -> None:
        pause, began, samples = threading.Event(), time.monotonic(), 0
        while (spent := time.monotonic() - began) < self._seconds:
            self._sample()
            samples += 1
            pause.wait(max(0.0, samples * self._every - spent))
        self._done(self._collapsed(), samples)

    def _sample(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            key = _key(names.get(ident, ""), frame)
            if key is not None:
                full = len(self._counts) >= _DIFFERENT and key not in self._counts
                self._counts[(_TOO_MANY, ()) if full else key] += 1

    def _collapsed(self) -> Stacks:
        found: Stacks = {}
        labels: dict[CodeType, str] = {}
        for (name, codes), count in self._counts.items():
            for code in codes:
                if code not in labels:
                    labels[code] = _label(code)
            text = ";".join([*([name] if name else []), *(labels[code] for code in codes)])
            found[text] = found.get(text, 0) + count
        return found


def _key(name: str, frame: FrameType | None) -> _Key | None:
    """The stack of a thread from the task's function on; None for a thread without a job."""
    codes: list[CodeType] = []
    while frame is not None and len(codes) < _DEEPEST:
        codes.append(frame.f_code)
        frame = frame.f_back
    codes.reverse()
    first = next((n for n, code in enumerate(codes) if code.co_filename == _RUNS), None)
    if first is None:
        if not name or name == "MainThread" or name.startswith("tidemill"):
            return None
        return f"thread {re.sub('[0-9]+', 'N', _clean(name))}", tuple(codes)
    while first < len(codes) and codes[first].co_filename.startswith(_PACKAGE):
        first += 1
    return ("", tuple(codes[first:])) if first < len(codes) else None


def _label(code: CodeType) -> str:
    file = "/".join(code.co_filename.split(os.sep)[-2:])
    return _clean(f"{code.co_qualname} ({file}:{code.co_firstlineno})")


def _clean(text: str) -> str:
    return text.replace(";", ",").replace("\n", " ")
