"""The environment: opened once per process, written by one leader at a time, safe across fork.

Group commit: a caller appends its request and tries to lead. The leader begins the transaction (and
waits there for other processes), takes all requests that have arrived meanwhile, applies each,
commits once, and wakes the others. When one request fails, the transaction is abandoned and each is
replayed by itself, so that only the culprit sees its error.

A caller that is interrupted while it waits takes its request back, or passes on the lead if that
was just handed to it; a request is never left with a thread that has gone.

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
import re
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import lmdb
import lmdb._envid

from tidemill.brokers.lmdb.layout import FORMAT, NUMBER, Tables, open_tables
from tidemill.brokers.lmdb.wake import Bells
from tidemill.crash import point
from tidemill.errors import BrokerUnavailable, InvalidOption, StoreFull, TidemillError
from tidemill.shield import lower_shield, raise_shield

__all__ = ["MAP_SIZE", "Store", "close_store", "open_store"]

T = TypeVar("T")
MAP_SIZE = 1 << 38
"""Address space, not disk: the file is as large as what is in it."""

MAX_READERS = 4096
_BUSY_INTERVAL = 1e-5
_PATIENCE = (
    30.0  # seconds a thread waits for a leader that may be waiting for this thread's own txn
)
_BALLAST_MOST = 4 << 20
_MOUNTS = "/proc/self/mounts"
_NETWORK_FILESYSTEMS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "fuse.sshfs",
    "9p",
    "ceph",
    "glusterfs",
}


class _Forked(Protocol):
    def after_fork_child(self) -> None: ...


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
        self.brokers: weakref.WeakSet[_Forked] = weakref.WeakSet()  # told when the process forks
        self._lead = threading.Lock()
        self._pending: collections.deque[_Request] = collections.deque()
        self._leader = 0  # thread that has the transaction open
        self._keys: dict[str, bytes] = {}  # made once for each queue, not for each step
        self._space_checked = -1.0
        self._space_left = 0
        self._space = ""
        try:
            self.env = env or self._open_env()
        except lmdb.Error as error:
            message = f"cannot open the LMDB store in {self.folder}: {error}"
            raise BrokerUnavailable(message) from error
        try:
            self.tables: Tables = open_tables(self.env, self._prefix)
            self._check_format()
            self.env.reader_check()
            self.bells = Bells(os.path.join(self.folder, "wake"))
        except Exception as error:
            if self._own_env:
                self.env.close()
            if isinstance(error, lmdb.DbsFullError):
                raise InvalidOption(
                    f"the environment has no room for {len(Tables._fields)} more databases; "
                    "open it with a larger max_dbs"
                ) from error
            raise self.translated(error) from error
        _all_stores.add(self)

    def _open_env(self) -> lmdb.Environment:
        with _beside_a_parents() if self.folder in _abandoned else contextlib.nullcontext():
            return lmdb.open(
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

    def _check_format(self) -> None:
        key = self.key("format")
        with self.env.begin() as txn:
            found = txn.get(key)
        if found is None:
            with self.env.begin(write=True) as txn:
                txn.put(key, NUMBER.pack(FORMAT), overwrite=False)
        elif NUMBER.unpack(found)[0] != FORMAT:
            raise BrokerUnavailable(
                f"the store in {self.folder} has format {NUMBER.unpack(found)[0]}, "
                f"this tidemill reads format {FORMAT}; install the version that wrote it"
            )

    @staticmethod
    def _refuse_network(folder: str) -> None:
        """LMDB's locks and mapping do not work across machines."""
        try:
            with open(_MOUNTS, encoding="utf-8", errors="replace") as file:
                mounts = [line.split()[1:3] for line in file]
        except OSError:
            return
        place = os.path.realpath(folder) + "/"
        inside = [
            (p, kind) for p, kind in mounts if place.startswith(_unescaped(p).rstrip("/") + "/")
        ]
        path, kind = max(inside, key=lambda mount: len(mount[0]), default=("", ""))
        if kind in _NETWORK_FILESYSTEMS:
            raise BrokerUnavailable(
                f"{folder} lies on {path}, a network file system ({kind}), where LMDB is not safe; "
                "use a local disk, or a redis:// or postgresql:// broker"
            )

    def key(self, name: str) -> bytes:
        """A key of the main database, under the caller's prefix."""
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = self._prefix + b"=" + name.encode()
        return key

    # -- group commit ---------------------------------------------------------------------------

    def commit(
        self, make: Callable[[Store, lmdb.Transaction[bytes]], Any], apply: Callable[[Any], T]
    ) -> T:
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
            if self._lead.acquire(blocking=False) or self._follow(request):
                try:
                    if not request.done:
                        self._run(make, request)
                finally:
                    self._pass_on()
        finally:
            lower_shield()
        if request.error is not None:
            raise request.error
        return request.result  # type: ignore[no-any-return]

    def _follow(self, request: _Request) -> bool:
        """Wait for a leader to do the request; True when the lead is handed over instead."""
        try:
            # In the caller's own environment the leader may be waiting for a transaction that this
            # very thread has open; that must not last for ever.
            if not request.turn.acquire(timeout=-1 if self._own_env else _PATIENCE):
                raise TidemillError(
                    f"the store was not free for {_PATIENCE:g} s; inside a transaction of your own "
                    "pass it as txn="
                )
        except BaseException:
            self._leave(request)
            raise
        if request.done:
            return False
        self._pending.appendleft(request)
        return True

    def _leave(self, request: _Request) -> None:
        """Take back a request whose caller stops waiting."""
        try:
            self._pending.remove(request)
        except ValueError:  # a leader is at it, or has just made us the leader
            request.turn.acquire()
            if not request.done:
                self._pass_on()

    def _run(self, make: Callable[..., Any], own: _Request) -> None:
        """With the lead: one transaction for everything pending once it has begun."""
        batch: list[_Request] = []
        try:
            try:
                point("store.begin")
                with self.writing() as txn:
                    point("store.begun")
                    self._drain(batch)
                    context = make(self, txn)
                    for request in batch:
                        request.result = request.apply(context)
                    context.finish()
                    point("store.commit")
                point("store.committed")
            except Exception as error:
                if not batch:  # it could not even begin: each who leads shall see for itself
                    self._pending.remove(own)
                    batch.append(own)
                if len(batch) == 1:
                    self._answer(batch[0], self.translated(error))
                else:
                    self._replay(make, batch)
            else:
                for request in batch:
                    self._answer(request)
        except BaseException:  # Ctrl-C in the leader: nothing happened, the others try again
            self._pending.extendleft(r for r in reversed(batch) if r is not own and not r.done)
            raise

    def _drain(self, batch: list[_Request]) -> None:
        """Take what is pending. The deque is never replaced: an append may be under way."""
        batch.extend(self._pending.popleft() for _ in range(len(self._pending)))

    def _replay(self, make: Callable[..., Any], batch: list[_Request]) -> None:
        """Each request in a transaction of its own, so that an error hits only its cause."""
        for request in batch:
            try:
                with self.writing() as txn:
                    context = make(self, txn)
                    request.result = request.apply(context)
                    context.finish()
            except Exception as error:
                self._answer(request, self.translated(error))
            else:
                self._answer(request)

    @staticmethod
    def _answer(request: _Request, error: Exception | None = None) -> None:
        request.error = error
        request.done = True
        request.turn.release()

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
                self._pending.popleft().turn.release()  # it wakes as the leader, not done
                return

    def writing(self) -> _Writing:
        """A write transaction, as a context manager, with the short switch interval around it."""
        return _Writing(self)

    @contextlib.contextmanager
    def nested(self, txn: Any) -> Iterator[lmdb.Transaction[bytes]]:
        """A transaction inside the caller's: an error in it undoes only what it did itself.

        Raises:
            InvalidOption: ``txn`` is not an open write transaction of this environment.
        """
        try:
            txn.stat(self.tables.job)
            inner = self.env.begin(parent=txn, write=True)
        except (AttributeError, TypeError, lmdb.Error) as error:
            raise InvalidOption(
                "txn must be an open write transaction of this store's own LMDB environment"
            ) from error
        try:
            with inner:
                yield inner
        except lmdb.Error as error:
            raise self.translated(error) from error

    def translated(self, error: Exception) -> Exception:
        """A driver's error as one of ours; any other as it is."""
        ours: TidemillError
        no_space = isinstance(error, (lmdb.DiskError, OSError)) or "No space" in str(error)
        if isinstance(error, lmdb.MapFullError) or (no_space and "No space" in str(error)):
            self._space_checked = -1.0
            ours = StoreFull(
                f"the store in {self.folder} is full; finish or delete jobs, or make room"
            )
        elif isinstance(error, lmdb.Error) and "same thread" in str(error):
            ours = TidemillError(
                "this thread has a write transaction of its own open in the store; "
                "pass it as txn=, or end it first"
            )
        elif isinstance(error, lmdb.Error):
            ours = BrokerUnavailable(f"the LMDB store in {self.folder}: {error}")
        else:
            return error
        ours.__cause__ = error
        return ours

    # -- the reserve ----------------------------------------------------------------------------

    def reserve(self) -> int:
        """Bytes of disk that puts leave free, so that finishing and draining always work."""
        total = shutil.disk_usage(self.folder).total
        return min(64 << 20, max(1 << 20, total // 10))

    def check_space(self, size: int) -> None:
        """Refuse ``size`` bytes when the disk or the map is down to its reserve.

        Looks at most every 50 ms, unless so much was put since that it matters sooner.

        Raises:
            StoreFull: naming which.
        """
        now = time.monotonic()
        self._space_left -= size
        if now - self._space_checked > 0.05 or self._space_left < 0:
            self._space_checked = now
            self._space, self._space_left = self._find_shortage()
            self._space_left -= size
        if self._space:
            raise StoreFull(self._space)

    def _find_shortage(self) -> tuple[str, int]:
        """What is short, and the bytes that may be put before the next look."""
        free, reserve = shutil.disk_usage(self.folder).free, self.reserve()
        if free < reserve:
            return (
                f"the disk of {self.folder} has {free >> 20} MiB left, less than the reserve of "
                f"{reserve >> 20} MiB; make room, or finish or delete jobs"
            ), 0
        info = self.env.info()
        limit = info["map_size"] * 3 // 4
        used = info["last_pgno"] * self.env.stat()["psize"]
        if used > limit:
            used = self.used_bytes()
        if used > limit:
            return (
                f"the map of {self.folder} has {info['map_size'] >> 10} KiB, {used >> 10} KiB of "
                "them used; a quarter is kept to finish work. Use a larger map_size, or finish or "
                "delete jobs"
            ), 0
        return "", min(free - reserve, limit - used) // 8

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
        size = min(self.reserve() // 2, _BALLAST_MOST)
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
        if self.pid == os.getpid():
            self._lead.acquire()

    def after_fork_parent(self) -> None:
        """Go on."""
        if self.pid == os.getpid():
            self._pass_on()

    def after_fork_child(self) -> None:
        """The parent's environment is not ours to use; :meth:`ready` opens another when needed."""
        _abandoned[self.folder] = self.env
        self.bells.close()
        for broker in list(self.brokers):
            broker.after_fork_child()

    def ready(self) -> None:
        """Make the store usable in this process, which may be a fork of the one that opened it.

        Raises:
            TidemillError: it lies in the caller's own environment.
        """
        with _stores_lock:
            if self.pid == os.getpid():
                return
            if not self._own_env:
                raise TidemillError(
                    "this process is a fork, and the store lies in an environment opened before: "
                    "open the environment and the store again here"
                )
            users, brokers = self.users, self.brokers
            self._open(None)
            self.users, self.brokers = users, brokers

    def close(self) -> None:
        """Close the environment, unless it is the caller's."""
        self.bells.close()
        if self._own_env:
            self.env.close()


class _Writing:
    """A write transaction of a store while this thread leads it."""

    __slots__ = ("store", "txn")

    def __init__(self, store: Store) -> None:
        self.store = store

    def __enter__(self) -> lmdb.Transaction[bytes]:
        _pace.hurry()
        try:
            self.txn = self.store.env.begin(write=True)
        except BaseException:
            _pace.relax()
            raise
        self.store._leader = threading.get_ident()
        return self.txn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self.store._leader = 0
        try:
            if kind is None:
                self.txn.commit()
            else:
                self.txn.abort()
        finally:
            _pace.relax()


class _Pace:
    """The interpreter's switch interval: short while any store of this process is being written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers = 0
        self._normal = sys.getswitchinterval()

    def hurry(self) -> None:
        with self._lock:
            if not self._writers:
                self._normal = sys.getswitchinterval()
                sys.setswitchinterval(_BUSY_INTERVAL)
            self._writers += 1

    def relax(self) -> None:
        with self._lock:
            self._writers -= 1
            if not self._writers:
                sys.setswitchinterval(self._normal)

    def after_fork_child(self) -> None:
        if self._writers:
            sys.setswitchinterval(self._normal)
        self._lock = threading.Lock()
        self._writers = 0


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


def _unescaped(path: str) -> str:
    """A path as the mounts file writes it: blanks and the like as octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), path)


_pace = _Pace()
# Environments of a parent process, by folder. Never closed: that would free the parent's own reader
# slots, and pages it is reading could be written over.
_abandoned: dict[str, lmdb.Environment] = {}
_stores: dict[tuple[int, int], Store] = {}
_all_stores: weakref.WeakSet[Store] = weakref.WeakSet()
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
    store.ready()
    return store


def close_store(store: Store) -> None:
    """Give a store back; the last one out closes it."""
    with _stores_lock:
        store.users -= 1
        if store.users <= 0:
            for key in [k for k, s in _stores.items() if s is store]:
                del _stores[key]
            _all_stores.discard(store)
            store.close()


def _before_fork() -> None:
    _stores_lock.acquire()
    for store in _stores.values():
        store.before_fork()


def _after_fork_parent() -> None:
    for store in _stores.values():
        store.after_fork_parent()
    _stores_lock.release()


def _after_fork_child() -> None:
    global _stores_lock
    _stores_lock = threading.Lock()
    _pace.after_fork_child()
    for store in list(_all_stores):
        if store.pid != os.getpid():
            store.after_fork_child()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_parent,
    after_in_child=_after_fork_child,
)
