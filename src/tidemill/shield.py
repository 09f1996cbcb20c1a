"""Stretches of code that must not be interrupted by the end of a job.

A worker stops a job in a thread by raising an exception inside it
(:mod:`tidemill.worker.interrupt`). Raised in the middle of a store step made from that job, it
would leave other threads waiting for a leader that is gone.

Who interrupts *aims* first and looks then; who raises its shield raises it first and looks then
whether somebody aims. So one of the two sees the other, whatever runs between their steps, and
without a lock, which a signal handler or a forked child could find held. A thread that is aimed at
waits, unshielded, until it is hit or the aim is taken off.

An exception set for a thread (``PyThreadState_SetAsyncExc``) is raised by a step that gives others
a turn; the end of any call is one. From Python 3.13 on that is not the step in which the others had
their turn, but the one after it. So raising the shield ends with a call of no other use: what was
sent before the shield was up is raised there, and not behind it.
"""

from __future__ import annotations

import threading
import time

__all__ = ["aim", "lower_shield", "raise_shield", "shielded", "take_off"]

_threads: dict[int, int] = {}
_aimed: set[int] = set()


def raise_shield() -> None:
    """From now on this thread must not be interrupted. Nests."""
    ident = threading.get_ident()
    depth = _threads.get(ident, 0)
    try:
        _threads[ident] = depth + 1
        while ident in _aimed and not depth:
            del _threads[ident]
            while ident in _aimed:
                time.sleep(0)
            _threads[ident] = 1
        threading.get_ident()  # the step that raises what was sent before
    except BaseException:
        _threads.pop(ident, None)
        raise


def lower_shield() -> None:
    """The end of a shielded stretch."""
    ident = threading.get_ident()
    depth = _threads[ident] - 1
    if depth:
        _threads[ident] = depth
    else:
        del _threads[ident]


def shielded(ident: int) -> bool:
    """True while the thread must not be interrupted."""
    return ident in _threads


def aim(ident: int) -> bool:
    """Before an exception is sent to a thread: True when it may be. ``take_off`` in any case."""
    _aimed.add(ident)
    return ident not in _threads


def take_off(ident: int) -> None:
    """The exception is sent, or will not be."""
    _aimed.discard(ident)
