"""Protect sections of code from the exception that ends a job.

A worker stops a job by raising an exception inside the job's thread
(:mod:`tidemill.worker.timeouts`). If the thread leads a group commit at this moment, the exception
would leave other threads waiting for this leader.

The timekeeper *aims* at a thread first and then checks for a shield. A thread raises its shield
first and then checks for an aim. So in any order of the steps, the timekeeper sees the shield or
the thread sees the aim. The module uses no lock, because a signal handler or a forked child could
find a lock taken.

The timekeeper leaves its aim on a shielded thread. When the shield ends, the thread tells the
timekeeper. Then the thread waits, unshielded, until the exception arrives or the timekeeper removes
the aim. So a job that is nearly always shielded is interrupted at the end of its current shield.

An exception set for a thread (``PyThreadState_SetAsyncExc``) is raised at a bytecode where the
interpreter may switch threads, such as the end of a call. From Python 3.13 on, the exception is
raised one bytecode later. So :func:`raise_shield` ends with a call that has no other use. An
exception that was sent before the shield came up is raised at this call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PAUSE = 0.0005
"""Seconds between two checks of a thread that waits for its exception."""

_threads: dict[int, int] = {}
_aimed: dict[int, Callable[[], None]] = {}


def raise_shield() -> None:
    """Protect this thread from interruption. Shields nest."""
    ident = threading.get_ident()
    depth = _threads.get(ident, 0)
    try:
        _threads[ident] = depth + 1
        while ident in _aimed and not depth:
            del _threads[ident]
            _stand_still(ident)
            _threads[ident] = 1
        threading.get_ident()  # an exception sent before the shield is raised here
    except BaseException:
        _threads.pop(ident, None)
        raise


def lower_shield() -> None:
    """End a shielded section; a pending interruption arrives here."""
    ident = threading.get_ident()
    depth = _threads[ident] - 1
    if depth:
        _threads[ident] = depth
    else:
        del _threads[ident]
        if ident in _aimed:
            _stand_still(ident)


def _stand_still(ident: int) -> None:
    """Tell the timekeeper that the shield is down, and wait until the timekeeper decides."""
    tell = _aimed.get(ident)
    if tell is not None:
        tell()
    while ident in _aimed:
        time.sleep(PAUSE)


def aim(ident: int, tell: Callable[[], None] = lambda: None) -> bool:
    """Aim at a thread; True when an exception may be sent to it now.

    At the end of its shield the thread calls ``tell``, and then waits until :func:`take_off`.
    """
    _aimed[ident] = tell
    return ident not in _threads


def take_off(ident: int) -> None:
    """End the aim: the exception was sent, or will not be sent."""
    _aimed.pop(ident, None)
