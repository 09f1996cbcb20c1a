"""Signals whose handlers raise, Ctrl-C above all, put off while the main thread holds something.

A signal's handler runs in the main thread, between any two of its steps. An exception from it in
the wrong place would leave what the thread holds to nobody: the lead of a store, for which all
other threads wait. No ``try`` helps, since it may come inside the ``finally``. So for such a
stretch the handlers are ours: they remember the signal, and the user's own is called at the end.
Where the thread only waits, and can take back what it waits for, it is called at once.

Other threads are never interrupted so; a task that is to end is, and has its shield
(:mod:`tidemill.shield`).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # quicker by far than signal.signal
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["begin_waiting", "call_off", "end_waiting", "put_off"]

_SIGNALS = int(signal.SIGTERM), int(signal.SIGINT)

_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}  # the user's own
_came: list[int] = []
_inside: list[bool] = [False]
_waiting: list[bool] = [False]
_main: list[int | None] = [threading.main_thread().ident]


def put_off() -> bool:
    """From now on no handler raises in this thread; True when there is something to call off."""
    if threading.get_ident() != _main[0]:
        return False
    _came.clear()
    _waiting[0] = False
    _inside[0] = True
    try:  # without a jump: from Python 3.13 on no exception that comes at one is caught here
        _take(_SIGNALS[0])
        _take(_SIGNALS[1])
    except ValueError:  # embedded somewhere, and not the main thread after all
        pass
    except BaseException:  # one came before its handler was ours
        call_off()
        raise
    return True


def _take(number: int) -> None:
    handler = _signal.getsignal(number)
    if callable(handler) and handler is not _remember:
        _handlers[number] = handler  # first: ours may be called as soon as it is there
        _signal.signal(number, _remember)


def call_off() -> None:
    """The end of the stretch: signals that came are handled now."""
    _inside[0] = False  # where one comes before its handler is given back, ours calls it
    try:
        _give_back(_SIGNALS[0])
    finally:
        _give_back(_SIGNALS[1])
    while _came:
        number = _came.pop()
        _handlers[number](number, sys._getframe())


def begin_waiting() -> None:
    """From now on a signal may interrupt: nothing is held; what came already does so at once."""
    if threading.get_ident() == _main[0]:
        _waiting[0] = True
        if _came:
            _remember(_came.pop(), sys._getframe())


def end_waiting() -> None:
    """Signals are put off again. Nothing to do where one interrupted the wait: it saw to that."""
    if threading.get_ident() == _main[0]:
        _waiting[0] = False


def _remember(number: int, frame: FrameType | None) -> None:
    if _waiting[0]:
        _waiting[0] = False  # what is done about it must not be interrupted in its turn
        _handlers[number](number, frame)
        _waiting[0] = True  # it did not raise: the wait goes on
    elif _inside[0]:
        _came.append(number)
    else:
        _handlers[number](number, frame)


def _give_back(number: int) -> None:
    if _signal.getsignal(number) is _remember:
        _signal.signal(number, _handlers[number])


def _after_fork_child() -> None:
    """Forked by another thread while the main one was in such a stretch."""
    _main[0] = threading.get_ident()
    _inside[0] = _waiting[0] = False
    for number in _SIGNALS:
        _give_back(number)


os.register_at_fork(after_in_child=_after_fork_child)
