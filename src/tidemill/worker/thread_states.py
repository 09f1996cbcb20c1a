"""The threads of another process that have not ended.

A thread in a system call that nothing interrupts (state D, a dead mount) outlives SIGKILL. All
other threads of its process end at once and run no further line, though the process stays.
"""

from __future__ import annotations

import os

__all__ = ["live_threads"]

_ENDED = ("Z", "X")


def live_threads(pid: int) -> dict[int, str] | None:
    """By the kernel's number: the state of each thread that has not ended; None if unknown."""
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
        return "X"  # it has ended meanwhile
    except OSError:
        return "?"  # no descriptor is left to look
