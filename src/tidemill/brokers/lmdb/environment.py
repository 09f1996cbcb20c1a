"""The LMDB environments of this process: each is opened once, and shared by the stores in it.

LMDB must not open the same files twice in one process, nor use an environment after a fork. So an
environment is found again by its files, whoever opened it: us, by a URL, or the caller, who passed
it to us. In a forked child ours are opened anew when first needed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import lmdb
import lmdb._envid

from tidemill.errors import BrokerUnavailable, StoreFull, TidemillError

__all__ = ["Environment", "folder_of", "translated"]

MAX_DBS = 64
MAX_READERS = 4096
_MOUNTS = "/proc/self/mounts"
_NETWORK_FILESYSTEMS = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "9p", "ceph", "glusterfs"),
}


class Environment:
    """One LMDB environment: ours, or the caller's when ``env`` is given.

    ``path`` is its directory, or its data file; ``folder`` is where our own files lie beside it.
    """

    def __init__(
        self, path: str, *, map_size: int = 0, sync: bool = True, env: lmdb.Environment | None
    ) -> None:
        self.path = path
        self.sync = sync
        self.ours = env is None
        self.folder = folder_of(path)
        self.users = 0  # stores in it
        self.pid = os.getpid()
        self._map_size = map_size
        if env is None:
            _refuse_network(self.folder)
        self.env = env or self._open()

    def _open(self) -> lmdb.Environment:
        try:
            with _beside_a_parents() if self.path in _abandoned else contextlib.nullcontext():
                return lmdb.open(
                    self.path,
                    subdir=os.path.isdir(self.path),
                    map_size=self._map_size,
                    max_dbs=MAX_DBS,
                    max_readers=MAX_READERS,
                    lib_version=0,
                    readahead=False,
                    sync=self.sync,
                    metasync=True,
                    mode=0o600,
                )
        except lmdb.Error as error:
            hint = "; pass that environment as env=" if "already open" in str(error) else ""
            raise BrokerUnavailable(
                f"cannot open the LMDB store in {self.path}: {error}{hint}"
            ) from error

    @property
    def usable(self) -> bool:
        """False when it is the caller's, who has closed it."""
        if self.ours:
            return True
        try:
            self.env.flags()
        except lmdb.Error:
            return False
        return True

    def ready(self) -> None:
        """Make it usable in this process, which may be a fork of the one that opened it.

        Raises:
            TidemillError: it is the caller's.
        """
        if self.pid == os.getpid():
            return
        if not self.ours:
            raise TidemillError(
                "this process is a fork, and the store lies in an environment opened before: "
                "open the environment and the store again here"
            )
        self.env = self._open()
        self.pid = os.getpid()

    def abandon(self) -> None:
        """In a forked child: the parent's environment is not ours to use."""
        if self.pid != os.getpid():
            _abandoned[self.path] = self.env

    def close(self) -> None:
        """Close it, unless it is the caller's."""
        if self.ours:
            self.env.close()


def folder_of(path: str) -> str:
    """Where our own files lie: in the environment's directory, or beside its single file."""
    return path + ".tidemill" if os.path.isfile(path) else path


def _refuse_network(folder: str) -> None:
    """LMDB's locks and mapping do not work across machines.

    Raises:
        BrokerUnavailable: the folder lies on a network file system.
    """
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return
    place = os.path.realpath(folder) + "/"
    inside = [(p, kind) for p, kind in mounts if place.startswith(_unescaped(p).rstrip("/") + "/")]
    path, kind = max(inside, key=lambda mount: len(mount[0]), default=("", ""))
    if kind in _NETWORK_FILESYSTEMS:
        raise BrokerUnavailable(
            f"{folder} lies on {path}, a network file system ({kind}), where LMDB is not safe; "
            "use a local disk, or a redis:// or postgresql:// broker"
        )


def _unescaped(path: str) -> str:
    """A path as the mounts file writes it: blanks and the like as octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), path)


def translated(error: Exception, folder: str) -> Exception:
    """A driver's error as one of ours; any other as it is."""
    ours: TidemillError
    no_space = isinstance(error, (lmdb.Error, OSError)) and "No space" in str(error)
    if isinstance(error, lmdb.MapFullError) or no_space:
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


# Environments of a parent process, by path. Never closed: that would free the parent's own reader
# slots, and pages it is reading could be written over.
_abandoned: dict[str, lmdb.Environment] = {}


@contextlib.contextmanager
def _beside_a_parents() -> Iterator[None]:
    """Let py-lmdb open files that a parent process had open before the fork.

    It refuses to open an environment twice in one process, and takes the parent's, which is of no
    use here, for one of ours.
    """
    guard = lmdb._envid
    keys = guard.env_keys
    guard.env_keys = lambda path, subdir: ()
    try:
        yield
    finally:
        guard.env_keys = keys
