"""Children that a task forks: none of them may act as the worker process.

A forked child has a copy of everything: signal handlers, the socket to the supervisor, the event
loop, and the frames of the pool below the task. ``multiprocessing`` and ``subprocess`` never return
to those frames; a plain ``os.fork`` does, as soon as the child leaves the task. So a child

- gets back the signal handlers from before ours: ``terminate()`` must end it;
- closes its copies of the worker's descriptors: it can neither read leases nor send verdicts;
- does not run the event loop it was forked in;
- ends when it leaves the task, with the exit code a program of its own would have.
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
from typing import Any, NoReturn, Protocol

from tidemill.core.signals import handler_of, set_handler

__all__ = ["Forked", "end_child", "handle_signal", "is_child", "isolate_children", "perform"]


class Forked(Protocol):
    """A part of the worker process that a forked child must let go of."""

    def after_fork_child(self) -> None:
        """Let go of it; called in the child."""
        ...


_pid = getpid()
_handlers: dict[int, tuple[Any, Any]] = {}  # signal → our handler, and the one before it
_masks: dict[int, Any] = {}  # thread that forks → its signal mask before
_parts: weakref.WeakSet[Forked] = weakref.WeakSet()


def isolate_children(*parts: Forked) -> None:
    """Make this process a worker process, whose forked children let go of the parts."""
    global _pid
    _pid = getpid()
    for part in parts:
        _parts.add(part)


def handle_signal(signum: int, handler: Callable[[int, Any], None]) -> None:
    """Install a signal handler that no forked child keeps."""
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
        if getpid() != _pid:
            end_child(sys.exc_info()[1])


def end_child(error: BaseException | None) -> NoReturn:
    """End a forked child that leaves its task, as an interpreter would, but without ``atexit``."""
    code = 1
    try:
        code = _exit_code(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        _exit(code)


def _exit_code(error: BaseException | None) -> int:
    """The exit code for what the child raised; a reason that is no code is printed."""
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
    """Block our signals: one that reached the child before its handlers are back would be lost."""
    if _handlers:
        blocked = {*_handlers, signal.SIGUSR1}
        _masks[get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)


def _unblock() -> None:
    mask = _masks.pop(get_ident(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_child() -> None:
    for part in list(_parts):
        part.after_fork_child()
    if _handlers:
        for signum, (ours, before) in _handlers.items():
            if handler_of(signum) == ours:  # the store's own fork hook may postpone signals
                set_handler(signum, before)
        faulthandler.unregister(signal.SIGUSR1)
        signal.set_wakeup_fd(-1)  # else a signal to the child would wake the parent's event loop
    _unblock()


os.register_at_fork(before=_before_fork, after_in_parent=_unblock, after_in_child=_after_fork_child)
