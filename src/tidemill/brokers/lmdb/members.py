"""The owners of this process, as members of the store: coming, going, and noticing who died.

Who is alive is in :mod:`.owners`, the list itself in :mod:`.roster`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from tidemill.board import read_board, remove_board
from tidemill.brokers.lmdb.moves import Commit, Moves
from tidemill.brokers.lmdb.owners import Liveness
from tidemill.brokers.lmdb.roster import list_owner, owner_rows, strike_owner
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.verdicts import leases_of, release_owner
from tidemill.brokers.lmdb.wake import Sleeper
from tidemill.crash import point
from tidemill.errors import TidemillError
from tidemill.job import Owner

__all__ = ["Member", "Members"]


class Member:
    """An owner of this process: its number, and where it sleeps."""

    __slots__ = ("epoch", "last_queue", "number", "owner", "sleeper", "wake_read", "wake_write")

    def __init__(self, owner: Owner, number: int, sleeper: Sleeper) -> None:
        self.owner = owner
        self.number = number
        self.sleeper = sleeper
        self.epoch: object = None  # as of which it watches others
        self.last_queue = 0  # that a fair want was served from
        self.wake_read, self.wake_write = (
            os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        )

    def sleep(self, timeout: float, fds: Sequence[int]) -> list[int]:
        """Until a hint, a wake, a readable descriptor or the timeout; the readable ones."""
        ready = self.sleeper.wait(timeout, [self.wake_read, *fds])
        if self.wake_read in ready:
            ready.remove(self.wake_read)
            try:
                os.read(self.wake_read, 4096)
            except BlockingIOError:
                pass
        return ready

    def wake(self) -> None:
        """End its sleep, from any thread."""
        try:
            os.write(self.wake_write, b"x")
        except (BlockingIOError, BrokenPipeError):
            pass

    def descriptors(self) -> list[int]:
        """All that it has open."""
        return [self.sleeper.fd, self.wake_read, self.wake_write]


class Members:
    """The members this process has in one store."""

    def __init__(self, store: Store, commit: Commit) -> None:
        self._store = store
        self._commit = commit
        self._members: dict[str, Member] = {}
        self._liveness = Liveness(os.path.join(store.files, "owners"))
        self._deaths = 0  # noticed, and not looked after yet

    def __getitem__(self, owner_id: str) -> Member:
        """A member that is attached.

        Raises:
            TidemillError: it is not, or not here.
        """
        member = self._members.get(owner_id)
        if member is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return member

    def ids(self) -> list[str]:
        """The ids of all that are attached here."""
        return list(self._members)

    # -- coming and going -----------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        """Make an owner known, and alive as long as this process is."""
        self.detach(owner.id)
        number = self._commit(lambda moves: moves.count_up("owners"))
        self._liveness.hold(number)  # before anybody can see it, and never inside a transaction
        sleepers: list[Sleeper] = []

        def enlist(moves: Moves) -> None:
            if not sleepers:  # a replay finds it taken
                sleepers.append(self._store.bells.take(number))
            list_owner(moves, number, owner)

        try:
            self._commit(enlist)
        except BaseException:
            self._liveness.let_go(number)
            raise
        self._members[owner.id] = Member(owner, number, sleepers[0])
        self.reap()
        self.watch(self._members[owner.id])

    def detach(self, owner_id: str) -> None:
        """Take an owner off the list; what it held goes back uncounted."""
        member = self._members.pop(owner_id, None)
        if member is None:
            return

        def apply(moves: Moves) -> None:
            _strike(moves, member.number, member.owner, {})
            moves.ring_rest()  # a hint it was given and did not follow
            self._store.bells.give_up(member.sleeper)

        self._commit(apply)
        self._liveness.let_go(member.number)
        os.close(member.wake_read)
        os.close(member.wake_write)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """Take an owner of any process off the list; how many leases it had."""

        def apply(moves: Moves) -> int:
            for number, owner in owner_rows(moves.txn, moves.t):
                if owner.id == owner_id:
                    return _strike(moves, number, owner, causes)
            return 0

        return self._commit(apply)

    def wake(self, owner_id: str) -> None:
        """End an owner's sleep, from any thread."""
        member = self._members.get(owner_id)
        if member:
            member.wake()

    # -- deaths ---------------------------------------------------------------------------------

    def alive(self) -> list[Owner]:
        """The owners attached now, in any process."""
        with self._store.env.begin() as txn:
            rows = owner_rows(txn, self._store.tables)
        return [owner for number, owner in rows if self._liveness.alive(number)]

    def watch(self, member: Member) -> None:
        """Have the member woken when one of its neighbours dies; a new ring, if it changed."""
        with self._store.env.begin() as txn:
            tables = self._store.tables
            epoch = txn.stat(tables.owner)["entries"], txn.get(self._store.key("owners"))
            if epoch == member.epoch:
                return
            member.epoch = epoch
            rows = owner_rows(txn, tables)

        def died() -> None:
            self._deaths += 1
            self.wake(member.owner.id)

        self._liveness.watch(member.number, [number for number, _ in rows], died)
        if member.owner.kind == "worker":
            # A consumer looks only while it waits; so workers have a ring of their own besides.
            workers = [number for number, owner in rows if owner.kind == "worker"]
            self._liveness.watch(member.number, workers, died)

    def look_after_deaths(self) -> None:
        """Reap, if a death was noticed."""
        if self._deaths:
            self._deaths = 0
            self.reap()

    def reap(self) -> int:
        """Give back what owners that died held; how many owners that were."""
        with self._store.env.begin() as txn:
            rows = owner_rows(txn, self._store.tables)
        gone = {number for number, _ in rows if not self._liveness.alive(number)}
        if not gone:
            return 0
        reaped: list[Owner] = []

        def apply(moves: Moves) -> None:
            reaped.clear()  # a replay begins anew
            for number, owner in owner_rows(moves.txn, moves.t):
                if number in gone and not self._liveness.alive(number):
                    _strike(moves, number, owner, _causes(moves, number, owner))
                    point("store.reaping")
                    reaped.append(owner)
            moves.ring_rest()  # hints they were given and did not follow

        self._commit(apply)
        point("store.reaped")
        for number in gone:
            self._liveness.forget(number)
        for owner in reaped:
            if owner.board:
                remove_board(owner.board, owner.id)
        return len(reaped)

    def after_fork_child(self) -> None:
        """In a forked child: all are the parent's; close our copies at once.

        Else the parent would seem alive for as long as any child of it is.
        """
        self._liveness.after_fork_child()
        for member in self._members.values():
            for fd in member.descriptors():
                os.close(fd)
        self._members = {}


def _strike(moves: Moves, number: int, owner: Owner, causes: Mapping[int, str] | None) -> int:
    """Take an owner off the list, with its leases and commands; how many leases it had."""
    held = release_owner(moves, number, owner.name, causes)
    strike_owner(moves, number)
    return held


def _causes(moves: Moves, number: int, owner: Owner) -> dict[int, str] | None:
    """What a dead owner ran: a worker's board says; a consumer runs all it has taken."""
    if owner.kind == "consumer":
        return dict.fromkeys(leases_of(moves, number), f"{owner.name} died")
    running = read_board(owner.board, owner.id) if owner.board else None
    if running is None:
        return None
    return dict.fromkeys(running, f"worker {owner.name} died with its processes")
