"""Hooks that make a forked child of this process usable, also if Python did not see the fork.

``os.fork`` calls the hooks in the child at once. A server that forks in C, such as uWSGI without
``--lazy-apps``, calls none. So whoever is about to use what belongs to the parent looks at
:data:`mark`: in a child that has not called the hooks, the mark is gone, and :func:`enter_child`
calls them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

_MADV_WIPEONFORK = 18

_hooks: list[Callable[[], object]] = []
# By the process id: a lock that the parent held would never be released here.
_locks: dict[int, threading.RLock] = {}
_entering: set[int] = set()


class _ProcessId:
    """A mark for systems whose kernel cannot empty a page at a fork."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __getitem__(self, _: int) -> bool:
        return self._pid == os.getpid()

    def __setitem__(self, *_: int) -> None:
        self._pid = os.getpid()


def _new_mark() -> Any:
    """A byte of memory that the kernel sets to 0 in each forked child."""
    # To read the byte takes a tenth of the time of ``os.getpid``, which is a system call.
    if sys.platform == "linux":
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            page.madvise(_MADV_WIPEONFORK)
        except OSError:  # a kernel before 4.14
            return _ProcessId()
        page[0] = 1
        return page
    return _ProcessId()


mark = _new_mark()  # ``mark[0]`` is false in a forked child that has not called the hooks


def after_fork(hook: Callable[[], object]) -> None:
    """Call a function in each forked child, before the child uses tidemill."""
    _hooks.append(hook)
    os.register_at_fork(after_in_child=hook)


def check_fork() -> None:
    """Call the hooks, if this process is a fork that Python did not see."""
    if not mark[0]:
        enter_child()


def enter_child() -> None:
    """Call each hook once in this process, even after a hook that raises; other threads wait."""
    pid = os.getpid()
    with _locks.setdefault(pid, threading.RLock()):
        if mark[0] or pid in _entering:  # a hook makes ids, which looks at the mark
            return
        _entering.add(pid)
        try:
            with contextlib.ExitStack() as calls:
                for hook in reversed(_hooks):
                    calls.callback(hook)
        finally:
            mark[0] = 1
            _entering.discard(pid)


def _set_mark() -> None:
    mark[0] = 1


os.register_at_fork(after_in_child=_set_mark)  # the hooks follow
