"""Defer Python signal handlers while the main thread holds a lock or leads a group commit.

Python calls a signal's handler in the main thread, between two bytecodes. The handler may raise
(Ctrl-C, a timeout by ``signal.alarm``), and the main thread would then leave without releasing its
locks. The handler may also enqueue a job, and would then wait for a lock of its own thread. A
``try`` does not help, because the exception may come inside the ``finally``.

A *deferred section* lies between :func:`defer_signals` and :func:`resume_signals`. It replaces
every handler by :func:`_remember`, which notes the signal; the user's handler is called at the end
of the section. There are two exceptions:

- Where the thread waits and holds nothing (:func:`begin_interruptible_wait`), the handler is called
  at once. Sections nest: a handler that is called in a wait may begin a section of its own.
- Where the thread waits and holds locks (:func:`restart_on_signal`), a signal ends the wait. The
  handler is called afterwards.

Only the main thread runs handlers. A task in another thread is interrupted by other means, and is
protected by its shield (:mod:`tidemill.core.shield`).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # far faster than signal.signal
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
    "InterruptibleWait",
    "SignalsDeferred",
    "begin_interruptible_wait",
    "defer_signals",
    "end_interruptible_wait",
    "handle_again",
    "handler_of",
    "raised_by_handler",
    "restart_on_signal",
    "resume_signals",
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
# the handlers of all signals when a section last began, and the signals with Python handlers
_found: list[tuple[list[Any], tuple[int, ...]]] = [([], ())]
_replaced: list[int] = []  # signals whose handler is ours now
_came: list[int] = []  # signals to be handled at the end of the section
_once_more: list[int] = []  # … and signals that were handled in a wait already
_depth: list[int] = [0]  # open sections of the main thread
_waiting: list[bool] = [False]
# None, or, while the thread waits and holds locks: the signals that do not end its wait
_ignored: list[set[int] | None] = [None]
_main: list[int | None] = [threading.main_thread().ident]


def defer_signals() -> bool:
    """Begin a deferred section; True when :func:`resume_signals` must end it."""
    if threading.get_ident() != _main[0]:
        return False
    if _depth[0]:
        _depth[0] += 1
        return True
    _waiting[0] = False
    try:  # without a jump: from Python 3.13 on no exception that comes at one is caught here
        _replace_all()
        _depth[0] = 1  # last: an exception before this leaves no section open
    except ValueError:  # embedded somewhere, and not the main thread after all
        return False
    except BaseException:  # one came before its handler was ours
        resume_signals()
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


def resume_signals() -> None:
    """End a deferred section; the outermost section then handles the signals that came."""
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
    """Restore the handlers. If a handler raises in between, the next section completes this."""
    while _replaced:
        for number in _replaced[-1:]:  # none: a handler that came just now began a section
            if _signal.getsignal(number) is _remember:
                _signal.signal(number, _handlers[number])
        del _replaced[-1:]


def _handle() -> None:
    """Call the handlers of the signals that came, in order, also when a handler raises."""
    try:
        number = _came.pop(0)
    except IndexError:  # a handler that came just now began a section, which handled them
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
    """True when a signal handler raised the error, by its mark or its traceback."""
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
    """The function behind a handler, which may be a partial or a callable object."""
    while hasattr(handler, "func"):
        handler = handler.func
    is_plain = hasattr(handler, "__code__") or not callable(handler)
    return handler if is_plain else type(handler).__call__


def begin_interruptible_wait() -> None:
    """Let signals interrupt from now on, since the thread holds nothing; handle pending ones."""
    if threading.get_ident() == _main[0] and _depth[0]:
        _waiting[0] = True
        if _came:
            _interrupt(sys._getframe())


def end_interruptible_wait() -> None:
    """Defer signals again. After an interrupted wait this has happened already."""
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
    """Handle the signals that came during a wait; a thread with locks releases them first."""
    ignored = _ignored[0]
    if ignored is not None:
        if not ignored.issuperset(_came):
            _waiting[0] = False
            raise _Ended
        return
    while _came:
        _waiting[0] = False  # the handler is not interrupted while it may begin a section
        if _came:  # else a signal came just before, and all were handled
            _deliver(_came.pop(0), frame)
        _waiting[0] = True  # it did not raise: the wait goes on


def handle_again(number: int) -> bool:
    """Call a signal's handler again at the end of the section; False when no section is open."""
    if not _depth[0]:
        return False
    if number not in _once_more:
        _once_more.append(number)
    return True


class _Ended(BaseException):
    """A signal came while the main thread waited and held locks; the work starts again."""


def restart_on_signal(work: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that waits while it holds locks.

    A signal during the wait ends the work, which releases the locks. Then the handler is called,
    and unless it raises, the work starts again. Each signal ends the work at most once; otherwise
    an interval timer would end it for ever.
    """

    @functools.wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if threading.get_ident() != _main[0] or _ignored[0] is not None:
            return work(*args, **kwargs)
        # an outer section may hold a lock that is unknown here
        ignored = set(_SIGNALS if _depth[0] else ())
        while True:
            began = defer_signals()
            try:
                _ignored[0] = ignored
                return work(*args, **kwargs)
            except _Ended:
                ignored.update(_came)
            finally:
                _ignored[0] = None
                if began:
                    resume_signals()

    return call


def handler_of(number: int) -> Any:
    """The user's handler of a signal, also within a deferred section."""
    handler = _signal.getsignal(number)
    return _handlers[number] if handler is _remember else handler


def set_handler(number: int, handler: Any) -> None:
    """Set the handler of a signal; within a deferred section it applies from the end on."""
    if isinstance(handler, int):  # SIG_DFL, which the quick functions know as a plain number
        handler = int(handler)
    if _signal.getsignal(number) is _remember:
        _handlers[number] = handler
    else:
        _signal.signal(number, handler)


class SignalsDeferred:
    """A deferred section as a context manager, for locks that a handler may need, too."""

    __slots__ = ("_began",)

    def __enter__(self) -> None:
        self._began = defer_signals()

    def __exit__(self, *_: object) -> None:
        if self._began:
            resume_signals()


class InterruptibleWait:
    """A wait inside a deferred section, as a context manager: the thread holds no lock."""

    __slots__ = ()

    def __enter__(self) -> None:
        begin_interruptible_wait()

    def __exit__(self, *_: object) -> None:
        end_interruptible_wait()


def _after_fork_child() -> None:
    """Forget the parent's signals in a forked child.

    Another thread may have forked while the main thread was in a section.
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
