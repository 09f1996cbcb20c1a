"""A store: tidemill's tables under one prefix of an LMDB environment, its files, and its time.

A process opens each store once, by URL or in a caller's environment, however often callers ask.
Several stores may lie in one environment, with different prefixes. All stores survive a fork: no
thread is inside a commit while the process is copied.

Only :class:`StoreTime` reads times for jobs and leases. The store's time is machine time plus an
offset that changes only when the machine boots: setting the clock moves no delay and ends no lease
(law 19). After a boot, the time continues from the last stored reading, plus the wall time since.
"""

from __future__ import annotations

import contextlib
import os
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import lmdb
import msgspec

from tidemill.brokers.lmdb.engine.disk_reserve import DiskReserve
from tidemill.brokers.lmdb.engine.environment import (
    Environment,
    check_prefix,
    flush_folders,
    folder_of,
    make_folder,
    translated,
)
from tidemill.brokers.lmdb.engine.group_commit import PATIENCE, GroupCommit
from tidemill.brokers.lmdb.engine.transactions import Plain, Reading, nested
from tidemill.brokers.lmdb.engine.wakeup import WakeUps
from tidemill.brokers.lmdb.layout import FORMAT, MICRO, NUMBER, Tables, make_tables, open_tables
from tidemill.core.clock import clock, id_time
from tidemill.core.files import Folder
from tidemill.core.forks import after_fork
from tidemill.core.signals import SignalsDeferred, defer_signals, restart_on_signal, resume_signals
from tidemill.errors import BrokerUnavailable, InvalidOption, StoreFull, TidemillError

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.broker import LmdbBroker
    from tidemill.brokers.lmdb.open import Settings
    from tidemill.brokers.lmdb.transitions import Transitions

MAP_SIZE = 1 << 38  # bytes of address space; the file takes only as much disk as its content

_LENT_MOST = 50_000
PREFIX = "tidemill-"  # of the names of tidemill's databases, unless the caller asks for another

T = TypeVar("T")


class Store:
    """One store, as this process has it open."""

    # All stores of the environment share ``folder``; :meth:`folder_of` has this store's own
    # folders.

    def __init__(self, environment: Environment, prefix: str, patience: float = PATIENCE) -> None:
        self.environment = environment
        self.prefix = prefix
        self.folder = environment.folder
        self.reading = environment.reading
        self.patience = patience
        self._folders: dict[str, Folder] = {}
        self.users = 0
        self._held_up = False  # True while the fork holds the lead of the commits
        self.brokers: weakref.WeakSet[LmdbBroker] = weakref.WeakSet()  # told when the process forks
        self._keys: dict[str, bytes] = {}  # made once for each queue, not for each step
        self.lent: dict[int, tuple[bytes, float]] = {}  # partition and cost of a lease, by token
        self._wakeups: WakeUps | None = None
        if not self.reading:  # make the folder beside a caller's data file
            above, name = os.path.split(self.folder)
            Folder(above).folder(name, environment.mode)
        self._open()

    def _open(self) -> None:
        self.env = self.environment.env
        self.pid = os.getpid()
        lock = self.environment.write_lock
        self.commits = GroupCommit(self.env, lock, self._translated, f" in {self.folder}")
        self.commits.patience = self.patience
        try:
            if self.reading:
                self._check_format()
                self.tables: Tables = open_tables(self.env, self.prefix.encode())
            else:
                prefix = self.prefix.encode()
                self.tables = self.write(lambda txn: make_tables(self.env, txn, prefix))
                self._check_format()
                self.env.reader_check()
                self._wakeups = WakeUps(self.folder_of("wake"))
        except BrokerUnavailable as error:
            if not isinstance(error.__cause__, lmdb.DbsFullError):
                raise
            raise InvalidOption(
                f"the environment has no room for {len(Tables._fields)} more databases; "
                "open it with a larger max_dbs"
            ) from error
        except Exception as error:
            raise translated(error, self.folder) from error
        self.room = DiskReserve(self.environment, self.tables, self.prefix)

    def _check_format(self) -> None:
        key = self.key("format")
        with self.reading_txn() as txn:
            found = txn.get(key)
        if found is None and self.reading:
            raise BrokerUnavailable(f"there is no store in {self.folder}")
        if found is None:
            self._begin(key)
        elif NUMBER.unpack(found)[0] != FORMAT:
            raise BrokerUnavailable(
                f"the store in {self.folder} has format {NUMBER.unpack(found)[0]}, "
                f"this tidemill reads format {FORMAT}; install the version that wrote it"
            )

    def _begin(self, key: bytes) -> None:
        """Begin a new store, in folders of its own."""
        # Another process may still have an earlier store open, whose data file was deleted. That
        # process holds the old folders and touches nothing in the new folders.
        flush_folders(self.folder)

        def begin(txn: lmdb.Transaction[bytes]) -> None:
            if txn.get(key) is None:
                for name in ("wake", "owners"):
                    self._files().discard(name)
                txn.put(key, NUMBER.pack(FORMAT))

        self.write(begin)

    # -- files ----------------------------------------------------------------------------------

    def folder_of(self, name: str) -> Folder:
        """Open a folder of this store, or make it; later calls return the same folder."""
        # Each store of an environment has folders of its own.
        found = self._folders.get(name)
        if found is None:
            found = self._files().folder(name, self.environment.mode, make=not self.reading)
            self._folders[name] = found
        return found

    def _files(self) -> Folder:
        """The folder of this store's own folders. Each store of an environment has one."""
        above = Folder(self.folder)
        if self.prefix == PREFIX:
            return above
        name = urllib.parse.quote(self.prefix, safe="") + ".files"
        return above.folder(name, self.environment.mode, make=not self.reading)

    @property
    def wakeups(self) -> WakeUps:
        if self._wakeups is None:
            raise TidemillError(f"the store in {self.folder} was opened to read it, not to change")
        return self._wakeups

    @property
    def url(self) -> str:
        """The URL that opens this store in another process."""
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
        """Remember the partitions and costs of new leases, to save decoding their jobs again."""
        if len(self.lent) > _LENT_MOST:  # drop leases that other processes ended, or that were lost
            self.lent.clear()
        self.lent.update(lent)

    def reading_txn(self) -> Reading:
        return Reading(self.env, self._translated)

    @contextlib.contextmanager
    def reading_views(self) -> Iterator[tuple[lmdb.Transaction[bytes], lmdb.Transaction[Any]]]:
        """Two read transactions of the same moment. The values of the second are views."""
        # A view copies nothing: only the parts of a job that the caller looks at are read. After
        # the end of the transaction its views are invalid.
        while True:
            with self.translating(), self.reading_txn() as txn:
                try:
                    second = self.env.begin(buffers=True)
                except lmdb.MapResizedError:  # another process has just made the map larger
                    continue  # the next first transaction adopts the map
                with second as views:
                    if views.id() == txn.id():
                        yield txn, views
                        return

    @contextlib.contextmanager
    def translating(self) -> Iterator[None]:
        """Raise an error of LMDB as an error of tidemill."""
        try:
            yield
        except lmdb.Error as error:
            raise self._translated(error) from error

    def write(self, apply: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        """Commit the changes of opening the store, in a commit of their own."""
        # Such a commit passes no crash point, so tests need not count the writes of an opening
        # store.
        lock, place = self.environment.write_lock, f" in {self.folder}"
        commits = GroupCommit(self.env, lock, self._translated, place, points=False)
        try:
            return commits.run(Plain, lambda plain: apply(plain.txn), patience=self.patience)
        finally:
            commits.close()

    def nested(self, txn: Any) -> contextlib.AbstractContextManager[lmdb.Transaction[bytes]]:
        """Give a transaction inside the caller's; an error in it undoes only its own changes."""
        return nested(self.env, self.tables.job, txn, self._translated)

    def _translated(self, error: Exception) -> Exception:
        """Translate a driver's error; after StoreFull the next put looks at the disk again."""
        ours = translated(error, self.folder)
        if isinstance(ours, StoreFull) and hasattr(self, "room"):
            self.room.look_again()
        return ours

    # -- forks ----------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Wait until no thread of ours is inside a transaction; then the process is copied."""
        # A thread may wait for a program without tidemill. Then the copy is made after a second.
        if self.pid == os.getpid():
            self._held_up = self.commits.lead.acquire(timeout=self.commits.brisk)

    def after_fork_parent(self) -> None:
        """Give the lead back after the copy."""
        if self.pid == os.getpid() and self._held_up:
            self.commits.pass_on()

    def after_fork_child(self) -> None:
        """Close the parent's files in a forked child; :meth:`ready` opens ours when needed."""
        self.environment.abandon()
        self._close_wakeups()
        for broker in list(self.brokers):
            broker.after_fork_child()

    @restart_on_signal
    def ready(self) -> None:
        """Make the store usable in this process, which may be a fork of its opener."""
        with SignalsDeferred(), _lock:
            if self.pid != os.getpid():
                self.environment.ready()
                self._open()

    def close(self) -> None:
        """Close the store's files; the last store in an environment closes the environment too."""
        self.commits.close()
        self._close_wakeups()
        for folder in self._folders.values():
            folder.close()
        self.environment.users -= 1
        if not self.environment.users:
            self.environment.close()

    def _close_wakeups(self) -> None:
        if self._wakeups is not None:
            self._wakeups.close()


# -- the stores of this process ------------------------------------------------------------------

_Place = tuple[int, int]  # device and inode of an environment's directory, or of its single file

_stores: weakref.WeakValueDictionary[tuple[_Place, str], Store] = weakref.WeakValueDictionary()
_ours: set[Store] = set()  # in our own environments; open until the last broker closes them
_unopened: dict[_Place, Environment] = {}  # a failed opening left a thread that waits for the lock
_lock = threading.Lock()


@restart_on_signal
def open_store(asked: Settings, *, reading: bool) -> Store:
    """The store of a directory; a process always gets the same object."""
    # With ``reading`` nothing is made. The patience of the last caller holds.
    path, mode = asked.folder, asked.mode
    if os.path.isfile(path) and not os.path.isdir(folder_of(path)):
        raise InvalidOption(f"{path} is a file; a store is a directory")
    with SignalsDeferred(), _lock:
        if not reading:
            make_folder(folder_of(path), mode)
        place = _place_of(path)
        environment = _environment_at(place)
        if environment is None:
            environment = Environment(
                os.path.realpath(path),
                map_size=asked.map_size,
                sync=asked.sync,
                env=None,
                mode=mode,
                reading=reading,
            )
        elif environment.reading and not reading:
            raise InvalidOption(f"this process has the store in {path} open only to read it")
        elif environment.sync != asked.sync:
            raise InvalidOption(
                f"the store in {path} is open in this process with another durability; use one"
            )
        store = _store_in(environment, place, asked.prefix, asked.patience)
    store.ready()
    return store


@restart_on_signal
def store_around(env: lmdb.Environment, prefix: str) -> Store:
    """The store inside the caller's own environment."""
    check_prefix(prefix)
    try:
        path, sync = os.path.abspath(env.path()), bool(env.flags()["sync"])
    except (AttributeError, TypeError, lmdb.Error) as error:
        raise InvalidOption("env must be an open lmdb.Environment") from error
    with SignalsDeferred(), _lock:
        place = _place_of(path)
        environment = _environment_at(place)
        if environment is None or environment.env is not env:
            environment = Environment(path, sync=sync, env=env)
        store = _store_in(environment, place, prefix)
    store.ready()
    return store


def _place_of(path: str) -> _Place:
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino


def _environment_at(place: _Place) -> Environment | None:
    """The environment of this process in a place, unless its owner has closed it."""
    for (where, _), store in list(_stores.items()):
        if where == place and store.environment.usable:
            return store.environment
    return _unopened.get(place)


def _store_in(
    environment: Environment, place: _Place, prefix: str, patience: float = PATIENCE
) -> Store:
    """The store with that prefix in an environment, with one more user."""
    store = _stores.get((place, prefix))
    if store is None or store.environment is not environment:
        _unopened.pop(place, None)
        try:
            store = Store(environment, prefix, patience)
        except BaseException:
            if not environment.users and environment.ours and environment.write_lock.busy:
                _unopened[place] = environment
            elif not environment.users:
                environment.close()
            raise
        environment.users += 1
        _stores[place, prefix] = store
        if environment.ours:
            _ours.add(store)
    store.patience = store.commits.patience = patience
    store.users += 1
    return store


def close_store(store: Store) -> None:
    """End one use of a store; the last user closes the store."""
    with SignalsDeferred(), _lock:
        store.users -= 1
        if store.users <= 0:
            for key in [key for key, other in _stores.items() if other is store]:
                del _stores[key]
            _ours.discard(store)
            store.close()


_forking = [False]  # True while a fork has deferred signal handlers


def _before_fork() -> None:
    deferred = defer_signals()  # a handler that raises would keep the lock for good
    _lock.acquire()
    _forking[0] = deferred
    for store in _ours:
        store.before_fork()


def _after_fork_parent() -> None:
    for store in _ours:
        store.after_fork_parent()
    deferred, _forking[0] = _forking[0], False
    _lock.release()
    if deferred:
        resume_signals()


def _after_fork_child() -> None:
    global _lock
    _lock = threading.Lock()
    while _unopened:
        _unopened.popitem()[1].abandon()
    for key, store in list(_stores.items()):
        if store.pid != os.getpid():
            store.after_fork_child()
        if not store.environment.ours:
            del _stores[key]
    deferred, _forking[0] = _forking[0], False
    if deferred:
        resume_signals()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_parent)
after_fork(_after_fork_child)


# -- the time of a store -------------------------------------------------------------------------


class _Clock(msgspec.Struct, array_like=True):
    """The last stored readings of the clocks, in seconds."""

    boot: str
    offset: float
    wall: float
    machine: float
    born: float


class StoreTime:
    """The clocks of one store since the boot of this machine."""

    def __init__(self, store: Store) -> None:
        self._key = store.key("clock")
        self._boot = _boot_id()
        with store.reading_txn() as txn:
            noted = self._read(txn)
        if noted is None or noted.boot != self._boot:
            noted = self._after_boot(noted) if store.reading else store.write(self._note_boot)
        self._offset, self.born = noted.offset, noted.born

    def _read(self, txn: lmdb.Transaction[bytes]) -> _Clock | None:
        data = txn.get(self._key)
        return _CLOCK.decode(data) if data else None

    def _note_boot(self, txn: lmdb.Transaction[bytes]) -> _Clock:
        """The readings of this boot. The first process that opens the store stores it."""
        noted = self._read(txn)
        if noted is None or noted.boot != self._boot:
            noted = self._after_boot(noted)
            txn.put(self._key, _ENCODE(noted))
        return noted

    def _after_boot(self, last: _Clock | None) -> _Clock:
        """The readings of a new store, or of a store that was last used before the boot."""
        wall, machine = clock.wall(), clock.machine()
        if last is None:
            return _Clock(self._boot, wall - machine, wall, machine, wall)
        noted = last.machine + last.offset
        offset = noted + max(0.0, wall - last.wall) - machine
        return _Clock(self._boot, offset, wall, machine, last.born)

    def save(self, commit: Transitions) -> None:
        """Store the readings of the clocks, to continue from these after the next boot."""
        noted = _Clock(self._boot, self._offset, clock.wall(), clock.machine(), self.born)
        commit.txn.put(self._key, _ENCODE(noted))

    def micros(self) -> tuple[int, int]:
        """(store time, wall time) in microseconds."""
        return int((clock.machine() + self._offset) * MICRO), int(clock.wall() * MICRO)

    def on_wall(self, store_time: int) -> float:
        """A store time in microseconds as wall time, by the present difference of the clocks."""
        return store_time / MICRO - (clock.machine() + self._offset) + clock.wall()

    @property
    def identity(self) -> str:
        """The creation time of the store to the microsecond, which no other store shares."""
        return f"lmdb {self.born!r}"

    def was_here(self, job_id: str) -> bool:
        """True when tidemill made the id after the store was made."""
        made = id_time(job_id)
        return made is not None and self.born - 1 <= made <= clock.wall() + 1


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:  # macOS has no boot id; use the time of the boot
        return str(round(clock.wall() - clock.machine(), -2))


_ENCODE = msgspec.msgpack.Encoder().encode
_CLOCK = msgspec.msgpack.Decoder(_Clock)
