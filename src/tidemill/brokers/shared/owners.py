"""The owners of a store whose calls this process makes, and the deaths of all owners of the store.

A local owner belongs to a process that has opened the store. Such an owner has two signs of life:
a FIFO on its own machine, which the kernel closes with the process, and a lease in the store, which
each of its steps renews. A remote owner has a lease of its own, and its silence is counted.

    FIFO here, nobody holds it    dead, at once: its process is gone
    FIFO here, held               alive, whatever the store says
    no FIFO here, lease on        alive
    no FIFO here, lease over      dead; owners on its own machine reap it first
    remote, silent for its lease  dead; see :mod:`tidemill.brokers.shared.remote_owners`

While the server is away, or this process is stopped, no owner can renew its lease. So a lease that
is over counts only when the store trusts it (:meth:`Owners._trusts`). On LMDB, local owners have no
lease: without a FIFO an owner is dead.

An owner draws its number and holds its FIFO before it is listed. The store then tells the other
owners, which watch the new owner if it is their neighbour. If an owner dies before anybody watches
it, the next process that reads the list finds the dead owner.
"""

from __future__ import annotations

import abc
import logging
import os
import socket
import time
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.network.repeated_calls import RepeatedCalls
from tidemill.brokers.shared.liveness import Liveness, neighbours
from tidemill.brokers.shared.lost_jobs import log_failed
from tidemill.brokers.shared.remote_owners import SignOfLife, Silence, Turns
from tidemill.brokers.shared.waits import Asleep, Parked, Until
from tidemill.brokers.shared.wake_pipe import WakePipe
from tidemill.core.crash_points import point
from tidemill.core.files import Folder, private_folder
from tidemill.core.job import Owner, Record
from tidemill.core.locks import Lock, LongLock
from tidemill.core.scoreboard import read_scoreboard, remove_scoreboard
from tidemill.errors import BrokerUnavailable, StoreFull, StoreGone, StoreMoved, TidemillError

_LOG = logging.getLogger("tidemill.owners")

_PRECEDENCE = 5.0  # seconds in which only owners on its machine, with its scoreboard, reap an owner

Ended = tuple[list[int], bool]


class Row(msgspec.Struct, frozen=True):
    """An owner on the list.

    ``number`` is the number of its FIFO, or 0 without a FIFO. ``late`` is the seconds since the end
    of its lease, negative before that.
    """

    owner: Owner
    number: int
    late: float


Proof = Row | SignOfLife | None
"""The last sign of life of an owner that is given up; None for an owner that needs no proof."""

Causes = Mapping[int, str] | None
"""Which jobs of a dead owner ran, and their errors; None without a witness: ``Broker.release``."""


class AttachedOwner(abc.ABC):
    """An owner whose calls this process makes, and its place to sleep."""

    def __init__(self, owner: Owner, number: int) -> None:
        self.owner = owner
        self.number = number
        self.near = False  # its caller is in this process, so its steps need no serials
        self.asleep = Asleep()
        self.seen: object = None  # the state of the list when the owner chose its neighbours
        self.watched: list[int] = []
        self.watched_fds: list[int] = []

    def goes_on(self, owner: Owner) -> None:
        self.owner = owner

    @abc.abstractmethod
    def parked(self, timeout: float, fds: Sequence[int]) -> Generator[Until, list[int], Ended]:
        """Wait for a hint, a wake, a death, a readable descriptor or the timeout.

        Return the readable descriptors, and True when a watched owner has died.
        """

    @abc.abstractmethod
    def wake(self) -> None:
        """End the owner's sleep, from any thread."""

    def close(self) -> None:
        """Close the place to sleep, after all threads have left it."""
        self.asleep.end(self.wake)

    @abc.abstractmethod
    def after_fork_child(self) -> None:
        """Close the copies in a forked child, where no thread sleeps."""


class ConnectedOwner(AttachedOwner):
    """An owner whose steps go over a connection, and are repeated when a reply is lost."""

    def __init__(self, owner: Owner, number: int) -> None:
        super().__init__(owner, number)
        self.renewed = time.monotonic()  # when it last exchanged
        self._pipe = WakePipe()
        self._calls = RepeatedCalls(self.send)
        self._alone = LongLock()

    @abc.abstractmethod
    def send(self, step: Step, serial: int) -> Reply:
        """Send a step to the store, which does each serial once; 0 is a step on its behalf."""

    def unsent(self, step: Step) -> None:
        """Take back the serial of a step that was answered here: the store gets no such step."""
        if not step.serial:
            self._calls.serial -= 1

    def exchange(self, step: Step) -> Reply:
        """Make one step. A caller with serials may repeat a step while the first call runs."""
        if step.behalf:
            return self.send(step, 0)
        if not step.serial:
            self.near = True
            return self._calls.exchange(step)
        with self._alone:
            return self.send(step, step.serial)

    def parked(self, timeout: float, fds: Sequence[int]) -> Generator[Until, list[int], Ended]:
        ready = set((yield Until(timeout, [self._pipe.fd, *fds], self.watched_fds)))
        if self._pipe.fd in ready:
            self._pipe.drain()
        return [fd for fd in fds if fd in ready], not ready.isdisjoint(self.watched_fds)

    def wake(self) -> None:
        self._pipe.wake()

    def close(self) -> None:
        super().close()
        self._pipe.close()

    def after_fork_child(self) -> None:
        self._pipe.after_fork_child()


A = TypeVar("A", bound=AttachedOwner)


def folder_here(*path: str) -> str:
    """A folder of this user on this machine, made if missing."""
    folder = os.path.join(private_folder(), *path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


class Owners(abc.ABC, Generic[A]):
    """The owners of one store whose calls this process makes; a store supplies the primitives."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._by_id: dict[str, A] = {}
        self._watching, self._turns = Lock(), Turns()
        self._silence: Silence[tuple[str, int]] = Silence()
        self._changes = 0  # of the list, as far as this process knows

    # -- what a store supplies ------------------------------------------------------------------

    @abc.abstractmethod
    def _draw(self, owner: Owner) -> int:
        """Draw the number of a local owner; 0 if no FIFO of this machine can show its life."""

    @abc.abstractmethod
    def _make(self, owner: Owner, number: int) -> A: ...

    @abc.abstractmethod
    def _list(self, attached: A, before: A | None) -> None:
        """List a local owner, in place of the owner ``before`` with the same id."""

    @abc.abstractmethod
    def _rows(self) -> list[Row]:
        """The owners on the list. A consumer is not late while the ttr of a message lasts."""

    @abc.abstractmethod
    def _trusts(self) -> bool:
        """True when every living owner has had the time to renew its lease."""

    @abc.abstractmethod
    def _let_go(self, owner_id: str, causes: Causes, proof: Proof, *, brisk: bool) -> int | None:
        """Take an owner off the list; see ``Broker.release``. Return the number of its leases.

        Does nothing, and returns None, if the owner is not listed, or has shown since the ``proof``
        of its death that it lives. A ``brisk`` call does not wait for a server that is away.
        """

    def _held_by(self, owner_id: str, *, brisk: bool) -> list[str]:
        """Ids of an owner's jobs, which may fail when the owner is given up; none by default."""
        return []

    def _get(self, ids: Sequence[str], *, brisk: bool) -> Iterable[Record | None]:
        raise NotImplementedError

    def _board_folder(self) -> Folder | None:
        return None

    def _state(self, attached: A) -> object:
        """The state of the list: owners choose their neighbours again when it has changed."""
        return self._changes

    # Only for stores of remote owners:

    def _join(self, owner: Owner) -> int:
        """List a remote owner, perhaps again; return its number."""
        raise NotImplementedError

    def _remote(self, owner_id: str) -> tuple[Owner, int] | None:
        return None

    def _words(self) -> dict[tuple[str, int], SignOfLife]:
        """The signs of life of all remote owners, by id and number."""
        return {}

    # -- attaching ------------------------------------------------------------------------------

    def __getitem__(self, owner_id: str) -> A:
        """An attached owner, perhaps of another process before; else raises TidemillError."""
        attached = self.find(owner_id)
        if attached is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return attached

    def find(self, owner_id: str) -> A | None:
        return self._by_id.get(owner_id) or self._go_on(owner_id)

    def ids(self) -> list[str]:
        return list(self._by_id)

    def attach(self, owner: Owner) -> None:
        """List an owner. A local owner lives with its process, a remote owner by signs of life."""
        here = self._by_id.get(owner.id)
        if owner.lease:
            with self._turns.of(owner.id):
                if here is not None and not here.owner.lease:
                    self.detach(owner.id)
                self._enter(owner, self._join(owner))
            return
        if here is not None:
            self._drop(here)
        number = self._draw(owner)
        if number:
            self._liveness.hold(number)
        attached: A | None = None
        try:
            attached = self._make(owner, number)
            self._list(attached, here)
        except BaseException:
            if attached is not None:
                self._drop(attached)
            self._liveness.let_go(number)
            raise
        self._by_id[owner.id] = attached
        self._reap_soon()

    def _enter(self, owner: Owner, number: int) -> A:
        """Make the calls of a remote owner from now on."""
        attached = self._by_id.get(owner.id)
        if attached is not None and attached.number == number:
            attached.goes_on(owner)
            return attached
        if attached is not None:
            self._drop(attached)
        attached = self._by_id[owner.id] = self._make(owner, number)
        return attached

    def _go_on(self, owner_id: str, stale: A | None = None) -> A | None:
        """Take over the calls of a remote owner, unless the list has only its ``stale`` number."""
        with self._turns.of(owner_id):
            here = self._by_id.get(owner_id)
            if here is not None and here is not stale:  # another thread was faster
                return here
            found = self._remote(owner_id)
            if found is None or (stale is not None and found[1] == stale.number):
                return None
            attached = self._enter(*found)
            attached.wake()  # end its first wait at once, since it may have missed a hint
            return attached

    def anew(self, attached: A) -> A | None:
        """A remote owner that was lost and has attached again through another server; else None."""
        return self._go_on(attached.owner.id, attached)

    # -- leaving --------------------------------------------------------------------------------

    def detach(self, owner_id: str, *, brisk: bool = False) -> None:
        """Take an owner off the list; its leases go back, and no attempt is counted."""
        attached = self._by_id.get(owner_id)
        if attached is None and self._remote(owner_id) is None:
            return
        try:  # if this fails, other owners notice that the owner is gone
            self._let_go(owner_id, {}, None, brisk=brisk)
        finally:
            if attached is not None:
                self._drop(attached)

    def _drop(self, attached: A) -> None:
        """Make an owner's calls no longer, and close its FIFO and its place to sleep."""
        if self._by_id.get(attached.owner.id) is attached:
            del self._by_id[attached.owner.id]
        attached.close()
        with self._watching:
            self._unwatch()
        self._liveness.let_go(attached.number)

    def leave(self) -> None:
        """Take local owners off the list when the broker closes; remote owners stay listed."""
        # If the store is away or full, other processes notice that the local owners are gone.
        try:
            for attached in list(self._by_id.values()):
                if not attached.owner.lease:
                    self.detach(attached.owner.id, brisk=True)
        except (BrokerUnavailable, StoreFull, StoreMoved):
            pass
        for attached in list(self._by_id.values()):
            self._drop(attached)

    def release(self, owner_id: str, causes: Causes) -> int:
        """Take an owner of any process off the list, and log its failed jobs."""
        return self._give_back(owner_id, causes, None) or 0

    def _give_back(
        self, owner_id: str, causes: Causes, proof: Proof, *, brisk: bool = False
    ) -> int | None:
        """Take an owner off the list, and log its failed jobs; see `_let_go`."""
        ids = self._held_by(owner_id, brisk=brisk) if causes is None else []
        held = self._let_go(owner_id, causes, proof, brisk=brisk)
        if ids and held:
            log_failed(self._get(ids, brisk=brisk))
        return held

    def count_silence(self) -> float:
        """Give up remote owners that were silent for their lease; see the contract."""
        away = [m for m in list(self._by_id.values()) if m.owner.lease and not m.near]
        words = self._words()
        silent, again = self._silence.look(words)
        for key in silent:
            self._give_back(key[0], None, words[key], brisk=True)
        self._forget([one for one in away if (one.owner.id, one.number) not in words])
        return again

    def _forget(self, gone: Collection[A]) -> None:
        """Forget remote owners that are no longer listed."""
        # These owners may never call again. A sleeping owner is only woken, and forgotten later. An
        # owner that is ``near`` is kept: its next step learns that the owner is lost.
        for attached in gone:
            if not attached.asleep.end_if_empty():
                attached.wake()
                continue
            with self._turns.of(attached.owner.id):
                if self._by_id.get(attached.owner.id) is attached:
                    self._drop(attached)

    # -- sleeping -------------------------------------------------------------------------------

    def parked(self, attached: A, timeout: float, fds: Sequence[int]) -> Parked:
        """Sleep as an owner, and give back the leases of neighbours that die meanwhile."""
        if attached.seen != self._state(attached) and self._watch(attached):
            timeout = 0.0  # the owner may take the jobs of a dead neighbour
        with attached.asleep.inside() as may:
            if not may:
                return []  # the owner was given up or attached again a moment ago
            ready, died = yield from attached.parked(timeout, fds)
        if died:
            with self._watching:
                self._liveness.unwatch_ended()  # an owner that lives may have made its FIFO anew
                for one in list(self._by_id.values()):
                    one.seen = None
            self._reap_soon()
        return ready

    def wake(self, owner_id: str) -> None:
        attached = self._by_id.get(owner_id)
        if attached is not None:
            attached.wake()

    def wake_all(self) -> None:
        for attached in list(self._by_id.values()):
            attached.wake()

    # -- deaths ---------------------------------------------------------------------------------

    def _watch(self, attached: A) -> bool:
        """Watch the owner's neighbours on this machine; True when one is dead already."""
        attached.seen = self._state(attached)
        if not attached.number:
            return False
        rows = [row for row in self._rows() if not row.owner.lease]
        here = [row for row in rows if self._liveness.is_here(row.number)]
        ring = sorted((row.number, row.owner.kind == "worker") for row in here)
        near = neighbours(attached.number, ring)
        with self._watching:
            attached.watched_fds, gone = self._liveness.watch(near)
            attached.watched = near
            self._unwatch()
        if gone:  # a neighbour died before it could be watched
            attached.seen = None
            self._reap_soon()
        return gone

    def _unwatch(self) -> None:
        owners = list(self._by_id.values())
        self._liveness.unwatch({number for attached in owners for number in attached.watched})

    def _reap_soon(self) -> None:
        """Reap now. If the store is away, the next look finds the same deaths."""
        try:
            self.reap()
        except StoreGone:
            raise
        except BrokerUnavailable as error:
            _LOG.debug("dead owners are handled later: %s", error)

    def reap(self) -> int:
        """Give back the leases of dead owners; return the number of dead owners."""
        self._liveness.keep()
        rows = self._rows()
        buried = [self._bury(row) for row in rows if self._is_dead(row, rows)]
        self._liveness.sweep({row.number for row in rows})
        point("store.reaped")
        return sum(buried)

    def _is_dead(self, row: Row, rows: Sequence[Row]) -> bool:
        """Whether an owner is dead, by the table above."""
        owner, ours = row.owner, self._by_id.get(row.owner.id)
        if owner.lease or (ours is not None and ours.number == row.number):
            return False  # the silence of a remote owner is counted
        if self._liveness.is_here(row.number):
            return not self._liveness.alive(row.number)
        if row.late <= 0 or not self._trusts():
            return False
        near = any(one.owner.host == owner.host and one.late <= 0 for one in rows)
        return not near or self._is_near(row) or row.late > _PRECEDENCE

    def _is_near(self, row: Row) -> bool:
        """Whether the owner is or was on this machine, which then has its scoreboard."""
        hosts = {attached.owner.host for attached in list(self._by_id.values())}
        here = row.owner.host in {socket.gethostname(), *hosts}
        return here or self._liveness.is_here(row.number)

    def _bury(self, row: Row) -> bool:
        """Give back a dead owner's leases, by its scoreboard if this machine has the scoreboard."""
        # False when the owner has left the list meanwhile, or lives after all.
        owner = row.owner
        board = owner.board if self._is_near(row) and owner.kind == "worker" else ""
        folder = self._board_folder() if board else None
        running = read_scoreboard(board, owner.id, folder) if board else None
        causes = None
        if running is not None:
            causes = dict.fromkeys(running, f"worker {owner.name} died with its processes")
        point("store.reaping")
        if self._give_back(owner.id, causes, row, brisk=True) is None:
            return False
        self._liveness.remove(row.number)
        if board:
            remove_scoreboard(board, owner.id, folder)
        _LOG.warning("%s %s died; its jobs go back", owner.kind, owner.name or owner.id)
        return True

    def after_fork_child(self) -> None:
        """Leave the owners to the parent, in a forked child, and close the copies at once."""
        # If the child kept the copies, a dead parent would seem alive.
        self._liveness.after_fork_child()
        for attached in list(self._by_id.values()):
            attached.after_fork_child()
        self._by_id = {}
