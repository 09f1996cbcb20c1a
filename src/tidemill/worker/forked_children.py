"""Children that a task forks: none of them may act as the worker process.

A forked child has copies of the signal handlers, the socket to the supervisor and the event loop.
It also has the frames of the pool below the task. A child of ``multiprocessing`` or ``subprocess``
never returns to those frames. A child of a plain ``os.fork`` returns to them when it leaves the
task. So a child

- gets back the signal handlers that the worker has replaced, so ``terminate()`` ends the child;
- closes its copies of the worker's descriptors: it can neither read leases nor send verdicts;
- does not run the event loop it was forked in;
- ends when it leaves the task, with the exit code that a separate program would have.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Callable
from os import _exit, getpid
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

from tidemill.core.signals import handler_of, set_handler

if TYPE_CHECKING:
    from tidemill.worker.child import Child

_pid = getpid()
_handlers: dict[int, tuple[Any, Any]] = {}  # signal → our handler, and the previous handler
# id of the thread that forks → the signal mask of the thread before the fork
_masks: dict[int, Any] = {}
_workers: weakref.WeakSet[Child] = weakref.WeakSet()


def isolate_children(worker: Child) -> None:
    """Make this process a worker process, whose forked children release its parts."""
    global _pid
    _pid = getpid()
    _workers.add(worker)


def handle_signal(signum: int, handler: Callable[[int, Any], None]) -> None:
    """Install a signal handler that forked children do not keep."""
    before = signal.signal(signum, handler)
    _handlers[signum] = handler, before if before is not None else signal.SIG_DFL


def is_child() -> bool:
    """True in a process that a task has forked."""
    return getpid() != _pid


def perform(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a task's function; a child that it forked does not return from here."""
    try:
        return function(*args, **kwargs)
    finally:
        end_if_child()


def end_if_child() -> None:
    """End a child that the task has forked and that leaves the task, also by an exception."""
    if getpid() != _pid:
        end_child(sys.exc_info()[1])


def end_child(error: BaseException | None) -> NoReturn:
    """End a forked child that leaves its task, like an interpreter, but without ``atexit``."""
    code = 1
    try:
        code = _exit_code(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        _exit(code)


def _exit_code(error: BaseException | None) -> int:
    """The exit code for the child's exception; prints the exception, or an exit text."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _before_fork() -> None:
    """Block our signals: the child would lose a signal until it has its handlers back."""
    if _handlers:
        blocked = {*_handlers, signal.SIGUSR1}
        _masks[get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)


def _unblock() -> None:
    mask = _masks.pop(get_ident(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_child() -> None:
    for worker in list(_workers):
        worker.after_fork_child()
    if _handlers:
        for signum, (ours, before) in _handlers.items():
            # ``handler_of`` also answers while a fork hook of the store defers signals
            if handler_of(signum) == ours:
                set_handler(signum, before)
        faulthandler.unregister(signal.SIGUSR1)
        signal.set_wakeup_fd(-1)  # a signal to the child must not wake the parent's event loop
    _unblock()


os.register_at_fork(before=_before_fork, after_in_parent=_unblock, after_in_child=_after_fork_child)
