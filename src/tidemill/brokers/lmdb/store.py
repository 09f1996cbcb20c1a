"""The environment: opened once per process, written by one leader at a time, safe across fork.

Group commit: a caller appends its request and tries to lead. The leader begins the transaction (and
waits there for other processes), takes all requests that have arrived meanwhile, applies each,
commits once, and wakes the others. When one request fails, the transaction is abandoned and each is
replayed by itself, so that only the culprit sees its error.

Each LMDB call gives up the interpreter lock. With threads that compute, getting it back takes a
whole switch interval (5 ms) a call, with every other process locked out of the store meanwhile: one
busy thread cut 500,000 operations a second to 2,500. While a transaction is open the interval is
therefore 10 µs.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import lmdb

from tidemill.brokers.lmdb.layout import FORMAT, NUMBER, Tables, open_tables
from tidemill.brokers.lmdb.wake import Bells
from tidemill.errors import BrokerUnavailable, InvalidOption, StoreFull, TidemillError
from tidemill.shield import lower_shield, raise_shield

__all__ = ["MAP_SIZE", "Store", "close_store", "open_store"]

T = TypeVar("T")
MAP_SIZE = 1 << 38
"""Address space, not disk: the file is as large as what is in it."""

MAX_READERS = 4096
_BUSY_INTERVAL = 1e-5
_NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "9p", "ceph", "glusterfs"}


class _Request:
    """One caller's part of a commit."""

    __slots__ = ("apply", "done", "error", "result", "turn")

    def __init__(self, apply: Callable[[Any], Any]) -> None:
        self.apply = apply
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.turn = threading.Lock()
        self.turn.acquire()


class Store:
    """One LMDB environment with tidemill's tables, and the files beside it.

    ``make`` builds the transaction context of :mod:`.moves` around an LMDB write transaction.
    """

    def __init__(
        self, folder: str, *, map_size: int = MAP_SIZE, sync: bool = True, prefix: str = "tidemill-"
    ) -> None:
        self.folder = folder
        self.sync = sync
        self._prefix = prefix.encode()
        self._map_size = map_size
        self._own_env = True
        os.makedirs(folder, exist_ok=True)
        self._refuse_network(folder)
        self._open(None)

    @classmethod
    def around(cls, env: lmdb.Environment, prefix: str) -> Store:
        """A store inside the caller's own environment."""
        store = cls.__new__(cls)
        path = env.path()
        store.folder = path if os.path.isdir(path) else path + ".tidemill"
        store.sync = bool(env.flags()["sync"])
        store._prefix = prefix.encode()
        store._map_size = env.info()["map_size"]
        store._own_env = False
        os.makedirs(store.folder, exist_ok=True)
        store._open(env)
        return store

    def _open(self, env: lmdb.Environment | None) -> None:
        self.users = 0
        self.pid = os.getpid()
        self._lead = threading.Lock()
        self._pending: collections.deque[_Request] = collections.deque()
        self._leader = 0  # thread that has the transaction open
        self._space_checked = 0.0
        self._space = ""
        try:
            self.env = env or lmdb.open(
                self.folder,
                map_size=self._map_size,
                max_dbs=32,
                max_readers=MAX_READERS,
                lib_version=0,
                readahead=False,
                sync=self.sync,
                metasync=True,
                mode=0o600,
            )
            self.tables: Tables = open_tables(self.env, self._prefix)
        except lmdb.DbsFullError as error:
            raise InvalidOption(
                f"the environment has no room for {len(Tables._fields)} more databases; "
                "open it with a larger max_dbs"
            ) from error
        except lmdb.Error as error:
            raise BrokerUnavailable(f"cannot open the LMDB store in {self.folder}: {error}") from error
        self._check_format()
        self.env.reader_check()
        self.bells = Bells(os.path.join(self.folder, "wake"))

    def _check_format(self) -> None:
        key = self.key("format")
        with self.env.begin(write=True) as txn:
            found = txn.get(key)
            if found is None:
                txn.put(key, NUMBER.pack(FORMAT))
            elif NUMBER.unpack(found)[0] != FORMAT:
                raise BrokerUnavailable(
                    f"the store in {self.folder} has format {NUMBER.unpack(found)[0]}, "
                    f"this tidemill reads format {FORMAT}; install the version that wrote it"
                )

    @staticmethod
    def _refuse_network(folder: str) -> None:
        """LMDB's locks and mapping do not work across machines."""
        try:
            with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
                mounts = [line.split()[1:3] for line in file]
        except OSError:
            return
        inside = [(p, kind) for p, kind in mounts if os.path.realpath(folder).startswith(p.rstrip("/") + "/")]
        path, kind = max(inside, key=lambda mount: len(mount[0]), default=("", ""))
        if kind in _NETWORK_FILESYSTEMS:
            raise BrokerUnavailable(
                f"{folder} lies on {path}, a network file system ({kind}), where LMDB is not safe; "
                "use a local disk, or a redis:// or postgresql:// broker"
            )

    def key(self, name: str) -> bytes:
        """A key of the main database, under the caller's prefix."""
        return self._prefix + b"=" + name.encode()

    # -- group commit ---------------------------------------------------------------------------

    def commit(self, make: Callable[[Store, lmdb.Transaction[bytes]], Any], apply: Callable[[Any], T]) -> T:
        """Run ``apply(context)`` in a write transaction and return its result once it is durable.

        Raises:
            whatever ``apply`` raises, having changed nothing; StoreFull; BrokerUnavailable.
        """
        if self._leader == threading.get_ident():
            raise TidemillError("this call would wait for itself: it was made inside a store step")
        request = _Request(apply)
        raise_shield()
        try:
            self._pending.append(request)
            if not self._lead.acquire(blocking=False):
                request.turn.acquire()  # until a leader has done it, or hands the lead over
                if request.done:
                    return self._answer(request)
            try:
                self._run(make)
            finally:
                self._pass_on()
        finally:
            lower_shield()
        return self._answer(request)

    @staticmethod
    def _answer(request: _Request) -> Any:
        if request.error is not None:
            raise request.error
        return request.result

    def _run(self, make: Callable[..., Any]) -> None:
        """With the lead: one transaction for everything pending once it has begun."""
        batch: list[_Request] = []
        try:
            with self.writing() as txn:
                self._drain(batch)
                context = make(self, txn)
                for request in batch:
                    request.result = request.apply(context)
                context.finish()
        except Exception as error:
            if not batch:  # the transaction could not even begin
                self._drain(batch)
            if len(batch) == 1:
                batch[0].error = self._translated(error)
            else:
                self._replay(make, batch)
        except BaseException:  # Ctrl-C in the leader: nothing happened, the others try again
            self._pending.extendleft(reversed(batch[1:]))
            raise
        for request in batch:
            request.done = True
            request.turn.release()

    def _drain(self, batch: list[_Request]) -> None:
        """Take what is pending. The deque is never replaced: an append may be under way."""
        for _ in range(len(self._pending)):
            batch.append(self._pending.popleft())

    def _replay(self, make: Callable[..., Any], batch: list[_Request]) -> None:
        for request in batch:
            try:
                with self.writing() as txn:
                    context = make(self, txn)
                    request.result = request.apply(context)
                    context.finish()
            except Exception as error:
                request.error = self._translated(error)

    def _pass_on(self) -> None:
        """Give up the lead, to somebody who came while the transaction was committed, if any.

        Whoever appends a request and then fails to take the lead did so before the release here, so
        that the second look at ``_pending`` sees the request.
        """
        while True:
            self._lead.release()
            if not self._pending or not self._lead.acquire(blocking=False):
                return
            if self._pending:
                self._pending[0].turn.release()  # it wakes as the leader: not done, lead held
                return

    @contextlib.contextmanager
    def writing(self) -> Iterator[lmdb.Transaction[bytes]]:
        """A write transaction with the short switch interval around it."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_BUSY_INTERVAL)
        try:
            with self.env.begin(write=True) as txn:
                self._leader = threading.get_ident()
                yield txn
        finally:
            self._leader = 0
            sys.setswitchinterval(interval)

    def _translated(self, error: Exception) -> Exception:
        if isinstance(error, lmdb.MapFullError) or (
            isinstance(error, (lmdb.DiskError, OSError)) and "No space" in str(error)
        ):
            self._space_checked = 0.0
            full = StoreFull(f"the store in {self.folder} is full; finish or delete jobs, or make room")
            full.__cause__ = error
            return full
        if isinstance(error, lmdb.Error):
            broken = BrokerUnavailable(f"the LMDB store in {self.folder}: {error}")
            broken.__cause__ = error
            return broken
        return error

    # -- the reserve ----------------------------------------------------------------------------

    def reserve(self) -> int:
        """Bytes of disk that puts leave free, so that finishing and draining always work."""
        total = shutil.disk_usage(self.folder).total
        return min(64 << 20, max(1 << 20, total // 10))

    def check_space(self) -> None:
        """Refuse when the disk or the map is down to its reserve; looks at most every 50 ms.

        Raises:
            StoreFull: naming which.
        """
        now = time.monotonic()
        if now - self._space_checked > 0.05:
            self._space_checked = now
            self._space = self._find_shortage()
        if self._space:
            raise StoreFull(self._space)

    def _find_shortage(self) -> str:
        free = shutil.disk_usage(self.folder).free
        if free < self.reserve():
            return (
                f"the disk of {self.folder} has {free >> 20} MiB left, less than the reserve of "
                f"{self.reserve() >> 20} MiB; make room, or finish or delete jobs"
            )
        info = self.env.info()
        size = info["map_size"]
        if info["last_pgno"] * 4096 < size * 3 // 4:
            return ""
        used = self.used_bytes()
        if used > size * 3 // 4:
            return (
                f"the map of {self.folder} has {size >> 20} MiB of which {used >> 20} MiB are used; "
                "a quarter is kept to finish work. Use a larger map_size, or finish or delete jobs"
            )
        return ""

    def used_bytes(self) -> int:
        """Bytes of pages in use; the rest of the file is free for reuse."""
        with self.env.begin() as txn:
            stats = [txn.stat(table) for table in self.tables]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return pages * stats[0]["psize"]

    @property
    def ballast(self) -> str:
        """A file that takes up room until the disk is full, and is then given up."""
        return os.path.join(self.folder, "ballast")

    def keep_ballast(self) -> None:
        """Make the ballast when there is room for it."""
        size = self.reserve() // 2
        with contextlib.suppress(OSError):
            if os.path.exists(self.ballast) and os.path.getsize(self.ballast) >= size:
                return
            if shutil.disk_usage(self.folder).free > 3 * self.reserve():
                with open(self.ballast, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, size) if hasattr(
                        os, "posix_fallocate"
                    ) else file.write(b"\0" * size)

    def drop_ballast(self) -> bool:
        """Give the ballast up; True when there was some."""
        try:
            os.unlink(self.ballast)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            return False
        return True

    # -- processes ------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """No thread of ours is inside a transaction when the process is copied."""
        self._lead.acquire()

    def after_fork_parent(self) -> None:
        """Go on."""
        self._pass_on()

    def after_fork_child(self) -> None:
        """The parent's environment is not ours to use: open another."""
        _abandoned.append((self.env, self.bells))
        users = self.users
        if self._own_env:
            self._open(None)
            self.users = users

    def close(self) -> None:
        """Close the environment, unless it is the caller's."""
        self.bells.close()
        if self._own_env:
            self.env.close()


_abandoned: list[object] = []  # kept for ever: closing them in a child would touch the parent's locks
_stores: dict[tuple[int, int], Store] = {}
_stores_lock = threading.Lock()


def open_store(folder: str, *, map_size: int, sync: bool) -> Store:
    """The store of a directory: the same one however often a process asks for it."""
    with _stores_lock:
        os.makedirs(folder, exist_ok=True)
        stat = os.stat(folder)
        key = (stat.st_dev, stat.st_ino)
        store = _stores.get(key)
        if store is None:
            store = _stores[key] = Store(os.path.realpath(folder), map_size=map_size, sync=sync)
        elif store.sync != sync:
            raise InvalidOption(
                f"the store in {folder} is open in this process with another durability; use one"
            )
        store.users += 1
        return store


def close_store(store: Store) -> None:
    """Give a store back; the last one out closes it."""
    with _stores_lock:
        store.users -= 1
        if store.users <= 0:
            for key in [k for k, s in _stores.items() if s is store]:
                del _stores[key]
            store.close()


def _all_stores() -> list[Store]:
    return list(_stores.values())


def _before_fork() -> None:
    _stores_lock.acquire()
    for store in _all_stores():
        store.before_fork()


def _after_fork_parent() -> None:
    for store in _all_stores():
        store.after_fork_parent()
    _stores_lock.release()


def _after_fork_child() -> None:
    for store in _all_stores():
        store.after_fork_child()
    _stores_lock.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_parent,
    after_in_child=_after_fork_child,
)
