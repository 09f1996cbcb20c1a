"""Postpone Python signal handlers while the main thread holds a lock or the lead of a store.

Python calls a signal's handler in the main thread, between two of its steps. The handler may raise
(Ctrl-C, a timeout by ``signal.alarm``), and then the main thread would leave without giving back
what it holds. The handler may also enqueue a job, and would then wait for a lock of its own thread.
No ``try`` helps, because the exception may come inside the ``finally``.

So each stretch between :func:`put_off` and :func:`call_off` replaces every handler by
:func:`_remember`, which notes the signal; the user's handler is called at the end of the stretch.
Where the thread only waits and holds nothing (:func:`begin_waiting`), the handler is called at
once. Stretches nest: a handler called in a wait may begin one of its own. Where the thread waits
and holds locks (:func:`restarted`), a signal ends the wait, and the handler is called afterwards.

Only the main thread runs handlers. A task in another thread is interrupted by other means, and has
its shield (:mod:`tidemill.shield`).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # quicker by far than signal.signal
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from itertools import compress
from types import FrameType
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "Deferred",
    "Waiting",
    "begin_waiting",
    "call_off",
    "call_once_more",
    "end_waiting",
    "handler_of",
    "put_off",
    "raised_by_handler",
    "restarted",
    "set_handler",
]

P = ParamSpec("P")
T = TypeVar("T")

# KILL and STOP cannot be handled; a fault has no handler that could return.
_NEVER = {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}
_SIGNALS = tuple(
    sorted(int(n) for n in signal.valid_signals() if getattr(n, "name", "") not in _NEVER)
)

_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}  # the user's own
# the handlers of all signals when a stretch last began, and those signals with Python handlers
_found: list[tuple[list[Any], tuple[int, ...]]] = [([], ())]
_replaced: list[int] = []  # signals whose handler is ours now
_came: list[int] = []  # signals to be handled at the end of the stretch
_once_more: list[int] = []  # … and those that were handled in a wait already
_depth: list[int] = [0]  # stretches open in the main thread
_waiting: list[bool] = [False]
# None, or the thread holds locks also while it waits: then the signals that do not end its wait
_ignored: list[set[int] | None] = [None]
_main: list[int | None] = [threading.main_thread().ident]


def put_off() -> bool:
    """Begin a stretch without handlers; True when :func:`call_off` must end it."""
    if threading.get_ident() != _main[0]:
        return False
    if _depth[0]:
        _depth[0] += 1
        return True
    _waiting[0] = False
    try:  # without a jump: from Python 3.13 on no exception that comes at one is caught here
        _replace_all()
        _depth[0] = 1  # last: an exception before this leaves no stretch open
    except ValueError:  # embedded somewhere, and not the main thread after all
        return False
    except BaseException:  # one came before its handler was ours
        call_off()
        raise
    return True


def _replace_all() -> None:
    found = list(map(_signal.getsignal, _SIGNALS))
    if found != _found[0][0]:  # hardly ever, and all in C when they are the same
        _found[0] = found, tuple(compress(_SIGNALS, map(callable, found)))
    for number in _found[0][1]:
        handler = _signal.getsignal(number)
        if handler is not _remember:
            _handlers[number] = handler  # first: ours may be called as soon as it is there
            _replaced.append(number)
            _signal.signal(number, _remember)


def call_off() -> None:
    """End a stretch; at the end of the outermost one the signals that came are handled."""
    if _depth[0] > 1:
        _depth[0] -= 1
        return
    _depth[0] = 0  # a signal that comes before its handler is given back is handled at once
    try:
        _give_back()
    finally:
        if _once_more:
            _came.extend(_once_more)
            _once_more.clear()
        if _came:
            _handle()


def _give_back() -> None:
    """Restore the handlers. Cut short by a handler that raises, the next stretch completes this."""
    while _replaced:
        for number in _replaced[-1:]:  # none: a handler that came just now began a stretch
            if _signal.getsignal(number) is _remember:
                _signal.signal(number, _handlers[number])
        del _replaced[-1:]


def _handle() -> None:
    """Call the handlers of what came, in order, also when one of them raises."""
    try:
        number = _came.pop(0)
    except IndexError:  # a handler that came just now began a stretch, which handled them
        return
    try:
        _deliver(number, sys._getframe())
    finally:
        if _came:
            _handle()


def _deliver(number: int, frame: FrameType | None) -> None:
    handler: Any = _handlers[number]
    if callable(handler):
        try:
            handler(number, frame)
        except BaseException as error:
            error._tidemill_handler = True  # type: ignore[attr-defined]  # our mark
            raise
        return
    _signal.signal(number, handler)  # set_handler was told to leave the signal to the system
    os.kill(os.getpid(), number)


def raised_by_handler(error: BaseException) -> bool:
    """True when a signal handler has raised this: its marks are here, or its frames."""
    if hasattr(error, "_tidemill_handler"):
        return True
    if threading.get_ident() != _main[0]:
        return False
    handlers = {getattr(_code_holder(handler_of(n)), "__code__", None) for n in _SIGNALS} - {None}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            return True
        traceback = traceback.tb_next
    return False


def _code_holder(handler: Any) -> Any:
    """The function behind a handler, which may be a partial, or an object that is called."""
    while hasattr(handler, "func"):
        handler = handler.func
    is_plain = hasattr(handler, "__code__") or not callable(handler)
    return handler if is_plain else type(handler).__call__


def begin_waiting() -> None:
    """From now on a signal may interrupt: the thread holds nothing. Handle what came already."""
    if threading.get_ident() == _main[0] and _depth[0]:
        _waiting[0] = True
        if _came:
            _interrupt(sys._getframe())


def end_waiting() -> None:
    """Postpone signals again. Not needed after a handler interrupted the wait: it did so then."""
    if threading.get_ident() == _main[0]:
        _waiting[0] = False


def _remember(number: int, frame: FrameType | None) -> None:
    if not (_waiting[0] or _depth[0]):
        _deliver(number, frame)
        return
    if number not in _came:
        _came.append(number)
    if _waiting[0]:
        _interrupt(frame)


def _interrupt(frame: FrameType | None) -> None:
    """Handle what came during a wait. A thread that holds locks gives them back first."""
    ignored = _ignored[0]
    if ignored is not None:
        if not ignored.issuperset(_came):
            _waiting[0] = False
            raise _Ended
        return
    while _came:
        _waiting[0] = False  # the handler is not interrupted while it may begin a stretch
        if _came:  # else a signal came just before, and all were handled
            _deliver(_came.pop(0), frame)
        _waiting[0] = True  # it did not raise: the wait goes on


def call_once_more(number: int) -> bool:
    """Call a signal's handler again when the stretch ends; False when none is open."""
    if not _depth[0]:
        return False
    if number not in _once_more:
        _once_more.append(number)
    return True


class _Ended(BaseException):
    """A signal came while the main thread waited and held locks."""


def restarted(work: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that takes locks, and holds them while it waits.

    A signal that comes in the wait ends the work, and so frees the locks. The handler is called
    then. Unless the handler raises, the work starts again. Each signal ends the work once at most,
    or an interval timer would end it for ever.
    """

    @functools.wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if threading.get_ident() != _main[0] or _ignored[0] is not None:
            return work(*args, **kwargs)
        # a stretch that is open already may hold a lock of which nothing is known here
        ignored = set(_SIGNALS if _depth[0] else ())
        while True:
            began = put_off()
            try:
                _ignored[0] = ignored
                return work(*args, **kwargs)
            except _Ended:
                ignored.update(_came)
            finally:
                _ignored[0] = None
                if began:
                    call_off()

    return call


def handler_of(number: int) -> Any:
    """The user's handler of a signal, also within a stretch."""
    handler = _signal.getsignal(number)
    return _handlers[number] if handler is _remember else handler


def set_handler(number: int, handler: Any) -> None:
    """Set the handler of a signal; within a stretch it counts from its end on."""
    if isinstance(handler, int):  # SIG_DFL, which the quick functions know as a plain number
        handler = int(handler)
    if _signal.getsignal(number) is _remember:
        _handlers[number] = handler
    else:
        _signal.signal(number, handler)


class Deferred:
    """A stretch as a context manager, for locks that a handler's own call may need."""

    __slots__ = ("_began",)

    def __enter__(self) -> None:
        self._began = put_off()

    def __exit__(self, *_: object) -> None:
        if self._began:
            call_off()


class Waiting:
    """A wait inside a stretch as a context manager: the thread holds no lock there."""

    __slots__ = ()

    def __enter__(self) -> None:
        begin_waiting()

    def __exit__(self, *_: object) -> None:
        end_waiting()


def _after_fork_child() -> None:
    """Signals that came before the fork are the parent's.

    Another thread may have forked while the main one was in a stretch.
    """
    _came.clear()
    _once_more.clear()
    if threading.get_ident() != _main[0]:
        _main[0] = threading.get_ident()
        _depth[0] = 0
        _waiting[0] = False
        _ignored[0] = None
        _give_back()


os.register_at_fork(after_in_child=_after_fork_child)
