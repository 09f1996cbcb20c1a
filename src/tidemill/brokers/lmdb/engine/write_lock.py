"""The write lock of an environment. A wait for this lock can end, and errors can name its holder.

LMDB's own lock is a mutex in shared memory, and nothing ends a wait for it. So each process first
takes a record lock on a byte of the data file, far beyond the data, and then asks LMDB for the
mutex, which is normally free. The mutex protects the data; the record lock only bounds the waits,
and may be missing: see ``docs/design/write-lock.md``.

- :meth:`WriteLock.take` never waits.
- :meth:`WriteLock.wait` waits without limit. A separate thread (:class:`Writer`) calls it for the
  callers of this process, if a thread can start.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
import sys
import threading
from collections.abc import Callable

from tidemill.core.files import raised

_AT = 1 << 62  # the locked byte, far beyond the data
_BUSY = (errno.EAGAIN, errno.EACCES)
_FLOCK = struct.Struct("hhqqi")  # struct flock of Linux: type, whence, start, length, process id


class WriteLock:
    """The lock of one environment in this process."""

    def __init__(self, data: str, *, shared: bool = False) -> None:
        """``data`` is the path of the data file."""
        # ``shared`` is True for an environment of the caller, who may have a transaction open in
        # it.
        self._closed = False
        self._shared = shared
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
        """Give the data file disk blocks for these bytes; False if the disk lacks room."""
        # This uses the descriptor of the lock: closing another descriptor of the file would end the
        # lock.
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

    def holder(self) -> str:
        """Name the process with the lock, and the remedy, as the end of a sentence."""
        pid = self._holding()
        if not pid and self.busy:
            if not self._shared:
                return "by this process itself, for a large batch, or by one without tidemill"
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


log = logging.getLogger("tidemill")


class Writer:
    """A thread that runs ``work`` once or more after each :meth:`call`, which may start it."""

    # The thread is a daemon: it may wait forever for another process, and holds nothing meanwhile.

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._called = threading.Lock()
        self._called.acquire()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def call(self) -> bool:
        """Have ``work`` run soon; False when no thread can be started."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="tidemill-writer", daemon=True)
                    try:
                        thread.start()
                    except RuntimeError:  # the process may have no more threads
                        return False
                    self._thread = thread
        with contextlib.suppress(RuntimeError):  # the thread was called already
            self._called.release()
        return True

    def _run(self) -> None:
        while True:
            self._called.acquire()
            if self._closed:
                return
            try:
                self._work()
            except Exception:
                log.exception("the writer of a store failed; the next call tries again")

    def close(self) -> None:
        """End the thread after its present work."""
        self._closed = True
        with contextlib.suppress(RuntimeError):
            self._called.release()


_STOPPED = ("T", "t")


def described(pid: int) -> str:
    """Name a process, with its state and a remedy."""
    if not pid:
        return (
            "by another process that cannot be seen from here, perhaps in another container; "
            "or this machine is very busy"
        )
    holder = f"by {named(pid)}"
    try:
        state = _status(pid)["State"][:1]
    except (OSError, KeyError):
        return holder
    if state in _STOPPED:
        return f"{holder}, which is stopped; let it go on with kill -CONT {pid}, or end it"
    return holder


def named(pid: int) -> str:
    """A process with its number and the beginning of its command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(500).decode("utf-8", "replace").replace("\0", " ").split()
    except OSError:
        words = []
    name = "".join(c for c in " ".join(words) if c.isprintable())
    return f"process {pid} ({name[:80]})" if name else f"process {pid}"


def _status(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        rows = (line.partition(":") for line in file)
        return {name: value.strip() for name, _, value in rows}
