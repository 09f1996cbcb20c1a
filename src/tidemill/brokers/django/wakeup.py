"""Wake-ups between the processes of one machine: a datagram socket for each sleeper.

A sleeper binds a socket in a folder that all processes of the store on this machine share. To wake
the sleepers, a process sends a datagram to each socket. Processes on other machines, or in
containers with another ``/tmp``, find new jobs only at their next poll.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

OWNERS, WAITERS = "o", "w"  # the first letter of a socket's name: an owner; a caller of ``wait``

_numbers = itertools.count(1)
_LONGEST = 100  # the most bytes in the path of a socket


class Bell:
    """The socket of one sleeper, or no socket if its path is too long. Close it after use."""

    def __init__(self, folder: str, kind: str) -> None:
        self._socket: socket.socket | None = None
        self._path = os.path.join(folder, f"{kind}{os.getpid()}-{next(_numbers)}")
        if len(os.fsencode(self._path)) > _LONGEST:
            return
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # an earlier process with this pid left the socket
        self._socket.bind(self._path)

    @property
    def fds(self) -> list[int]:
        """The descriptor that is readable after a ring."""
        return [self._socket.fileno()] if self._socket is not None else []

    def drain(self) -> None:
        """Forget the rings so far."""
        if self._socket is None:
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(16)

    def close(self) -> None:
        """Remove the socket. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def after_fork_child(self) -> None:
        """Close the copy in a forked child; the file is the parent's."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def ring(folder: str, kinds: str) -> None:
    """Wake the sleepers of these kinds, and remove the sockets of dead processes."""
    if not kinds:
        return
    try:
        names = [name for name in os.listdir(folder) if name[0] in kinds]
    except FileNotFoundError:
        return
    if not names:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for name in names:
            path = os.path.join(folder, name)
            try:
                sender.sendto(b"x", path)
            except BlockingIOError:
                pass  # the sleeper has unread rings
            except ConnectionRefusedError:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            except OSError:
                pass  # the sleeper left, or belongs to another user
