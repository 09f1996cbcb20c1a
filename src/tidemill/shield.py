"""Stretches of code that must not be interrupted by the end of a job.

A worker stops a job in a thread by raising an exception inside it
(:mod:`tidemill.worker.interrupt`). Raised in the middle of a store step made from that job, it
would leave other threads waiting for a leader that is gone. Whoever interrupts asks here first and
comes back a little later.
"""

from __future__ import annotations

import threading

__all__ = ["lower_shield", "raise_shield", "shielded"]

_threads: dict[int, int] = {}


def raise_shield() -> None:
    """From now on this thread must not be interrupted. Nests."""
    ident = threading.get_ident()
    _threads[ident] = _threads.get(ident, 0) + 1


def lower_shield() -> None:
    """The end of a shielded stretch."""
    ident = threading.get_ident()
    depth = _threads.pop(ident) - 1
    if depth:
        _threads[ident] = depth


def shielded(ident: int) -> bool:
    """True while the thread must not be interrupted."""
    return ident in _threads
