"""The LMDB environments of this process, and the two files of each.

The stores in an environment share one open object. LMDB must not open the same files twice in one
process, nor use an environment after a fork. So tidemill looks up an open environment by its files,
whether tidemill opened it by a URL or a caller passed it. In a forked child, tidemill opens its own
environments again when the child needs them.

LMDB follows links, and makes missing files with the rights of the first user. So this module makes
both files with the right owner, and checks them, before LMDB opens these (:class:`Place`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import stat
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import lmdb

from tidemill.brokers.lmdb.engine.write_lock import WriteLock
from tidemill.core.config import check_name
from tidemill.core.files import Folder, folder_mode, keep_from_children, take_standard_descriptors
from tidemill.errors import BrokerUnavailable, InvalidOption, StoreFull, TidemillError

_envid: Any
try:
    from lmdb import _envid
except ImportError:
    _envid = None

MAX_DBS = 64
MAX_READERS = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PROBE = 256 << 10
_MOUNTS = "/proc/self/mounts"
_NETWORK_FILESYSTEMS = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "sshfs", "9p", "afs", "ncpfs", "virtiofs", "vboxsf"),
    *("ceph", "ceph-fuse", "glusterfs", "lustre", "gpfs", "beegfs", "orangefs", "pvfs2", "ocfs2"),
    *("gfs2", "moosefs", "mfs", "juicefs", "cephfs", "davfs", "davfs2", "curlftpfs", "rclone"),
    *("s3fs", "s3", "goofys", "geesefs", "mountpoint-s3", "gcsfuse", "blobfuse", "blobfuse2"),
    *("vmhgfs", "vmhgfs-fuse", "prl_fs", "grpcfuse", "osxfs", "seaweedfs", "s3ql"),
}


class Environment:
    """One LMDB environment: tidemill's own, or the caller's when ``env`` is given."""

    # ``path`` is its directory, or its data file; ``folder`` is the folder of tidemill's other
    # files.

    def __init__(
        self,
        path: str,
        *,
        map_size: int = 0,
        sync: bool = True,
        env: lmdb.Environment | None,
        mode: int = 0,
        reading: bool = False,
    ) -> None:
        """``mode`` is the mode of new files; 0 means the mode that the folder gives."""
        # With ``reading``, the environment makes no file and changes nothing.
        self.path = path
        self.sync = sync
        self.ours = env is None
        self.folder = folder_of(path)
        self.users = 0  # the number of open stores in this environment
        self.pid = os.getpid()
        self.reading = reading
        self.mode = mode
        self._map_size = map_size
        if env is None:
            _refuse_network(self.folder)
        self.env = env or self._open()
        self.write_lock = WriteLock(self.data, shared=not self.ours)

    def _open(self) -> lmdb.Environment:
        """Make and check the files, then open them."""
        take_standard_descriptors()
        place = Place(self.path)
        try:
            before = place.check_readable() if self.reading else place.prepare(self.mode)
            lock = not self.reading or place.has_lock
            with place.pinned(lock=lock) as path:
                env = self._opened(path, lock=lock)
            if self.reading:
                _check_length(env, place.path)
            if place.identity() != before:
                env.close()
                raise BrokerUnavailable(
                    f"{place.path} was replaced while it was being opened; try again"
                )
            keep_from_children(before)
        except OSError as error:
            raise BrokerUnavailable(
                f"cannot open the LMDB store in {self.path}: {error.strerror}: {error.filename}"
            ) from error
        finally:
            place.close()
        return env

    def _opened(self, path: str, *, lock: bool) -> lmdb.Environment:
        try:
            with _beside_a_parents() if self.path in _abandoned else contextlib.nullcontext():
                return lmdb.open(
                    path,
                    subdir=os.path.isdir(path),
                    map_size=self._map_size,
                    max_dbs=MAX_DBS,
                    max_readers=MAX_READERS,
                    lib_version=0,
                    readahead=False,
                    sync=self.sync,
                    metasync=True,
                    mode=self.mode or 0o600,
                    readonly=self.reading,
                    create=not self.reading,
                    lock=lock,
                )
        except lmdb.Error as error:
            raise _refused(str(error).replace(path, self.path), self.path) from error

    @property
    def data(self) -> str:
        """The path of the data file."""
        return os.path.join(self.path, "data.mdb") if os.path.isdir(self.path) else self.path

    @property
    def usable(self) -> bool:
        """False when the caller has closed its own environment."""
        if self.ours:
            return True
        try:
            self.env.flags()
        except lmdb.Error:
            return False
        return True

    def ready(self) -> None:
        """Make the environment usable in this process, which may be a fork of its opener."""
        if self.pid == os.getpid():
            return
        if not self.ours:
            raise TidemillError(
                "this process is a fork, and the store lies in an environment opened before: "
                "open the environment and the store again here"
            )
        self.env = self._open()
        self.write_lock = WriteLock(self.data)
        self.pid = os.getpid()

    def abandon(self) -> None:
        """Keep the parent's environment unused and open in a forked child."""
        if self.pid != os.getpid():
            _abandoned[self.path] = self.env
            self.write_lock.abandon()

    def close(self) -> None:
        """Close the environment, unless it is the caller's."""
        busy = self.write_lock.busy
        self.write_lock.close()
        # Close in a thread: LMDB waits for our writer, which waits for other processes.
        if self.ours and busy:
            threading.Thread(target=self.env.close, name="tidemill-close", daemon=True).start()
        elif self.ours:
            self.env.close()


def _check_length(env: lmdb.Environment, path: str) -> None:
    """Refuse a data file that lacks pages, since a read beyond the end of a file is a SIGBUS."""
    # Only commands that read a store check the length. A sound file may lack its last pages for
    # some seconds: LMDB never writes a page that one transaction takes and frees again. So a worker
    # must not refuse such a file.
    needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    size = os.path.getsize(path)
    if size < needed:
        env.close()
        raise BrokerUnavailable(
            f"{path} is truncated: it has {size:,} bytes of {needed:,}; restore it from a backup"
        )


def folder_of(path: str) -> str:
    """The folder of tidemill's files: the environment's directory, or a folder beside its file."""
    return path + ".tidemill" if os.path.isfile(path) else path


def _refused(text: str, path: str) -> BrokerUnavailable:
    """The error for a store that LMDB does not open, with the cause and a remedy."""
    pid = os.getpid()
    # Each process locks the byte of the lock file at the offset of its process id.
    if "Resource temporarily unavailable" in text:
        return BrokerUnavailable(
            f"another process with the process id {pid} has the store in {path} open, in another "
            "container: containers that share a store must share one PID namespace (docker run "
            "--pid=container:NAME, pid: in a compose file, shareProcessNamespace in a pod); or use "
            "http:// (tidemill server), redis:// or postgresql://"
        )
    hint = "; pass that environment as env=" if "already open" in text else ""
    return BrokerUnavailable(f"cannot open the LMDB store in {path}: {text}{hint}")


def _refuse_network(folder: str) -> None:
    """Refuse a network file system: LMDB's locks and mapping do not work across machines."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return
    place = os.path.realpath(folder) + "/"
    inside = [(p, kind) for p, kind in mounts if place.startswith(_unescaped(p).rstrip("/") + "/")]
    path, kind = max(inside, key=lambda mount: len(mount[0]), default=("", ""))
    if kind.removeprefix("fuse.") in _NETWORK_FILESYSTEMS:
        raise BrokerUnavailable(
            f"{folder} lies on {path}, a network file system ({kind}), where LMDB is not safe; "
            "use a local disk, or a redis:// or postgresql:// broker"
        )


def _unescaped(path: str) -> str:
    """Decode a path of the mounts file, in which blanks and backslashes are octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), path)


def translated(error: Exception, folder: str) -> Exception:
    """Translate an error of LMDB into an error of tidemill; return any other error unchanged."""
    ours: TidemillError
    if isinstance(error, OSError) and error.errno in _FULL and no_inode(folder):
        ours = StoreFull(f"the disk of {folder} has no room for another file; delete some there")
    elif isinstance(error, lmdb.MapFullError) or _no_space(error, folder):
        ours = StoreFull(f"the store in {folder} is full; finish or delete jobs, or make room")
    elif isinstance(error, lmdb.Error) and "same thread" in str(error):
        ours = TidemillError(
            "this thread has a write transaction of its own open in the store; "
            "pass it as txn=, or end it first"
        )
    elif isinstance(error, lmdb.Error):
        ours = BrokerUnavailable(f"the LMDB store in {folder}: {error}")
    else:
        return error
    ours.__cause__ = error
    return ours


def _no_space(error: Exception, folder: str) -> bool:
    """Whether a write failed for lack of room on the disk, or in a quota."""
    # LMDB reports both a short write and a broken disk as an input/output error.
    if not isinstance(error, (lmdb.Error, OSError)):
        return False
    text = str(error)
    if any(why in text for why in ("No space", "quota exceeded", "File too large")):
        return True
    return "Input/output error" in text and not _takes_more(folder)


def no_inode(folder: str) -> bool:
    """Whether the disk takes no more files. Some file systems do not count files."""
    disk = os.statvfs(folder)
    return disk.f_files > 0 and not disk.f_favail


def _takes_more(folder: str) -> bool:
    """Whether a file of 256 KiB can be written in a folder."""
    try:
        fd, name = tempfile.mkstemp(".probe", dir=folder)
    except OSError as error:
        return error.errno not in _FULL
    try:
        os.unlink(name)
        return os.write(fd, bytes(_PROBE)) == _PROBE
    except OSError as error:
        return error.errno not in _FULL
    finally:
        os.close(fd)


# Environments of a parent process, by path. The child never closes these: closing would free the
# parent's reader slots, and writers could write over pages that the parent is reading.
_abandoned: dict[str, lmdb.Environment] = {}


@contextlib.contextmanager
def _beside_a_parents() -> Iterator[None]:
    """Let py-lmdb open files that a parent process had open before the fork."""
    # py-lmdb refuses to open an environment twice in one process. For py-lmdb, the parent's
    # environment is an environment of this process, although this process cannot use it. The module
    # that decides this is private: another release of py-lmdb may lack it.
    keys = getattr(_envid, "env_keys", None)
    if keys is not None:
        _envid.env_keys = lambda path, subdir: ()
    try:
        yield
    except lmdb.Error as error:
        if keys is not None or "already open" not in str(error):
            raise
        raise BrokerUnavailable(
            "this process is a fork of a process that had the store open, and this release of "
            "py-lmdb opens no store twice: open the store after the fork, or install lmdb 3.0.0"
        ) from error
    finally:
        if keys is not None:
            _envid.env_keys = keys


Identity = tuple[int, int]  # device and inode of a data file; (0, 0) for none


# -- the two files of an environment -------------------------------------------------------------


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
        """The identity of a store that is to be read and not changed."""
        if not self.identity()[1] or not os.stat(self.path).st_size:
            raise BrokerUnavailable(f"there is no store in {self.folder.path}")
        self._check_access(self.data, os.R_OK)
        if self._found(self.lock) is not None:
            self._check_access(self.lock, os.R_OK | os.W_OK)
        return self.identity()

    @contextlib.contextmanager
    def pinned(self, *, lock: bool) -> Iterator[str]:
        """Give a path, valid during the ``with`` block, by which LMDB opens the present files."""
        # LMDB follows links, and writes to the lock file at once. When root opens the store of
        # another user, the path leads through descriptors. Then the other user cannot replace the
        # files.
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
        """The status of a file; None when the file is missing."""
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
        if os.path.basename(path) == ".tidemill":  # the default folder, beside the user's code
            with contextlib.suppress(FileExistsError), open(f"{path}/.gitignore", "x") as file:
                file.write("*\n")


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
    """Flush a folder, and the folders above it, to disk."""
    # Commits flush only the content of the data file. Without this flush, a power cut could remove
    # the entry of the file in its folder.
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
    """Describe the files of a store that the folder's owner, or this user, may not write."""
    # A file of another user counts as writable if the folder's group, or everybody, may write it.
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
