"""Safely make, open and remove files that several users and several mounts share.

A :class:`Folder` holds a directory by its descriptor. So the Folder stays with its directory when
the path is moved, deleted or reused. A Folder follows no symbolic links.

A new file takes the owner, the group and the write permissions of its folder. So a file that root
makes in a service user's folder belongs to that user. Each method opens only the kind it expects:
a regular file, a FIFO or a folder. A file of another kind raises an error of one sentence.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from collections.abc import Iterator

from tidemill.errors import BrokerUnavailable

_OPENED = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_PATH_ONLY = getattr(os, "O_PATH", 0)
_FIRST = 3  # the first descriptor after standard input, standard output and standard error


def take_standard_descriptors() -> None:
    """Open ``/dev/null`` on each closed descriptor of 0, 1 and 2."""
    # Without this, the next file or socket would get number 2, and error texts would go into it.
    for fd in range(_FIRST):
        try:
            fcntl.fcntl(fd, fcntl.F_GETFD)
        except OSError:
            with contextlib.suppress(OSError):
                opened = os.open(os.devnull, os.O_RDWR)
                if opened < _FIRST:
                    os.set_inheritable(opened, True)
                else:  # the number is in use again: another thread has opened a file
                    os.close(opened)


def raised(fd: int) -> int:
    """The same open file, on a descriptor of 3 or more."""
    if fd >= _FIRST:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(fd)


def keep_from_children(identity: tuple[int, int]) -> None:
    """Keep children from inheriting descriptors of the file with this device and inode."""
    # LMDB opens its data file without ``O_CLOEXEC``.
    here = next(path for path in ("/proc/self/fd", "/dev/fd") if os.path.isdir(path))
    for name in os.listdir(here):
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed by now
            found = os.fstat(int(name))
            if (found.st_dev, found.st_ino) == identity and os.get_inheritable(int(name)):
                os.set_inheritable(int(name), False)


def private_folder() -> str:
    """The folder of this user's processes among the temporary files of this machine.

    Its name has the number of the user. If another user has made a folder or link of this name, the
    name gets a further number. All processes of the user find the folder that the first one made,
    also after the other user has given the usual name free.
    """
    import tempfile

    usual = os.path.join(tempfile.gettempdir(), f"tidemill-{os.geteuid()}")
    while not (mine := list(filter(is_mine, _private_paths(usual)))):
        for number in itertools.count():
            path = f"{usual}.{number}" if number else usual
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            if is_mine(path):
                break
    return mine[0]


def _private_paths(usual: str) -> list[str]:
    """The paths that exist: ``usual``, and ``usual`` with a further number, in order."""
    above, name = os.path.split(usual)
    entries = os.listdir(above)
    ends = (one.removeprefix(f"{name}.") for one in entries if one.startswith(f"{name}."))
    numbers = sorted(int(end) for end in ends if end.isdecimal())
    return [usual] * (name in entries) + [f"{usual}.{number}" for number in numbers]


def is_mine(path: str) -> bool:
    """True for a folder of this user; False for a link."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def folder_mode(mode: int) -> int:
    """The mode of a folder whose files have ``mode``: readers of the files may enter the folder."""
    return mode | (mode & 0o444) >> 2


def _file_mode(folder: int) -> int:
    # Users who may make files in the folder may read and write its files. In a sticky folder this
    # holds only for the owner and the group.
    mode = 0o600
    if folder & stat.S_IWGRP:
        mode |= 0o060
    if folder & stat.S_IWOTH and not folder & stat.S_ISVTX:
        mode |= 0o006
    return mode


def create_file(path: str) -> int:
    with contextlib.closing(Folder(os.path.dirname(path) or ".")) as folder:
        return folder.create(os.path.basename(path))


class Folder:
    """A directory, held open. Its methods take the names of its entries."""

    fd = -1

    def __init__(self, path: str, fd: int = -1) -> None:
        """Hold the directory at ``path``, or the directory that is open as ``fd``."""
        self.path = path
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self.fd = raised(fd if fd >= 0 else os.open(path, flags))

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    @property
    def there(self) -> bool:
        """False when the directory was deleted."""
        return os.fstat(self.fd).st_nlink > 0

    # -- making ---------------------------------------------------------------------------------

    def folder(self, name: str, mode: int = 0, *, make: bool = True) -> Folder:
        """The folder ``name`` in this folder, made if missing. Its files have ``mode``."""
        made = False
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.fd)
                made = True
            self.mend(name)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._named(name, "a folder"):
            fd = raised(os.open(name, flags, dir_fd=self.fd))
        if made:
            above = os.fstat(self.fd).st_mode
            wanted = folder_mode(mode or _file_mode(above)) | above & stat.S_ISGID
            self._give(fd, wanted)
        return Folder(os.path.join(self.path, name), fd)

    def make(self, name: str, mode: int = 0) -> int:
        """Make the regular file ``name``, which must not exist; a descriptor that reads and writes.

        A ``mode`` of 0 stands for the mode of new files in this folder.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPENED
        fd = raised(os.open(name, flags, 0o600, dir_fd=self.fd))
        self._give(fd, mode or self.mode)
        return fd

    def create(self, name: str) -> int:
        """A descriptor that reads and writes the regular file ``name``, made if missing."""
        with contextlib.suppress(FileExistsError):
            return self.make(name)
        self.mend(name)
        return self.open(name, os.O_RDWR)

    def make_fifo(self, name: str, flags: int) -> int:
        """Make the FIFO ``name``, which must not exist, and open it."""
        os.mkfifo(name, 0o600, dir_fd=self.fd)
        fd = self.open_fifo(name, flags)
        self._give(fd, self.mode)
        return fd

    @property
    def led(self) -> bool:
        """True when root uses another user's folder, and :meth:`hold` can refuse links."""
        return os.geteuid() == 0 != os.fstat(self.fd).st_uid and bool(_PATH_ONLY)

    @property
    def mode(self) -> int:
        return _file_mode(os.fstat(self.fd).st_mode)

    def _give(self, fd: int, mode: int) -> None:
        """Give a new file to the owner and the group of this folder, with ``mode``."""
        above, found = os.fstat(self.fd), os.fstat(fd)
        owner = above.st_uid if os.geteuid() == 0 and found.st_uid != above.st_uid else -1
        group = above.st_gid if found.st_gid != above.st_gid else -1
        if (owner, group) != (-1, -1):
            with contextlib.suppress(PermissionError):  # raised when this user is not in the group
                os.fchown(fd, owner, group)
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            os.fchmod(fd, mode)

    def mend(self, name: str) -> None:
        """When root runs this, give a file of root in this folder to the owner of the folder."""
        # The file is not opened: closing a lock file would end the locks that LMDB holds on it.
        if not self.led:
            return
        above = os.fstat(self.fd)
        with contextlib.suppress(OSError):
            fd = os.open(name, _PATH_ONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                found = os.fstat(fd)
                kind = stat.S_IFMT(found.st_mode)
                # Leave a file with a second hard link alone: it may also belong to another folder.
                # Folders have no second hard links.
                plain = kind in (stat.S_IFREG, stat.S_IFIFO) and found.st_nlink == 1
                if found.st_uid == 0 and (plain or kind == stat.S_IFDIR):
                    os.chown(f"/proc/self/fd/{fd}", above.st_uid, above.st_gid)
            finally:
                os.close(fd)

    # -- opening --------------------------------------------------------------------------------

    def open(self, name: str, flags: int) -> int:
        """A descriptor of the regular file ``name``; BrokerUnavailable for another kind."""
        with self._named(name, "a regular file"):
            fd = raised(os.open(name, flags | _OPENED, dir_fd=self.fd))
        return self._checked(fd, name, stat.S_ISREG(os.fstat(fd).st_mode), "a regular file")

    def hold(self, name: str) -> int:
        """A descriptor that names the regular file ``name``; its end releases no lock (Linux)."""
        fd = os.open(name, _PATH_ONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        return self._checked(fd, name, stat.S_ISREG(os.fstat(fd).st_mode), "a regular file")

    def open_fifo(self, name: str, flags: int) -> int:
        """A descriptor of the FIFO ``name``; never blocks. BrokerUnavailable for another kind."""
        with self._named(name, "a FIFO"):
            fd = raised(os.open(name, flags | _OPENED, dir_fd=self.fd))
        return self._checked(fd, name, stat.S_ISFIFO(os.fstat(fd).st_mode), "a FIFO")

    def _checked(self, fd: int, name: str, good: bool, kind: str) -> int:
        if not good:
            os.close(fd)
            raise self._refused(name, kind)
        return fd

    @contextlib.contextmanager
    def _named(self, name: str, kind: str) -> Iterator[None]:
        """Report a link, or an entry of another kind, in one sentence."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK, errno.EISDIR):
                raise self._refused(name, kind) from error
            raise

    def _refused(self, name: str, kind: str) -> BrokerUnavailable:
        path = os.path.join(self.path, name)
        return BrokerUnavailable(f"{path} is not {kind}; tidemill did not make it: move it away")

    # -- looking and removing -------------------------------------------------------------------

    def names(self) -> list[str]:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def stat(self, name: str) -> os.stat_result | None:
        """The status of an entry, without following links; None when there is none."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> bool:
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return False
        return True

    def discard(self, name: str) -> None:
        """Remove the folder ``name`` with its files, also while a process holds it open."""
        aside = f"{name}.gone-{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            self.rename(name, aside)
            with contextlib.closing(self.folder(aside, make=False)) as folder:
                for entry in folder.names():
                    folder.remove(entry)
            os.rmdir(aside, dir_fd=self.fd)

    def rename(self, name: str, to: str) -> None:
        os.rename(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def touch(self, name: str) -> None:
        os.utime(name, dir_fd=self.fd, follow_symlinks=False)

    def sync(self) -> None:
        os.fsync(self.fd)
