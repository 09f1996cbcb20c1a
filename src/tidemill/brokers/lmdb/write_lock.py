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

A program without tidemill may write in the environment, and then holds only LMDB's mutex. The mutex
itself contains the thread id of its holder. So this module also finds such a holder, in the mapped
lock file.

LMDB's mutex protects the data; the record lock only bounds the waits. A record lock may be missing:
some file systems have none, and a task may close all descriptors. Then waits have no limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import sys
import threading

from tidemill.brokers.lmdb.processes import described, process_of

_AT = 1 << 62  # the locked byte, far beyond the data
_BUSY = (errno.EAGAIN, errno.EACCES)
_WORD_AT = (64, 128)  # places of the mutex in the lock file: for mutexes of 40 bytes, of 48 bytes
_OWNER = 0x3FFFFFFF  # the bits of the word that hold the owner's thread id


class WriteLock:
    """The lock of one environment in this process."""

    def __init__(self, path: str, *, ours: bool) -> None:
        """Unless ``ours``, the caller may close the environment at ``path`` at any time."""
        alone = not os.path.isdir(path)
        self._data = path if alone else os.path.join(path, "data.mdb")
        self._locks = path + "-lock" if alone else os.path.join(path, "lock.mdb")
        self._ours = ours
        self._closed = False
        # Keeps threads apart: a record lock belongs to the whole process.
        self._inside = threading.Lock()
        self._fd = _open(self._data)
        self.looked = False
        self._address = 0  # address of LMDB's mutex in this process; 0 if unknown
        self._memory = -1
        self._word: ctypes.c_uint32 | None = None

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
        if not self.looked and self._guessed():
            self.free()
            return False
        word = self._word
        if word is not None:
            owner = word.value & _OWNER
        else:
            owner = self._owner() if self._memory >= 0 else 0
        # Do not refuse this thread: if it has a transaction open, LMDB itself refuses a second one.
        if owner and owner != threading.get_native_id():
            self.free()
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

    def allocate(self, start: int, size: int) -> None:
        """Give the data file disk blocks for these bytes, as far as the disk has room.

        This uses the descriptor of the lock: closing another descriptor of the file would end the
        lock.
        """
        if size and hasattr(os, "posix_fallocate"):
            with contextlib.suppress(OSError):
                os.posix_fallocate(self._fd, start, size)

    def holes(self, end: int) -> list[tuple[int, int]]:
        """Start and size of the parts of the data file before ``end`` that have no blocks."""
        found: list[tuple[int, int]] = []
        place = 0
        # Fails when no data follows, or the system has no such call.
        with contextlib.suppress(OSError, AttributeError):
            while (start := os.lseek(self._fd, place, os.SEEK_HOLE)) < end:
                place = end
                with contextlib.suppress(OSError):
                    place = min(end, os.lseek(self._fd, start, os.SEEK_DATA))
                found.append((start, place - start))
        return found

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
        self._word = None
        for fd in (self._fd, self._memory):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._fd = self._memory = -1

    # -- the holder -----------------------------------------------------------------------------

    def look(self) -> None:
        """Find LMDB's mutex in memory, once, while this thread has a transaction open."""
        self.looked = True
        with contextlib.suppress(OSError, ValueError):
            base = _mapped_at(self._locks)
            memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
            for at in _WORD_AT if base else ():
                word = int.from_bytes(os.pread(memory, 4, base + at), "little")
                if word & _OWNER == threading.get_native_id():
                    self._address = base + at
                    break
            if self._address and not self._ours:
                self._memory = memory  # reads through this file are safe when the memory is gone
                return
            os.close(memory)
            if self._address:
                self._word = ctypes.c_uint32.from_address(self._address)

    def _guessed(self) -> int:
        """The process that has LMDB's mutex, while the place of the mutex is uncertain."""
        try:
            base = _mapped_at(self._locks)
            with open("/proc/self/mem", "rb", buffering=0) as memory:
                words = [os.pread(memory.fileno(), 4, base + at) for at in _WORD_AT if base]
        except (OSError, ValueError):
            return 0
        owners = {int.from_bytes(word, "little") & _OWNER for word in words} - {0}
        owners.discard(threading.get_native_id())
        return max((process_of(owner, self._locks) for owner in owners), default=0)

    def _owner(self) -> int:
        """The thread that has LMDB's mutex; 0 for no thread, or when it cannot be told."""
        if self._word is not None:
            return self._word.value & _OWNER
        if self._memory >= 0:
            with contextlib.suppress(OSError):
                return int.from_bytes(os.pread(self._memory, 4, self._address), "little") & _OWNER
        return 0

    def holder(self) -> str:
        """Name the process with the lock, and the remedy, as the end of a sentence."""
        return described(self._holding())

    def state(self) -> str:
        """Name the process that has the lock, if this process can see it."""
        pid = self._holding()
        return f"held {described(pid)}" if pid else "free"

    def _holding(self) -> int:
        owner = self._owner()
        pid = process_of(owner, self._locks) if owner else 0
        if not self.looked:
            pid = self._guessed()
        return pid or _locked_by(self._fd)


def _open(path: str) -> int:
    """A descriptor of the data file, never one of 0 to 2; -1 when the file cannot be opened."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
    if fd > 2:
        return fd
    try:
        return int(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
    finally:
        os.close(fd)


def _locked_by(fd: int) -> int:
    """The process that has the record lock; 0 for none, or for a process in another container."""
    if fd < 0 or sys.platform != "linux":
        return 0
    flock = _FLOCK(fcntl.F_WRLCK, os.SEEK_SET, _AT, 1, 0)
    with contextlib.suppress(OSError):
        answer = _FLOCK.from_buffer_copy(fcntl.fcntl(fd, fcntl.F_GETLK, bytes(flock)))
        if answer.type != fcntl.F_UNLCK:
            return max(0, int(answer.pid))
    return 0


class _FLOCK(ctypes.Structure):
    """``struct flock`` of Linux."""

    _fields_ = (
        ("type", ctypes.c_short),
        ("whence", ctypes.c_short),
        ("start", ctypes.c_int64),
        ("len", ctypes.c_int64),
        ("pid", ctypes.c_int),
    )


def _mapped_at(path: str) -> int:
    """The address at which this process has mapped the beginning of a file; 0 for none."""
    inode = str(os.stat(path).st_ino)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            if fields[4] == inode and int(fields[2], 16) == 0 and fields[1].startswith("rw"):
                return int(fields[0].partition("-")[0], 16)
    return 0
