"""The owners of this process: attaching, detaching, sleeping, and detecting deaths.

The death of an owner shows in two ways. First, the kernel hangs up the owner's FIFO, so processes
on the same machine see the death at once. Second, the owner no longer renews its lease in the
table. When the lease is over, processes on other machines give up the owner. While the database is
away, no owner can renew its lease. So leases count only after the database has answered for as long
as a lease lasts.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence

import msgspec

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.parked_waits import Parked, Until
from tidemill.brokers.django.tables import Rows
from tidemill.brokers.django.wakeup import OWNERS, Bell
from tidemill.brokers.network.repeated_calls import RepeatedCalls
from tidemill.brokers.shared.liveness import Liveness, neighbours
from tidemill.brokers.shared.wait_places import Asleep
from tidemill.core.errors import TidemillError
from tidemill.core.files import private_folder
from tidemill.core.locks import Lock
from tidemill.core.owner import Owner
from tidemill.core.scoreboard import read_scoreboard, remove_scoreboard
from tidemill.core.wake_pipe import WakePipe

_LOG = logging.getLogger("tidemill.django")
_decode = msgspec.msgpack.Decoder(Owner).decode


class OwnerFacts(msgspec.Struct, frozen=True):
    """An owner on the list, and the time until which its lease lasts."""

    owner: Owner
    until: float


def number_of(owner_id: str) -> int:
    """The number in the name of an owner's FIFO."""
    return int.from_bytes(hashlib.sha256(owner_id.encode()).digest()[:7])


def listed(rows: Rows) -> list[OwnerFacts]:
    """All owners."""
    found = rows.execute('SELECT facts, "until" FROM tidemill_owner ORDER BY id', [])
    return [OwnerFacts(_decode(bytes(facts)), until) for facts, until in found]


class AttachedOwner:
    """An owner attached in this process."""

    def __init__(
        self, send: Callable[[AttachedOwner, Step, int], Reply], owner: Owner, wakes: str
    ) -> None:
        self.owner = owner
        self.calls = RepeatedCalls(functools.partial(send, self))
        self.renewed = time.monotonic()
        self.asleep = Asleep()
        self.watched: list[int] = []
        self.watched_fds: list[int] = []
        self._pipe = WakePipe()
        self._bell = Bell(wakes, OWNERS)

    def parked(
        self, timeout: float, fds: Sequence[int]
    ) -> Generator[Until, list[int], tuple[list[int], bool]]:
        """Wait; return the readable descriptors, and True when a watched owner has died."""
        mine = [self._pipe.fd, *self._bell.fds]
        ready = set((yield Until(timeout, [*mine, *fds], self.watched_fds)))
        if self._pipe.fd in ready:
            self._pipe.drain()
        self._bell.drain()
        return [fd for fd in fds if fd in ready], not ready.isdisjoint(self.watched_fds)

    def wake(self) -> None:
        """End the owner's sleep, from any thread."""
        self._pipe.wake()

    def close(self) -> None:
        """Close the pipe and the socket after all threads have left the owner's wait."""
        self.asleep.end(self.wake)
        self._pipe.close()
        self._bell.close()

    def after_fork_child(self) -> None:
        """Close the copies of the pipe and the socket in a forked child."""
        self._pipe.after_fork_child()
        self._bell.after_fork_child()


class Owners:
    """The owners that this process has in one store.

    ``send`` makes a step, ``list_owners`` reads the list with the database's time, and ``give_up``
    gives back the leases of a dead owner.
    """

    def __init__(
        self,
        store: str,
        send: Callable[[AttachedOwner, Step, int], Reply],
        list_owners: Callable[[], tuple[list[OwnerFacts], float]],
        give_up: Callable[[str, Mapping[int, str] | None], int],
    ) -> None:
        self._send = send
        self._list = list_owners
        self._give_up = give_up
        self._by_id: dict[str, AttachedOwner] = {}
        self.folder = os.path.join(private_folder(), store)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        self.wakes = os.path.join(self.folder, "wake")
        self._liveness = Liveness(os.path.join(self.folder, "owners"))
        self._watching = Lock()

    @property
    def boards(self) -> str:
        """The folder in which scoreboards may lie."""
        folder = os.path.join(self.folder, "boards")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return folder

    def __getitem__(self, owner_id: str) -> AttachedOwner:
        """An attached owner.

        Raises:
            TidemillError: the owner is not attached in this process.
        """
        attached = self._by_id.get(owner_id)
        if attached is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return attached

    def attached(self) -> list[str]:
        """The ids of the owners of this process."""
        return list(self._by_id)

    def enter(self, owner: Owner) -> None:
        """Make the FIFO and the socket of an owner that is about to be listed."""
        self._liveness.hold(number_of(owner.id))
        self._by_id[owner.id] = AttachedOwner(self._send, owner, self.wakes)

    def leave(self, owner_id: str) -> None:
        """Close the FIFO and the socket of an owner that is no longer listed."""
        attached = self._by_id.pop(owner_id, None)
        if attached is not None:
            attached.close()
            with self._watching:
                self._unwatch()
            self._liveness.let_go(number_of(owner_id))

    def wake(self, owner_id: str) -> None:
        """End an owner's sleep, from any thread."""
        attached = self._by_id.get(owner_id)
        if attached is not None:
            attached.wake()

    def parked(self, attached: AttachedOwner, timeout: float, fds: Sequence[int]) -> Parked:
        """Sleep as an owner; give back the leases of owners that die meanwhile."""
        with attached.asleep.inside() as may:
            if not may:
                return []
            ready, died = yield from attached.parked(timeout, fds)
        if died:
            self.reap(alive_for=0.0)
        return ready

    # -- deaths -------------------------------------------------------------------------

    def watch(self, attached: AttachedOwner, owners: Sequence[OwnerFacts]) -> bool:
        """Let the deaths of neighbours on this machine end the owner's sleep.

        True when a neighbour is dead already.
        """
        here = [one.owner for one in owners if one.owner.host == attached.owner.host]
        ring = sorted((number_of(owner.id), owner.kind == "worker") for owner in here)
        with self._watching:
            near = neighbours(number_of(attached.owner.id), ring)
            near = [number for number in near if self._liveness.is_here(number)]
            attached.watched_fds, gone = self._liveness.watch(near)
            attached.watched = near
            self._unwatch()
        return gone

    def _unwatch(self) -> None:
        owners = list(self._by_id.values())
        self._liveness.unwatch({number for one in owners for number in one.watched})

    def reap(self, alive_for: float) -> int:
        """Give back the leases of dead owners; return the number of dead owners.

        ``alive_for``: the seconds for which the database has answered every call. With 0, a lease
        that is over proves no death.
        """
        self._liveness.keep()
        owners, now = self._list()
        dead = [
            one.owner
            for one in owners
            if one.owner.id not in self._by_id and self._is_dead(one, now, alive_for)
        ]
        for owner in dead:
            self._give_up(owner.id, self._causes(owner))
            self._liveness.remove(number_of(owner.id))
            if owner.board:
                remove_scoreboard(owner.board, owner.id)
            name = owner.name or owner.id
            _LOG.warning("%s %s died; its jobs go back", owner.kind, name)
        gone = {owner.id for owner in dead}
        left = [one for one in owners if one.owner.id not in gone]
        for attached in list(self._by_id.values()):
            self.watch(attached, left)
        return len(dead)

    def _is_dead(self, one: OwnerFacts, now: float, alive_for: float) -> bool:
        number = number_of(one.owner.id)
        if self._liveness.is_here(number):
            return not self._liveness.alive(number)
        return alive_for > 0 and one.until < now

    def _causes(self, owner: Owner) -> dict[int, str] | None:
        """The jobs that a dead owner ran, by its scoreboard; None without the scoreboard."""
        if owner.kind == "consumer" or not owner.board:
            return None
        running = read_scoreboard(owner.board, owner.id)
        if running is None:
            return None
        return dict.fromkeys(running, f"worker {owner.name} died with its processes")

    def after_fork_child(self) -> None:
        """Leave the owners to the parent, in a forked child."""
        self._liveness.after_fork_child()
        for attached in list(self._by_id.values()):
            attached.after_fork_child()
        self._by_id = {}
