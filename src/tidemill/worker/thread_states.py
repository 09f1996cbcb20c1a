"""The threads of another process that have not ended.

A thread in an uninterruptible system call (state D, as on a dead mount) outlives SIGKILL, and so
does its process. All other threads of the process end at once and run no further code.
"""

from __future__ import annotations

import os

__all__ = ["live_threads"]

_ENDED = ("Z", "X")


def live_threads(pid: int) -> dict[int, str] | None:
    """The state of each thread that has not ended, by its kernel thread id; None if unknown."""
    folder = f"/proc/{pid}/task"
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    states = {int(name): _state(f"{folder}/{name}/stat") for name in names}
    return {thread: state for thread, state in states.items() if state not in _ENDED}


def _state(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return "X"  # the thread has ended meanwhile
    except OSError:
        return "?"  # this process has no descriptor left to open the file
