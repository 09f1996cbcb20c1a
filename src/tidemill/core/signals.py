"""Protect sections of code from interruption, by signal handlers and by the end of a job.

Python signal handlers are deferred while the main thread holds a lock or leads a group commit.

Python calls a signal's handler in the main thread, between two bytecodes. The handler may raise
(Ctrl-C, a timeout by ``signal.alarm``). Then the main thread would keep its locks for ever. The
handler may also enqueue a job, and would then wait for a lock that its own thread holds. A
``try`` does not help, because the exception may come inside the ``finally``.

A *deferred section* lies between :func:`defer_signals` and :func:`resume_signals`. The section
replaces every handler by :func:`_remember`, which only records the signal. At the end of the
section, the user's handler is called. A wait inside a section is different:

- Where the thread waits and holds nothing (:func:`begin_interruptible_wait`), the handler is called
  at once. Sections nest: a handler that is called in a wait may begin a section of its own.
- Where the thread waits and holds locks (:func:`restart_on_signal`), a signal ends the wait. The
  handler is called afterwards.

Only the main thread runs handlers. A task in another thread is interrupted by other means, and is
protected by its shield: a section of code in which the exception that ends a job does not arrive.

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

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import compress
from types import FrameType
from typing import Any, ParamSpec, TypeVar

_signal: Any  # far faster than the functions of the module ``signal``
try:
    import _signal  # type: ignore[import-not-found,no-redef]
except ImportError:
    _signal = signal

P = ParamSpec("P")
T = TypeVar("T")

# KILL and STOP cannot be handled; a fault has no handler that could return.
_NEVER = {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}
_SIGNALS = tuple(
    sorted(int(n) for n in signal.valid_signals() if getattr(n, "name", "") not in _NEVER)
)

_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}  # the user's handlers
# The state at the start of the last section: all handlers, and the signals with Python handlers.
_found: list[tuple[list[Any], tuple[int, ...]]] = [([], ())]
_replaced: list[int] = []  # signals whose handler is ours now
_came: list[int] = []  # signals to be handled at the end of the section
_once_more: list[int] = []  # signals to be handled again at the end of the section
_depth: list[int] = [0]  # open sections of the main thread
_ends: list[int] = [0]  # the number of outermost sections that have ended
_waiting: list[bool] = [False]
# The signals that do not end the wait of ``restart_on_signal``; None outside of this function.
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
    try:  # no jumps in this try: from Python 3.13 on, it misses an exception that comes at a jump
        _replace_all()
        _depth[0] = 1  # the last step, so an exception in an earlier step leaves no section open
    except ValueError:  # an embedded interpreter, which has another main thread
        return False
    except BaseException:  # a signal came before its handler was replaced
        resume_signals()
        raise
    return True


def _replace_all() -> None:
    found = list(map(_signal.getsignal, _SIGNALS))
    if found != _found[0][0]:  # rarely true; the comparison of equal lists runs no Python code
        _found[0] = found, tuple(compress(_SIGNALS, map(_is_pythons, found)))
    ends = -1
    while ends != _ends[0]:  # a handler may have run a section, which restored some handlers
        ends = _ends[0]
        for number in _found[0][1]:
            handler = _signal.getsignal(number)
            if handler is not _remember:
                _handlers[number] = handler  # before signal(), after which _remember may be called
                _replaced.append(number)
                _signal.signal(number, _remember)
            elif number not in _replaced:  # a handler's section ended between append() and signal()
                _replaced.append(number)


def do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal that only wakes the process. No section replaces this handler."""


def _is_pythons(handler: Any) -> bool:
    """True for a handler in Python, which a section replaces."""
    # uWSGI handles SIGINT in C, and Python does not know. To replace Python's handler would end
    # that of uWSGI for good: its processes would not stop.
    if handler is signal.default_int_handler and "uwsgi" in sys.modules:
        return False
    return callable(handler) and handler is not do_nothing


def resume_signals() -> None:
    """End a deferred section; the outermost section then handles the signals that came."""
    if _depth[0] > 1:
        _depth[0] -= 1
        return
    _depth[0] = 0  # a signal that comes before its handler is restored is handled at once
    try:
        _ends[0] += 1
        _give_back()
    finally:
        if _once_more:
            _came.extend(_once_more)
            _once_more.clear()
        if _came:
            _handle()


def _give_back() -> None:
    """Restore the handlers. If a handler raises in between, the next section restores the rest."""
    while _replaced:
        for number in _replaced[-1:]:  # the list is empty if a handler ran a section
            if _signal.getsignal(number) is _remember:
                _signal.signal(number, _handlers[number])
        del _replaced[-1:]


def _handle() -> None:
    """Call the handlers of all signals that came, in order, even if one of them raises."""
    try:
        number = _came.pop(0)
    except IndexError:  # a handler began a section, which has handled all signals
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
    _signal.signal(number, handler)  # the handler is SIG_DFL or SIG_IGN, so the system acts
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


def runs_handlers() -> bool:
    return threading.get_ident() == _main[0]


def begin_interruptible_wait() -> None:
    """Let signals interrupt the thread from now on, and handle the pending signals."""
    # The thread holds no lock, or it works in :func:`restart_on_signal`.
    if threading.get_ident() == _main[0] and _depth[0]:
        _waiting[0] = True
        if _came:
            _interrupt(sys._getframe())


def end_interruptible_wait() -> None:
    """Defer signals again. An interrupted wait has already done so."""
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
    """Handle the signals that came during a wait. If the thread holds locks, raise ``_Ended``."""
    ignored = _ignored[0]
    if ignored is not None:
        if not ignored.issuperset(_came):
            _waiting[0] = False
            raise _Ended
        return
    while _came:
        _waiting[0] = False  # a signal that comes now waits until this handler has returned
        if _came:  # a signal that came between these lines has emptied the list
            _deliver(_came.pop(0), frame)
        _waiting[0] = True  # the handler has returned, so the wait goes on


def handle_again(number: int) -> bool:
    """Call a signal's handler again at the end of the section; False when no section is open."""
    if not _depth[0]:
        return False
    if number not in _once_more:
        _once_more.append(number)
    return True


class _Ended(KeyboardInterrupt):
    """A signal came while the main thread waited and held locks; the work starts again.

    After a KeyboardInterrupt, a driver such as psycopg cancels the statement that it waits for.
    """


def restart_on_signal(work: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that waits while it holds locks.

    A signal during the wait ends the work, which releases the locks. Then the handler is called. If
    the handler returns, the work starts again. Each signal ends the work at most once, so an
    interval timer cannot end the work again and again.
    """

    @functools.wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if threading.get_ident() != _main[0] or _ignored[0] is not None:
            return work(*args, **kwargs)
        # Inside an outer section no signal ends the work: the section may hold an unknown lock.
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
    """Set the handler of a signal; within a deferred section it applies after the section."""
    if isinstance(handler, int):  # the module _signal takes SIG_DFL as a plain number
        handler = int(handler)
    if _signal.getsignal(number) is _remember:
        _handlers[number] = handler
    else:
        _signal.signal(number, handler)


class SignalsDeferred:
    """A deferred section as a context manager, around locks that a handler may take, too."""

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
    """Forget the parent's signals in a forked child."""
    # Another thread may have forked while the main thread was in a section.
    _came.clear()
    _once_more.clear()
    if threading.get_ident() != _main[0]:
        _main[0] = threading.get_ident()
        _depth[0] = 0
        _waiting[0] = False
        _ignored[0] = None
        _give_back()


os.register_at_fork(after_in_child=_after_fork_child)


# -- SIGPIPE -------------------------------------------------------------------------------------

# Python ignores SIGPIPE, but a command-line program may have restored the default action, which
# kills the program. So SIGPIPE is blocked in the writing thread during a write to a pipe or socket
# whose reader may be gone, and a SIGPIPE that came is discarded.
_PIPE = frozenset({signal.SIGPIPE})


class Unkilled:
    """A section, as a context manager, in which SIGPIPE does not kill the process."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before: set[Any] | None = None
        if _signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL:
            self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _PIPE)

    def __exit__(self, *_: object) -> None:
        if self._before is not None and signal.SIGPIPE not in self._before:
            if signal.SIGPIPE in signal.sigpending():
                signal.sigwait(_PIPE)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PIPE)


def block_sigpipe() -> None:
    """Block SIGPIPE in this thread from now on, so that a write cannot kill the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _PIPE)


def write_unkilled(fd: int, data: bytes) -> None:
    """Write without waiting. Raises OSError if no process reads, or if the pipe is full."""
    with Unkilled():
        os.write(fd, data)


# -- signals as bytes ---------------------------------------------------------------------------

_OF_WORKERS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1),
    signal.SIGCHLD,
)


class Signals:
    """Signals that have arrived and wait to be taken."""

    def __init__(self) -> None:
        import socket  # most programs that put jobs need none

        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def install(self) -> Callable[[], None]:
        """Have this process's signals arrive here; return a function that restores the handlers.

        The handlers do nothing. The interpreter writes each signal's number to a socket, on which
        the main thread sleeps. The socket is set first: a handler without the socket would lose a
        signal.
        """
        fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        before = {signum: signal.signal(signum, do_nothing) for signum in _OF_WORKERS}

        def undo() -> None:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(fd)

        return undo

    def send(self, signum: int) -> None:
        with contextlib.suppress(OSError):
            self._write.send(bytes([signum]))

    def ring(self) -> None:
        self.send(0)

    def fileno(self) -> int:
        return self._read.fileno()

    def take(self) -> list[int]:
        try:
            return [number for number in dict.fromkeys(self._read.recv(4096)) if number]
        except BlockingIOError:
            return []

    def close(self) -> None:
        self._read.close()
        self._write.close()


# -- the shield ------------------------------------------------------------------------------------

PAUSE = 0.0005  # seconds between two checks of a thread that waits for its exception

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


def aim_at(ident: int, tell: Callable[[], None] = lambda: None) -> bool:
    """Aim at a thread; True when an exception may be sent to it now.

    At the end of its shield the thread calls ``tell``, and then waits until :func:`end_aim`.
    """
    _aimed[ident] = tell
    return ident not in _threads


def end_aim(ident: int) -> None:
    """End the aim: the exception was sent, or will not be sent."""
    _aimed.pop(ident, None)
