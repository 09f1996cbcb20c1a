"""Reap inherited processes (orphans), and tell whether this process is an orphan itself.

Process 1 of a container, or a subreaper, inherits orphans and has to reap them. This module does
not reap the worker's own children, since other code waits for them and reads their exit codes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from os import getppid
from time import sleep

_LOOKS, _PAUSE = 30, 0.01
"""The number of checks for the parent, and the seconds between two checks."""


def is_orphan(parent: int) -> bool:
    """True when the parent of this process has died. The parent's end of the socket is closed.

    The kernel closes the descriptors of a killed process a moment before its children get another
    parent. So the function waits up to 0.3 seconds before it returns False.
    """
    for _ in range(_LOOKS):
        if getppid() != parent:
            return True
        sleep(_PAUSE)
    return False


def reap_orphans(reap_own: Callable[[int], bool]) -> None:
    """Reap all dead children. ``reap_own`` reaps a child of the worker itself and returns True."""
    if not hasattr(os, "waitid"):  # macOS; it has no containers to reap for
        return
    try:
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if not reap_own(found.si_pid):
                os.waitpid(found.si_pid, 0)
    except ChildProcessError:
        pass  # no children are left
