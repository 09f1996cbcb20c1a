"""The signals of a worker, as bytes in a socket that two threads may read."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable

from tidemill.core.signals import do_nothing

_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1),
    signal.SIGCHLD,
)


class Signals:
    """Signals that have arrived and wait to be taken, and wake-ups for the supervisor's thread."""

    def __init__(self) -> None:
        self._read, self._write = _pair()
        self._wakeup_read, self._wakeup_write = _pair()

    def install(self) -> Callable[[], None]:
        """Have this process's signals arrive here; return a function that restores the handlers.

        A handler in Python would not run while the main thread is inside a call of the store. So
        the handlers do nothing, and the interpreter writes each signal's number to a socket. The
        socket is set first: a handler without the socket would lose a signal.
        """
        fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        before = {signum: signal.signal(signum, do_nothing) for signum in _SIGNALS}

        def undo() -> None:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(fd)

        return undo

    def send(self, signum: int) -> None:
        """Act as if a signal had arrived."""
        with contextlib.suppress(OSError):
            self._write.send(bytes([signum]))

    def ring(self) -> None:
        """Wake the supervisor's own thread, if it sleeps."""
        with contextlib.suppress(OSError):
            self._wakeup_write.send(b"x")

    def fileno(self) -> int:
        """A descriptor that is readable while a signal waits to be taken."""
        return self._read.fileno()

    def fds(self) -> list[int]:
        """The descriptors that the supervisor's own thread sleeps on."""
        return [self._read.fileno(), self._wakeup_read.fileno()]

    def heard(self) -> None:
        """Clear the wake-up. Only the supervisor's own thread calls this, when it is awake."""
        _drain(self._wakeup_read)

    def take(self) -> list[int]:
        """Take the waiting signals, each number once."""
        return list(dict.fromkeys(_drain(self._read)))

    def close(self) -> None:
        """Close all ends."""
        for end in (self._read, self._write, self._wakeup_read, self._wakeup_write):
            end.close()


def _drain(end: socket.socket) -> bytes:
    try:
        return end.recv(4096)
    except BlockingIOError:
        return b""


def _pair() -> tuple[socket.socket, socket.socket]:
    read, write = socket.socketpair()
    read.setblocking(False)
    write.setblocking(False)
    return read, write
