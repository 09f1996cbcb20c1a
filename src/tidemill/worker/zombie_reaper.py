"""Orphans: processes that this process inherits, and whether this process is one itself.

Process 1 of a container inherits orphans and has to reap them. So does a subreaper. The worker's
own children are left to the code that waits for them and reads their exit codes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from os import getppid
from time import sleep

__all__ = ["is_orphan", "reap_orphans"]

_LOOKS, _PAUSE = 30, 0.01
"""How often a process looks for its parent, and the seconds between two looks."""


def is_orphan(parent: int) -> bool:
    """Whether the parent of this process, whose end of the socket pair was closed, has died.

    The kernel closes the descriptors of a killed process a moment before its children get another
    parent. So the answer False takes 0.3 seconds.
    """
    for _ in range(_LOOKS):
        if getppid() != parent:
            return True
        sleep(_PAUSE)
    return False


def reap_orphans(reap_own: Callable[[int], bool]) -> None:
    """Reap all dead children; ``reap_own`` reaps the worker's own, and returns True for them."""
    if not hasattr(os, "waitid"):  # macOS, which has no containers either
        return
    try:
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if not reap_own(found.si_pid):
                os.waitpid(found.si_pid, 0)
    except ChildProcessError:
        pass  # there are no children at all
