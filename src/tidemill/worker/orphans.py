"""Process 1 of a container inherits what others leave behind, and has to reap it.

So does any process that calls itself a subreaper. Our own children are left to those who wait for
them, who want to know how they ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = ["reap_orphans"]


def reap_orphans(reap_own: Callable[[int], bool]) -> None:
    """Reap all that has died; ``reap_own`` does it itself, and says so, where the child is ours."""
    if not hasattr(os, "waitid"):  # macOS, which has no containers either
        return
    try:
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if not reap_own(found.si_pid):
                os.waitpid(found.si_pid, 0)
    except ChildProcessError:
        pass  # there are no children at all
