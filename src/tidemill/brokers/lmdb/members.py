"""The owners of this process, as members of the store: coming, going, and noticing who died.

Who is alive is in :mod:`tidemill.brokers.liveness`, the list itself in :mod:`.roster`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection, Generator, Mapping, Sequence

from tidemill.board import remove_board, sweep_boards
from tidemill.brokers.base import Want
from tidemill.brokers.liveness import Liveness, neighbours
from tidemill.brokers.lmdb.calls import Commit
from tidemill.brokers.lmdb.commit import BRISK
from tidemill.brokers.lmdb.deaths import causes_of, strike
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.roster import list_owner, owner_rows
from tidemill.brokers.lmdb.said import heard, note_attached
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.wake import Bells, Sleeper
from tidemill.brokers.parking import Parked, Until
from tidemill.brokers.silence import Silence
from tidemill.crash import point
from tidemill.errors import BrokerUnavailable, StoreGone, TidemillError
from tidemill.job import Owner

__all__ = ["Member", "Members"]

log = logging.getLogger("tidemill")

_Ended = tuple[list[int], bool]


class Member:
    """An owner of this process: its number, and where it sleeps."""

    __slots__ = (
        *("asked", "bells", "epoch", "last_queue", "near", "number", "owner", "sleeper"),
        *("told", "watched", "watched_fds"),
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
        self.near = False  # its steps bear no serials: whoever makes them attached it here

    def parked(self, timeout: float, fds: Sequence[int]) -> Generator[Until, list[int], _Ended]:
        """Until a hint, a wake, a death, a readable descriptor or the timeout.

        The descriptors that are readable, and whether one of those it watches has died.
        """
        if self.owner.lease:
            timeout = min(timeout, self.owner.lease / 3)
        self.bells.set_waiting(self.sleeper, True)
        try:
            ready = yield Until(timeout, [self.sleeper.fd, *self.watched_fds, *fds])
        finally:
            self.bells.set_waiting(self.sleeper, False)
        if self.sleeper.fd in ready:
            self.sleeper.drain()
        died = not set(ready).isdisjoint(self.watched_fds)
        return [fd for fd in ready if fd in fds], died

    def wake(self) -> None:
        """End its sleep, from any thread."""
        self.sleeper.wake()

    def end_wait(self) -> None:
        """Have nobody in its wait: where it sleeps is to be given up."""
        self.sleeper.asleep.end(self.sleeper.wake)


class Members:
    """The members this process has in one store."""

    def __init__(self, store: Store, commit: Commit) -> None:
        self._store = store
        self._commit = commit
        self._members: dict[str, Member] = {}
        try:
            self._liveness = Liveness(store.folder_of("owners"))
        except FileNotFoundError:  # of a store that is only read: nobody has ever been here
            self._liveness = Liveness(None)
        self._watching = threading.Lock()
        self._joining = threading.Lock()
        self._silence: Silence[int] = Silence()

    def __getitem__(self, owner_id: str) -> Member:
        """A member that is attached; one elsewhere may have been in another process.

        Raises:
            TidemillError: it is not, or not here.
        """
        member = self._members.get(owner_id) or self._go_on(owner_id)
        if member is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return member

    def find(self, owner_id: str) -> Member | None:
        """A member that is attached, or None."""
        return self._members.get(owner_id) or self._go_on(owner_id)

    def ids(self) -> list[str]:
        """The ids of all that are attached here."""
        return list(self._members)

    def as_waiting(self) -> None:
        """Take workers of this process for waiting: one that fires a schedule looks right after."""
        for member in list(self._members.values()):
            if member.owner.kind == "worker":
                member.bells.set_waiting(member.sleeper, True)

    @property
    def boards(self) -> str:
        """Where boards may lie; empty when the disk takes no more folders."""
        try:
            return self._store.folder_of("boards").path
        except OSError:
            return ""

    # -- coming and going -----------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        """Make an owner known, and alive as long as this process is, or it is not silent."""
        self._store.watched()
        self._store.room.check_place()
        here = self._members.get(owner.id)
        if not owner.lease or (here is not None and not here.owner.lease):
            self.detach(owner.id)
        if owner.lease:
            self._go_on(owner.id, owner)
            return
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
        self._reap_soon()
        self._watch(self._members[owner.id])

    def detach(self, owner_id: str, patience: float = BRISK) -> None:
        """Take an owner off the list; what it held goes back uncounted."""
        member = self._members.pop(owner_id, None)
        if member is None:
            if self._number_elsewhere(owner_id):
                self.release(owner_id, {})
            return
        member.end_wait()

        def apply(moves: Moves) -> None:
            strike(moves, member.number, member.owner, {})
            moves.ring_rest()  # a hint it was given and did not follow
            self._store.bells.give_up(member.sleeper)
            moves.untimed = True

        try:  # where this fails, others see that the owner is gone
            self._commit(apply, patience=patience)
        finally:
            self._liveness.let_go(member.number)
            self._store.bells.close_sleeper(member.sleeper)
            with self._watching:
                self._unwatch()

    def leave(self) -> None:
        """The broker is closed: owners of this process leave the list, those elsewhere stay.

        Where the list cannot be written, others see that the owners are gone.
        """
        patience = BRISK
        for owner_id in self.ids():
            if not self._members[owner_id].owner.lease:
                try:
                    self.detach(owner_id, patience)
                except BrokerUnavailable:
                    patience = 0.0  # the next would wait for the same process
        elsewhere, self._members = self._members, {}
        with contextlib.suppress(BrokerUnavailable):
            self._give_up(elsewhere.values())

    def _give_up(self, members: Collection[Member]) -> None:
        """Give up where they slept."""
        for member in members:
            member.end_wait()

        def apply(moves: Moves) -> None:
            for member in members:
                moves.store.bells.give_up(member.sleeper)
            moves.ring_rest()  # hints they were given and did not follow
            moves.untimed = True

        try:
            if members:
                self._commit(apply, patience=BRISK)
        finally:
            for member in members:
                self._store.bells.close_sleeper(member.sleeper)

    # -- owners elsewhere -----------------------------------------------------------------------

    def _number_elsewhere(self, owner_id: str) -> int:
        """The number of an owner elsewhere that is on the list, or 0."""
        with self._store.reading_txn() as txn:
            rows = owner_rows(txn, self._store.tables)
        return next((n for n, owner in rows if owner.id == owner_id and owner.lease), 0)

    def _go_on(self, owner_id: str, owner: Owner | None = None) -> Member | None:
        """Make the calls of an owner elsewhere from now on in this process.

        It attaches as ``owner``, perhaps once more, or is on the list; else None.
        """
        with self._joining:
            here = self._members.get(owner_id)
            if here is not None and owner is None:  # another thread was faster
                return here
            number = self._number_elsewhere(owner_id)
            if not number and owner is not None:
                number = self._commit(lambda moves: moves.count_up("owners"))
            elif not number:
                return None
            bells, sleepers = self._store.bells, list[Sleeper]()
            if here is not None and here.number == number:
                sleepers.append(here.sleeper)
            elif here is not None:
                here.end_wait()

            def apply(moves: Moves) -> Owner | None:
                if owner is not None:
                    list_owner(moves, number, owner)
                    note_attached(moves, number, owner)
                current = dict(owner_rows(moves.txn, moves.t)).get(number)
                if not sleepers and current is not None:  # a replay finds it taken
                    sleepers.append(bells.take(number))
                    moves.ring_rest()  # a hint may have died with the process it went to
                    moves.untimed = True
                if here is not None and current is not None and here.sleeper is not sleepers[0]:
                    bells.give_up(here.sleeper)
                return current

            try:
                current = self._commit(apply)
                if current is None:  # given up meanwhile
                    return None
                member = Member(current, number, bells, sleepers[0])
            except BaseException:
                self._members.pop(owner_id, None)
                for sleeper in sleepers:
                    bells.give_up(sleeper)
                raise
            member.wake()  # who waits first looks: something may have happened meanwhile
            self._members[owner_id] = member
        self._watch(member)
        return member

    def anew(self, member: Member) -> Member | None:
        """An owner elsewhere that is lost here, if it attached anew through another server."""
        if self._number_elsewhere(member.owner.id) in (0, member.number):
            return None
        with self._joining:
            if self._members.get(member.owner.id) is member:
                del self._members[member.owner.id]
                self._give_up([member])
        return self._go_on(member.owner.id)

    def count_silence(self, now: int) -> float:
        """Give up owners elsewhere that were silent for their lease; see the seam."""
        with self._store.reading_txn() as txn:
            words = heard(txn, self._store.tables, now)
        silent, again = self._silence.look(words)

        def apply(moves: Moves) -> None:
            rows, said = owner_rows(moves.txn, moves.t), heard(moves.txn, moves.t, moves.now)
            for number, owner in rows:
                if number in silent and said.get(number) == words[number]:
                    self._store.bells.ring_owner(number)
                    strike(moves, number, owner, None)
            moves.ring_rest()

        if silent:
            self._commit(apply, patience=self._store.commits.brisk)
        self._forget()
        return again

    def _forget(self) -> None:
        """Give up the places of owners elsewhere that are off the list, whoever struck them.

        They may never call again. Who is asleep is woken, and forgotten another time; one that is
        near is kept to be told that it is lost.
        """
        with self._joining:
            away = [m for m in list(self._members.values()) if m.owner.lease and not m.near]
            with self._store.reading_txn() as txn:
                listed = {number for number, _ in owner_rows(txn, self._store.tables)}
            gone = [member for member in away if member.number not in listed]
            left = [member for member in gone if member.sleeper.asleep.end_if_empty()]
            for member in gone:
                member.wake()
            with self._watching:
                for member in left:
                    self._members.pop(member.owner.id, None)
                self._unwatch()
            self._give_up(left)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """Take an owner of any process off the list; how many leases it had."""

        def apply(moves: Moves) -> int:
            for number, owner in owner_rows(moves.txn, moves.t):
                if owner.id == owner_id:
                    self._store.bells.ring_owner(number)  # if it lives, it shall hear of it
                    return strike(moves, number, owner, causes)
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
        with self._store.reading_txn() as txn:
            rows = owner_rows(txn, self._store.tables)
        return [owner for number, owner in rows if owner.lease or self._liveness.alive(number)]

    def parked(self, member: Member, timeout: float, fds: Sequence[int]) -> Parked:
        """Sleep as a member, and give back what owners held that died meanwhile."""
        with member.sleeper.asleep.inside() as may:
            if not may:
                return []  # it was given up a moment ago, or attached once more
            watched = self._store.watched()
            ready, died = yield from member.parked(timeout, [*fds, *watched])
        if watched and watched[0] in ready:
            ready.remove(watched[0])
            self._store.look_around()
        if died:
            self._reap_soon()
        self._watch(member)
        return ready

    def _watch(self, member: Member) -> None:
        """Have the member's sleep end when a neighbour dies; a new ring, if the list changed."""
        with self._store.reading_txn() as txn:
            tables = self._store.tables
            epoch = txn.stat(tables.owner)["entries"], txn.get(self._store.key("owners"))
            if epoch == member.epoch:
                return
            rows = owner_rows(txn, tables)
        ring = [(n, owner.kind == "worker") for n, owner in rows if not owner.lease]
        numbers = neighbours(member.number, ring)
        with self._watching:
            member.watched_fds, gone = self._liveness.watch(numbers)
            member.watched = numbers
            self._unwatch()
        if gone:  # it died before it could be watched
            self._reap_soon()
        else:
            member.epoch = epoch

    def _unwatch(self) -> None:
        wanted = {number for member in list(self._members.values()) for number in member.watched}
        self._liveness.unwatch(wanted)

    def _reap_soon(self) -> None:
        """Reap, unless another process writes: the next wait finds the same deaths."""
        try:
            self.reap()
        except StoreGone:
            raise
        except BrokerUnavailable as error:
            log.debug("who died is seen to later: %s", error)

    def reap(self) -> int:
        """Give back what owners that died held; how many owners that were.

        Not from a store that is gone: the files that tell who lives may be another store's by now.

        Raises:
            StoreGone: it was deleted, or another was put in its place.
        """
        self._store.room.check_place()
        with self._store.reading_txn() as txn:
            rows = owner_rows(txn, self._store.tables)
        alive = self._liveness.alive
        gone = {number for number, owner in rows if not owner.lease and not alive(number)}
        if not gone:
            return 0
        reaped: list[Owner] = []

        def apply(moves: Moves) -> None:
            reaped.clear()  # a replay begins anew
            for number, owner in owner_rows(moves.txn, moves.t):
                if number in gone and not self._liveness.alive(number):
                    strike(moves, number, owner, causes_of(moves, number, owner))
                    point("store.reaping")
                    reaped.append(owner)
            moves.ring_rest()  # hints they were given and did not follow

        self._commit(apply, patience=self._store.commits.brisk)
        point("store.reaped")
        for owner in reaped:
            if owner.board:
                remove_board(owner.board, owner.id, self._store.folder_of("boards"))
        return len(reaped)

    def sweep(self, moves: Moves) -> None:
        """Remove the files of owners that are no longer on the list, whoever left them behind."""
        rows = owner_rows(moves.txn, moves.t)
        self._liveness.sweep({number for number, _ in rows})
        boards = self._store.folder_of("boards")
        sweep_boards(boards, {os.path.basename(o.board) for _, o in rows})

    def after_fork_child(self) -> None:
        """In a forked child: all are the parent's; close our copies at once.

        Else the parent would seem alive for as long as any child of it is.
        """
        self._liveness.after_fork_child()
        self._watching, self._joining = threading.Lock(), threading.Lock()
        for member in list(self._members.values()):
            os.close(member.sleeper.fd)
        self._members = {}
