"""A store: tidemill's tables under one prefix of an LMDB environment, and the files beside it.

A process has each store open once, however often it asks: by URL or in an environment of the
caller's own. Several stores may lie in one environment, told apart by their prefixes. All of them
survive a fork: no thread is inside a commit while the process is copied, and the child opens its
own when it needs them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import urllib.parse
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import lmdb

from tidemill.brokers.lmdb.commit import GroupCommit, Writing
from tidemill.brokers.lmdb.environment import Environment, folder_of, translated
from tidemill.brokers.lmdb.layout import FORMAT, NUMBER, Tables, open_tables
from tidemill.brokers.lmdb.room import Room
from tidemill.brokers.lmdb.wake import Bells
from tidemill.config import check_name
from tidemill.errors import BrokerUnavailable, InvalidOption, StoreFull

__all__ = ["MAP_SIZE", "PREFIX", "Store", "close_store", "open_store", "store_around"]

MAP_SIZE = 1 << 38
"""Address space, not disk: the file is as large as what is in it."""

_LENT_MOST = 50_000

PREFIX = "tidemill-"
"""What leads the names of our databases when nothing else is asked for."""


class _Forked(Protocol):
    def after_fork_child(self) -> None: ...


class Store:
    """One store, as this process has it open.

    ``folder`` is shared by all stores of the environment; ``files`` is this store's own.
    """

    def __init__(self, environment: Environment, prefix: str) -> None:
        self.environment = environment
        self.prefix = prefix
        self.folder = environment.folder
        self.files = self.folder
        if prefix != PREFIX:
            self.files = os.path.join(self.folder, urllib.parse.quote(prefix, safe="") + ".files")
        self.users = 0
        self.brokers: weakref.WeakSet[_Forked] = weakref.WeakSet()  # told when the process forks
        self._keys: dict[str, bytes] = {}  # made once for each queue, not for each step
        self.lent: dict[int, tuple[bytes, float] | None] = {}  # token → lane, cost: see lanes.py
        os.makedirs(self.files, exist_ok=True)
        self._open()

    def _open(self) -> None:
        self.env = self.environment.env
        self.pid = os.getpid()
        try:
            self.tables: Tables = open_tables(self.env, self.prefix.encode())
            self._check_format()
            self.env.reader_check()
            self.bells = Bells(os.path.join(self.files, "wake"))
        except lmdb.DbsFullError as error:
            raise InvalidOption(
                f"the environment has no room for {len(Tables._fields)} more databases; "
                "open it with a larger max_dbs"
            ) from error
        except Exception as error:
            raise translated(error, self.folder) from error
        self.room = Room(self.folder, self.env, self.tables)
        shared = not self.environment.ours
        self.commits = GroupCommit(self.env, self._translated, shared=shared)

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

    @property
    def url(self) -> str:
        """What opens this store in another process."""
        path = urllib.parse.quote(os.fsencode(os.path.abspath(self.environment.path)))
        options = {"map_size": str(self.env.info()["map_size"])}
        if not self.environment.sync:
            options["durability"] = "relaxed"
        if self.prefix != PREFIX:
            options["prefix"] = self.prefix
        return f"lmdb://{path}?{urllib.parse.urlencode(options)}"

    def key(self, name: str) -> bytes:
        """A key of the main database, under the store's prefix."""
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = f"{self.prefix}={name}".encode()
        return key

    def remember_lent(self, lent: Mapping[int, tuple[bytes, float]]) -> None:
        """Know of leases this process made what is else decoded from their jobs once more."""
        if len(self.lent) > _LENT_MOST:  # those that others ended, or that were lost
            self.lent.clear()
        self.lent.update(lent)

    def writing(self) -> Writing:
        """A write transaction of its own, as a context manager."""
        return Writing(self.commits)

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
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        """A driver's error as one of ours; one of no room makes the next put look at the disk."""
        ours = translated(error, self.folder)
        if ours is not error and isinstance(ours, StoreFull):
            self.room.look_again()
        return ours

    # -- forks ----------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """No thread of ours is inside a transaction when the process is copied."""
        if self.pid == os.getpid():
            self.commits.lead.acquire()

    def after_fork_parent(self) -> None:
        """Go on."""
        if self.pid == os.getpid():
            self.commits.pass_on()

    def after_fork_child(self) -> None:
        """In a forked child: close what is the parent's; :meth:`ready` opens ours when needed."""
        self.environment.abandon()
        self.bells.close()
        for broker in list(self.brokers):
            broker.after_fork_child()

    def ready(self) -> None:
        """Make the store usable in this process, which may be a fork of the one that opened it.

        Raises:
            TidemillError: it lies in the caller's own environment.
        """
        with _lock:
            if self.pid != os.getpid():
                self.environment.ready()
                self._open()

    def close(self) -> None:
        """Close what is open; the last store in an environment closes that, too."""
        self.bells.close()
        self.environment.users -= 1
        if not self.environment.users:
            self.environment.close()


# -- the stores of this process ------------------------------------------------------------------

_Place = tuple[int, int]  # device and inode of an environment's directory, or of its single file

_stores: weakref.WeakValueDictionary[tuple[_Place, str], Store] = weakref.WeakValueDictionary()
_ours: set[Store] = set()  # in environments of ours: they live until the last broker closes them
_lock = threading.Lock()


def open_store(path: str, *, map_size: int, sync: bool, prefix: str = PREFIX) -> Store:
    """The store of a directory: the same one however often a process asks for it.

    Raises:
        InvalidOption: the prefix is none, or the store is open with another durability.
        BrokerUnavailable: it cannot be opened.
    """
    check_prefix(prefix)
    if os.path.isfile(path) and not os.path.isdir(folder_of(path)):
        raise InvalidOption(f"{path} is a file; a store is a directory")
    with _lock:
        os.makedirs(folder_of(path), exist_ok=True)
        place = _place_of(path)
        environment = _environment_at(place)
        if environment is None:
            path = os.path.realpath(path)
            environment = Environment(path, map_size=map_size, sync=sync, env=None)
        elif environment.sync != sync:
            raise InvalidOption(
                f"the store in {path} is open in this process with another durability; use one"
            )
        store = _store_in(environment, place, prefix)
    store.ready()
    return store


def store_around(env: lmdb.Environment, prefix: str) -> Store:
    """The store inside the caller's own environment.

    Raises:
        InvalidOption: it is no open environment, it has no room for our tables, or the prefix is
            none.
    """
    check_prefix(prefix)
    try:
        path, sync = os.path.abspath(env.path()), bool(env.flags()["sync"])
    except (AttributeError, TypeError, lmdb.Error) as error:
        raise InvalidOption("env must be an open lmdb.Environment") from error
    with _lock:
        place = _place_of(path)
        environment = _environment_at(place)
        if environment is None or environment.env is not env:
            environment = Environment(path, sync=sync, env=env)
        store = _store_in(environment, place, prefix)
    store.ready()
    return store


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that is no name, or too long to be part of a file's name."""
    check_name("prefix", prefix)
    if len(urllib.parse.quote(prefix, safe="")) > 200:
        raise InvalidOption(f"prefix {prefix[:20]!r}… is too long; take a shorter one")


def _place_of(path: str) -> _Place:
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino


def _environment_at(place: _Place) -> Environment | None:
    """The environment of this process in a place, unless its owner has closed it."""
    for (where, _), store in list(_stores.items()):
        if where == place and store.environment.usable:
            return store.environment
    return None


def _store_in(environment: Environment, place: _Place, prefix: str) -> Store:
    """The store of that prefix in an environment, with one user more."""
    store = _stores.get((place, prefix))
    if store is None or store.environment is not environment:
        try:
            store = Store(environment, prefix)
        except BaseException:
            if not environment.users:
                environment.close()
            raise
        environment.users += 1
        _stores[place, prefix] = store
        if environment.ours:
            _ours.add(store)
    store.users += 1
    return store


def close_store(store: Store) -> None:
    """Give a store back; the last one out closes it."""
    with _lock:
        store.users -= 1
        if store.users <= 0:
            for key in [key for key, other in _stores.items() if other is store]:
                del _stores[key]
            _ours.discard(store)
            store.close()


def _before_fork() -> None:
    _lock.acquire()
    for store in _ours:
        store.before_fork()


def _after_fork_parent() -> None:
    for store in _ours:
        store.after_fork_parent()
    _lock.release()


def _after_fork_child() -> None:
    global _lock
    _lock = threading.Lock()
    for key, store in list(_stores.items()):
        if store.pid != os.getpid():
            store.after_fork_child()
        if not store.environment.ours:
            del _stores[key]


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_parent,
    after_in_child=_after_fork_child,
)
