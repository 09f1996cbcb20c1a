"""The write lock of an environment. A wait for this lock can end, and errors can name its holder.

LMDB's own lock is a mutex in shared memory. A process that waits for the mutex waits in C until the
holder frees the mutex: no timeout, Ctrl-C or signal handler ends the wait. A stopped holder
(``SIGSTOP``) would stop every process for good. So each process first takes a record lock on a byte
of the data file, far beyond the data. Then it asks LMDB for the mutex, which is normally free. The
kernel frees a record lock when its process dies, and tells the holder's process id. Children do not
inherit a record lock.

- :meth:`WriteLock.take` never waits.
- :meth:`WriteLock.wait` waits without limit. A separate thread of
  :class:`tidemill.brokers.lmdb.group_commit.GroupCommit` calls it, if a thread can start.

A program without tidemill that writes in the environment holds only LMDB's mutex. A wait for such a
program has no limit, and no error names the program.

LMDB's mutex protects the data; the record lock only bounds the waits. A record lock may be missing:
some file systems have none, and a task may close all descriptors. Then waits have no limit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import sys
import threading

from tidemill.brokers.lmdb.processes import described
from tidemill.core.files import raised

_AT = 1 << 62  # the locked byte, far beyond the data
_BUSY = (errno.EAGAIN, errno.EACCES)
_FLOCK = struct.Struct("hhqqi")  # struct flock of Linux: type, whence, start, length, process id


class WriteLock:
    """The lock of one environment in this process."""

    def __init__(self, data: str) -> None:
        """``data`` is the path of the data file."""
        self._closed = False
        # Keeps threads apart: a record lock belongs to the whole process.
        self._inside = threading.Lock()
        self._fd = _open(data)

    def take(self) -> bool:
        """Take the lock unless somebody else holds it."""
        if not self._inside.acquire(blocking=False):
            return False
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _AT)
        except (OSError, ValueError) as error:  # ValueError stands for a missing descriptor
            if isinstance(error, OSError) and error.errno in _BUSY:
                self._inside.release()
                return False
        return True

    def wait(self) -> None:
        """Take the lock; wait for it without limit."""
        self._inside.acquire()
        with contextlib.suppress(OSError, ValueError):
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, _AT)

    def free(self) -> None:
        """Give the lock to the next caller."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _AT)
        except (OSError, ValueError):
            pass
        if self._closed:
            self._forget()
        self._inside.release()

    def allocate(self, start: int, size: int) -> bool:
        """Give the data file disk blocks for these bytes; False if the disk lacks room.

        This uses the descriptor of the lock: closing another descriptor of the file would end the
        lock.
        """
        if size > 0 and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, start, size)
            except OSError:
                return False
        return True

    @property
    def busy(self) -> bool:
        """True while a thread of this process has the lock, or waits for it."""
        return self._inside.locked()

    def close(self) -> None:
        """Give up the descriptors; the environment is closed after this."""
        self._closed = True
        # If a thread has the lock, that thread closes the descriptors when it frees the lock.
        if self._inside.acquire(blocking=False):
            self.free()

    def abandon(self) -> None:
        """Close the copies in a forked child, which cannot use them."""
        self._forget()

    def _forget(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = -1

    # -- the holder -----------------------------------------------------------------------------

    def holder(self) -> str:
        """Name the process with the lock, and the remedy, as the end of a sentence."""
        pid = self._holding()
        if not pid and self.busy:
            return (
                "by this process itself, for a large batch or for a transaction of your own, or by "
                "another process without tidemill; inside your own transaction pass it as txn="
            )
        return described(pid)

    def state(self) -> str:
        """Name the process that has the lock, if this process can see it."""
        pid = self._holding()
        return f"held {described(pid)}" if pid else "free"

    def _holding(self) -> int:
        """The other process that has the record lock; 0 for none, or for one in a container."""
        if self._fd < 0 or sys.platform != "linux":
            return 0
        with contextlib.suppress(OSError):
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _AT, 1, 0)
            kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
            if kind != fcntl.F_UNLCK:
                return max(0, int(pid))
        return 0


def _open(path: str) -> int:
    """A descriptor of the data file, never one of 0 to 2; -1 when the file cannot be opened."""
    try:
        return raised(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return -1
