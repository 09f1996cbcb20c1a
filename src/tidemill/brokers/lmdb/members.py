"""The owners of this process, as members of the store: coming, going, and noticing who died.

Who is alive is in :mod:`tidemill.brokers.liveness`, the list itself in :mod:`.roster`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

from tidemill.board import read_board, remove_board, sweep_boards
from tidemill.brokers.base import Want
from tidemill.brokers.liveness import Liveness, neighbours
from tidemill.brokers.lmdb.calls import Commit
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.roster import list_owner, owner_rows, strike_owner
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.verdicts import leases_of, release_owner
from tidemill.brokers.lmdb.wake import Bells, Sleeper
from tidemill.crash import point
from tidemill.errors import TidemillError
from tidemill.job import RELAY, Owner

__all__ = ["Member", "Members"]


class Member:
    """An owner of this process: its number, and where it sleeps."""

    __slots__ = (
        *("asked", "bells", "epoch", "last_queue", "number", "owner", "sleeper", "told"),
        *("wake_read", "wake_write", "watched", "watched_fds"),
    )

    def __init__(self, owner: Owner, number: int, bells: Bells, sleeper: Sleeper) -> None:
        self.owner = owner
        self.number = number
        self.bells = bells
        self.sleeper = sleeper
        self.asked: Want | None = None  # what it left its terms for
        self.told = 0  # the highest token it may know
        self.epoch: object = None  # as of which it watches others
        self.watched: list[int] = []
        self.watched_fds: list[int] = []
        self.last_queue = 0  # that a fair want was served from
        self.wake_read, self.wake_write = (
            os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        )

    def sleep(self, timeout: float, fds: Sequence[int]) -> tuple[list[int], bool]:
        """Until a hint, a wake, a death, a readable descriptor or the timeout.

        The descriptors that are readable, and whether one of those it watches has died.
        """
        self.bells.set_waiting(self.sleeper, True)
        try:
            ready = self.sleeper.wait(timeout, [self.wake_read, *self.watched_fds, *fds])
        finally:
            self.bells.set_waiting(self.sleeper, False)
        if self.wake_read in ready:
            try:
                os.read(self.wake_read, 4096)
            except BlockingIOError:
                pass
        died = not set(ready).isdisjoint(self.watched_fds)
        return [fd for fd in ready if fd in fds], died

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
        self._watching = threading.Lock()

    def __getitem__(self, owner_id: str) -> Member:
        """A member that is attached.

        Raises:
            TidemillError: it is not, or not here.
        """
        member = self._members.get(owner_id)
        if member is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return member

    def as_waiting(self) -> None:
        """Take workers of this process for waiting: one that fires a schedule looks right after."""
        for member in list(self._members.values()):
            if member.owner.kind == "worker":
                member.bells.set_waiting(member.sleeper, True)

    def ids(self) -> list[str]:
        """The ids of all that are attached here."""
        return list(self._members)

    @property
    def boards(self) -> str:
        """Where boards may lie."""
        folder = os.path.join(self._store.files, "boards")
        os.makedirs(folder, exist_ok=True)
        return folder

    # -- coming and going -----------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        """Make an owner known, and alive as long as this process is."""
        self.detach(owner.id)
        number = self._commit(lambda moves: moves.count_up("owners"))
        sleepers: list[Sleeper] = []

        def enlist(moves: Moves) -> None:
            if not sleepers:  # a replay finds it taken
                sleepers.append(self._store.bells.take(number))
                self._liveness.hold(number)
            list_owner(moves, number, owner)

        try:
            self._commit(enlist)
            self._members[owner.id] = Member(owner, number, self._store.bells, sleepers[0])
        except BaseException:  # if it is on the list by now, others see that it is gone
            self._liveness.let_go(number)
            for sleeper in sleepers:
                self._store.bells.give_up(sleeper)
            raise
        self.reap()
        self._watch(self._members[owner.id])

    def detach(self, owner_id: str) -> None:
        """Take an owner off the list; what it held goes back uncounted."""
        member = self._members.pop(owner_id, None)
        if member is None:
            return

        def apply(moves: Moves) -> None:
            _strike(moves, member.number, member.owner, {})
            moves.ring_rest()  # a hint it was given and did not follow
            self._store.bells.give_up(member.sleeper)
            moves.untimed = True

        self._commit(apply)
        self._liveness.let_go(member.number)
        os.close(member.wake_read)
        os.close(member.wake_write)
        with self._watching:
            self._unwatch()

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """Take an owner of any process off the list; how many leases it had."""

        def apply(moves: Moves) -> int:
            for number, owner in owner_rows(moves.txn, moves.t):
                if owner.id == owner_id:
                    self._store.bells.ring_owner(number)  # if it lives, it shall hear of it
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

    def wait(self, member: Member, timeout: float, fds: Sequence[int]) -> list[int]:
        """Sleep as a member, and give back what owners held that died meanwhile."""
        ready, died = member.sleep(timeout, fds)
        if died:
            self.reap()
        self._watch(member)
        return ready

    def _watch(self, member: Member) -> None:
        """Have the member's sleep end when a neighbour dies; a new ring, if the list changed."""
        with self._store.env.begin() as txn:
            tables = self._store.tables
            epoch = txn.stat(tables.owner)["entries"], txn.get(self._store.key("owners"))
            if epoch == member.epoch:
                return
            rows = owner_rows(txn, tables)
        numbers = neighbours(member.number, [(n, owner.kind == "worker") for n, owner in rows])
        with self._watching:
            member.watched_fds, gone = self._liveness.watch(numbers)
            member.watched = numbers
            self._unwatch()
        if gone:  # it died before it could be watched
            self.reap()
        else:
            member.epoch = epoch

    def _unwatch(self) -> None:
        wanted = {number for member in self._members.values() for number in member.watched}
        self._liveness.unwatch(wanted)

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
        for owner in reaped:
            if owner.board:
                remove_board(owner.board, owner.id)
        return len(reaped)

    def sweep(self, moves: Moves) -> None:
        """Remove the files of owners that are no longer on the list, whoever left them behind."""
        rows = owner_rows(moves.txn, moves.t)
        self._liveness.sweep({number for number, _ in rows})
        sweep_boards(self.boards, {os.path.basename(o.board) for _, o in rows})

    def after_fork_child(self) -> None:
        """In a forked child: all are the parent's; close our copies at once.

        Else the parent would seem alive for as long as any child of it is.
        """
        self._liveness.after_fork_child()
        self._watching = threading.Lock()
        for member in self._members.values():
            for fd in member.descriptors():
                os.close(fd)
        self._members = {}


def _strike(moves: Moves, number: int, owner: Owner, causes: Mapping[int, str] | None) -> int:
    """Take an owner off the list, with its leases and commands; how many leases it had."""
    if causes is None and owner.kind == RELAY:
        causes = {}
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
