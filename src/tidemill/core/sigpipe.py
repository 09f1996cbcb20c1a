"""Write to a pipe or socket whose reader may be gone, in a program that SIGPIPE would kill.

Python ignores SIGPIPE, but a command-line program may have restored the default action, which kills
the program. So this module blocks SIGPIPE in this thread during the write, and discards a SIGPIPE
that came.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # far faster than signal.signal
import os
import signal
from typing import Any

__all__ = ["Unkilled", "block_sigpipe", "write_unkilled"]

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
    """Write without waiting.

    Raises:
        OSError: no process reads, or the pipe is full.
    """
    with Unkilled():
        os.write(fd, data)
