"""Make the two files of an LMDB environment with the right owner, and check them.

LMDB follows links, and makes missing files with the rights of the first user. So this module makes
and checks both files before LMDB opens these.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import tempfile
import time
import urllib.parse
from collections.abc import Iterator

from tidemill.core.config import check_name
from tidemill.core.errors import BrokerUnavailable, InvalidOption
from tidemill.core.files import Folder, folder_mode

Identity = tuple[int, int]
"""Device and inode of a data file; (0, 0) for none."""


class Place:
    """The place of the data file and the lock file of the environment at ``path``."""

    def __init__(self, path: str) -> None:
        # True when ``path`` is a folder, which only the store uses.
        self.within = os.path.isdir(path)
        if self.within:
            above, self.data, self.lock = path, "data.mdb", "lock.mdb"
        else:
            above, self.data = os.path.split(path)
            self.lock = self.data + "-lock"
        self.folder = Folder(above or ".")
        self.path = os.path.join(above, self.data)

    def close(self) -> None:
        """Close the folder's descriptor."""
        self.folder.close()

    def prepare(self, mode: int) -> Identity:
        """Make the missing files, with ``mode`` or the folder's mode; return the identity.

        Raises:
            BrokerUnavailable: a name belongs to a link or a special file, the data file of a used
                store is empty, or this user may not write a file.
        """
        found = self._found(self.data)
        if found is not None and not found.st_size and self.folder.stat("wake") is not None:
            raise BrokerUnavailable(
                f"{self.path} is empty, though the store was in use; restore it from a backup, or "
                f"delete {self.folder.path} to begin anew"
            )
        for name in (self.data, self.lock):
            if self._found(name) is None:
                with contextlib.suppress(FileExistsError):
                    os.close(self.folder.make(name, mode))
            self.folder.mend(name)
            self._check_access(name, os.R_OK | os.W_OK)
        # Open the data file now: an overlay file system replaces a file of a lower layer by a copy
        # when a process first opens the file for writing.
        os.close(self.folder.open(self.data, os.O_RDWR))
        return self.identity()

    def check_readable(self) -> Identity:
        """The identity of a store that is to be read and not changed.

        Raises:
            BrokerUnavailable: there is no store, or this user may not read it.
        """
        if not self.identity()[1] or not os.stat(self.path).st_size:
            raise BrokerUnavailable(f"there is no store in {self.folder.path}")
        self._check_access(self.data, os.R_OK)
        if self._found(self.lock) is not None:
            self._check_access(self.lock, os.R_OK | os.W_OK)
        return self.identity()

    @contextlib.contextmanager
    def pinned(self, *, lock: bool) -> Iterator[str]:
        """Give a path, valid during the ``with`` block, by which LMDB opens the present files.

        LMDB follows links, and writes to the lock file at once. When root opens the store of
        another user, the path leads through descriptors. Then the other user cannot replace the
        files.
        """
        if not self.folder.led:
            yield os.path.dirname(self.path) if self.within else self.path
            return
        with contextlib.ExitStack() as stack:
            private = stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-open-"))
            for name in (self.data, self.lock) if lock else (self.data,):
                fd = self.folder.hold(name)
                stack.callback(os.close, fd)
                os.symlink(f"/proc/self/fd/{fd}", os.path.join(private, name))
            yield private if self.within else os.path.join(private, self.data)

    @property
    def has_lock(self) -> bool:
        """False when the lock file is missing: then no process has the environment open."""
        return self._found(self.lock) is not None

    def identity(self) -> Identity:
        """The identity of the file that now has the name of the data file."""
        found = self._found(self.data)
        return (found.st_dev, found.st_ino) if found is not None else (0, 0)

    def _found(self, name: str) -> os.stat_result | None:
        """The status of a file; None when the file is missing.

        Raises:
            BrokerUnavailable: the name belongs to a link, or to a special file.
        """
        found = self.folder.stat(name)
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise BrokerUnavailable(
                f"{os.path.join(self.folder.path, name)} is not a regular file; a store has no "
                "links and no special files: move it away, or put the file in its place"
            )
        return found

    def _check_access(self, name: str, how: int) -> None:
        if os.access(name, how, dir_fd=self.folder.fd, effective_ids=True):
            return
        found = self._found(name)
        if found is not None:
            path, owner = os.path.join(self.folder.path, name), _user(found.st_uid)
            verb = "write" if how & os.W_OK else "read"
            why = ", where readers register" if name == self.lock and not how & os.X_OK else ""
            raise BrokerUnavailable(
                f"{_user(os.geteuid())} may not {verb} {path}{why}: the file belongs to {owner}, "
                f"mode {stat.S_IMODE(found.st_mode):04o}; use chown or chmod, or run as {owner}"
            )


def make_folder(path: str, mode: int = 0) -> None:
    """Make a store's folder when it is missing; ``mode`` is the mode of the files in it."""
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)
        if mode:
            os.chmod(path, folder_mode(mode))


def make_copy(path: str, original: str) -> int:
    """Make a file, and its folder, with group and mode of ``original``; return a descriptor."""
    found = os.stat(original)
    mode = stat.S_IMODE(found.st_mode) & 0o666
    above = os.path.dirname(path)
    if not os.path.isdir(above):
        os.makedirs(os.path.dirname(above), exist_ok=True)
        os.mkdir(above, 0o700)
        with contextlib.closing(Folder(above)) as folder:
            _share(folder.fd, folder_mode(mode), found.st_gid)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    _share(fd, mode, found.st_gid)
    return fd


def _share(fd: int, mode: int, group: int) -> None:
    """Give a new file a group and a mode; if the group cannot be set, groups get no rights."""
    with contextlib.suppress(PermissionError):  # fails when this user is not in the group
        os.fchown(fd, -1, group)
    os.fchmod(fd, mode if os.fstat(fd).st_gid == group else mode & ~0o070)


def flush_folders(path: str) -> None:
    """Flush a folder, and the folders above it, to disk.

    Commits flush only the content of the data file. Without this flush, a power cut could remove
    the entry of the file in its folder.
    """
    device = os.stat(path).st_dev
    while True:
        with contextlib.suppress(OSError):  # fails for a folder that this user may not read
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_dev != device:
                    return
                os.fsync(fd)
            finally:
                os.close(fd)
        path, below = os.path.dirname(path), path
        if path == below:
            return


def foreign_files(folder: str) -> list[str]:
    """Describe the files of a store that the folder's owner, or this user, may not write.

    A file of another user counts as writable if the folder's group, or everybody, may write it.
    """
    above = os.stat(folder)
    found: list[str] = []
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            # Fails when the file was removed a moment ago.
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                shared = above.st_gid == status.st_gid and status.st_mode & stat.S_IWGRP
                open_to_all = status.st_mode & stat.S_IWOTH
                if status.st_uid != above.st_uid and not shared and not open_to_all:
                    found.append(f"{path} belongs to {_user(status.st_uid)}")
                elif not os.access(path, os.W_OK, effective_ids=True):
                    found.append(f"{path} is closed to {_user(os.geteuid())}")
    return found


def sync_time(folder: str) -> float:
    """Seconds that a sync of the store's disk takes; pending writes are synced too."""
    fd = os.open(os.path.join(folder, "data.mdb"), os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = time.monotonic()
        os.fsync(fd)
        return time.monotonic() - before
    finally:
        os.close(fd)


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that is no name, or too long to be part of a file's name."""
    check_name("prefix", prefix)
    if len(urllib.parse.quote(prefix, safe="")) > 200:
        raise InvalidOption(f"prefix {prefix[:20]!r}… is too long; take a shorter one")
