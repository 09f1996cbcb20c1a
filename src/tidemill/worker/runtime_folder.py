"""A worker's temporary folder: stacks of its processes, and sometimes its scoreboard.

The worker locks the folder while it runs and removes the folder at its end. A killed worker leaves
its folder. The next worker that starts on the machine takes the free lock and removes the folder.
Another worker may also remove a new folder before it is locked. Then the maker of the folder sees
that it is gone and makes another one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile

_PREFIX = "tidemill-worker-"


class RuntimeFolder:
    """The folder of one worker."""

    def __init__(self) -> None:
        _sweep(tempfile.gettempdir())
        while True:
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            fd = _locked(self.path, fcntl.LOCK_EX)
            if fd is not None:
                self._fd = fd
                return

    def remove(self) -> None:
        """Delete the folder with all its files."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def _sweep(parent: str) -> None:
    """Remove the folders of dead workers."""
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
    """A descriptor that holds a folder's lock; None when the lock is taken or the folder gone."""
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
