"""A worker's folder among the temporary files: the stacks of its processes, and a board if need be.

It is locked for as long as the worker lives, and removed when it ends. A worker that was killed
leaves it: the next one to start on the machine removes it, holding the lock that came free. Who
waited for that lock to make a folder of its own sees that it is gone, and makes another.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile

__all__ = ["Folder"]

_PREFIX = "tidemill-worker-"


class Folder:
    """One worker's."""

    def __init__(self) -> None:
        _sweep(tempfile.gettempdir())
        while True:
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            fd = _locked(self.path, fcntl.LOCK_EX)
            if fd is not None:
                self._fd = fd
                return

    def remove(self) -> None:
        """Delete it, with what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def _sweep(parent: str) -> None:
    """Remove the folders of the dead."""
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        if name.startswith(_PREFIX) and _is_mine(path):
            fd = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fd is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(fd)


def _is_mine(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def _locked(path: str, how: int) -> int | None:
    """A descriptor that holds the lock of a folder; None when somebody has it, or it is gone."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except OSError:
        return None
    try:
        fcntl.flock(fd, how)
        if os.path.samestat(os.stat(path), os.fstat(fd)):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None
