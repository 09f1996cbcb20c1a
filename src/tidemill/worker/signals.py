"""The signals of a worker, as bytes in a socket."""

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
    """Signals that have arrived and wait to be taken."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def install(self) -> Callable[[], None]:
        """Have this process's signals arrive here; return a function that restores the handlers.

        The handlers do nothing. The interpreter writes each signal's number to a socket, on which
        the main thread sleeps. The socket is set first: a handler without the socket would lose a
        signal.
        """
        fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        before = {signum: signal.signal(signum, do_nothing) for signum in _SIGNALS}

        def undo() -> None:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(fd)

        return undo

    def send(self, signum: int) -> None:
        with contextlib.suppress(OSError):
            self._write.send(bytes([signum]))

    def ring(self) -> None:
        self.send(0)

    def fileno(self) -> int:
        return self._read.fileno()

    def take(self) -> list[int]:
        try:
            return [number for number in dict.fromkeys(self._read.recv(4096)) if number]
        except BlockingIOError:
            return []

    def close(self) -> None:
        self._read.close()
        self._write.close()
