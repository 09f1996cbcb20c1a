"""The owners of this process in the store: attaching, detaching, sleeping, detecting deaths.

:mod:`tidemill.brokers.shared.liveness` tells which owners live. :mod:`.owner_table` has the list.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection, Generator, Mapping, Sequence

from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.contract.parked_waits import Parked, Until
from tidemill.brokers.lmdb.group_commit import BRISK
from tidemill.brokers.lmdb.leases import causes_of, strike
from tidemill.brokers.lmdb.owner_table import list_owner, owner_of, owner_rows
from tidemill.brokers.lmdb.reply_cache import heard, note_attached
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.transitions import Commit, Transitions
from tidemill.brokers.lmdb.wakeup import Sleeper, WakeUps
from tidemill.brokers.shared.liveness import Liveness, neighbours
from tidemill.brokers.shared.remote_owners import Silence, Turns
from tidemill.core.crash_points import point
from tidemill.core.errors import BrokerUnavailable, StoreGone, TidemillError
from tidemill.core.owner import Owner
from tidemill.core.scoreboard import remove_scoreboard, sweep_scoreboards

log = logging.getLogger("tidemill")

_Ended = tuple[list[int], bool]


class LocalOwner:
    """An owner of this process: its number, and its place to sleep."""

    __slots__ = (
        *("asked", "wakeups", "epoch", "last_queue", "near", "number", "owner", "sleeper"),
        *("told", "watched", "watched_fds"),
    )

    def __init__(self, owner: Owner, number: int, wakeups: WakeUps, sleeper: Sleeper) -> None:
        self.owner = owner
        self.number = number
        self.wakeups = wakeups
        self.sleeper = sleeper
        self.asked: Want | None = None  # the want that the owner left when it went to sleep
        self.told = 0  # the highest token that the owner may know
        self.epoch: object = None  # the state of the list when the owner chose its neighbours
        self.watched: list[int] = []
        self.watched_fds: list[int] = []
        self.last_queue = 0  # the last queue that a fair want took from
        self.near = False  # its caller is in this process, so steps need no serials

    def parked(self, timeout: float, fds: Sequence[int]) -> Generator[Until, list[int], _Ended]:
        """Wait for a hint, a wake, a death, a readable descriptor or the timeout.

        Returns the readable descriptors, and True when a watched owner has died.
        """
        if self.owner.lease:
            timeout = min(timeout, self.owner.lease / 3)
        self.wakeups.set_waiting(self.sleeper, True)
        try:
            ready = yield Until(timeout, [self.sleeper.fd, *self.watched_fds, *fds])
        finally:
            self.wakeups.set_waiting(self.sleeper, False)
        if self.sleeper.fd in ready:
            self.sleeper.drain()
        died = not set(ready).isdisjoint(self.watched_fds)
        return [fd for fd in ready if fd in fds], died

    def wake(self) -> None:
        """End the sleep of the owner, from any thread."""
        self.sleeper.wake()

    def end_wait(self) -> None:
        """End all waits of the owner, before its place to sleep is given up."""
        self.sleeper.asleep.end(self.sleeper.wake)


class Owners:
    """The owners that this process has in one store."""

    def __init__(self, store: Store, commit: Commit) -> None:
        self._store = store
        self._commit = commit
        self._owners: dict[str, LocalOwner] = {}
        try:
            self._liveness = Liveness(store.folder_of("owners"))
        except FileNotFoundError:  # the store never had an owner, and this process only reads
            self._liveness = Liveness(None)
        self._watching = threading.Lock()
        self._turns = Turns()
        self._silence: Silence[int] = Silence()

    def __getitem__(self, owner_id: str) -> LocalOwner:
        """An attached owner. The calls of a remote owner may have come to another process before.

        Raises:
            TidemillError: the owner is not attached, or is attached in another process.
        """
        local_owner = self._owners.get(owner_id) or self._go_on(owner_id)
        if local_owner is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return local_owner

    def find(self, owner_id: str) -> LocalOwner | None:
        """The attached owner with this id, or None."""
        return self._owners.get(owner_id) or self._go_on(owner_id)

    def ids(self) -> list[str]:
        """The ids of all owners that are attached here."""
        return list(self._owners)

    def as_waiting(self) -> None:
        """Mark this process's workers as waiting, so that they can get jobs of fired schedules."""
        for local_owner in list(self._owners.values()):
            if local_owner.owner.kind == "worker":
                local_owner.wakeups.set_waiting(local_owner.sleeper, True)

    @property
    def boards(self) -> str:
        """The folder of scoreboards; empty when the disk takes no more folders."""
        try:
            return self._store.folder_of("boards").path
        except OSError:
            return ""

    # -- coming and going -----------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        """List an owner. A local owner lives with its process, a remote owner by signs of life."""
        self._store.room.check_place()
        here = self._owners.get(owner.id)
        if not owner.lease or (here is not None and not here.owner.lease):
            self.detach(owner.id)
        if owner.lease:
            self._go_on(owner.id, owner)
            return
        number = self._commit(lambda commit: commit.count_up("owners"))
        sleepers: list[Sleeper] = []

        def enlist(commit: Transitions) -> None:
            if not sleepers:  # if the request is replayed, the sleeper exists already
                sleepers.append(self._store.wakeups.take(number))
            self._liveness.hold(number)
            list_owner(commit, number, owner)

        try:
            self._commit(enlist)
            self._owners[owner.id] = LocalOwner(owner, number, self._store.wakeups, sleepers[0])
        except BaseException:  # if the owner is listed, other owners notice that it is gone
            self._liveness.let_go(number)
            for sleeper in sleepers:
                self._store.wakeups.give_up(sleeper)
            raise
        self._reap_soon()
        self._watch(self._owners[owner.id])

    def detach(self, owner_id: str, patience: float = BRISK) -> None:
        """Take an owner off the list. Its leases go back, and no attempt is counted."""
        if (local_owner := self._owners.pop(owner_id, None)) is None:
            if self._remote_number(owner_id, new=False):
                self.release(owner_id, {})
            return
        local_owner.end_wait()

        def apply(commit: Transitions) -> None:
            strike(commit, local_owner.number, local_owner.owner, {})
            commit.ring_rest()  # pass on a hint that the owner has not used
            self._store.wakeups.give_up(local_owner.sleeper)
            commit.untimed = True

        try:  # if this fails, other owners notice that the owner is gone
            self._commit(apply, patience=patience)
        finally:
            self._liveness.let_go(local_owner.number)
            self._store.wakeups.close_sleeper(local_owner.sleeper)
            with self._watching:
                self._unwatch()

    def leave(self) -> None:
        """Take local owners off the list when the broker closes; remote owners stay.

        If the list cannot be written, other owners notice that these owners are gone.
        """
        patience = BRISK
        for owner_id in self.ids():
            if not self._owners[owner_id].owner.lease:
                try:
                    self.detach(owner_id, patience)
                except BrokerUnavailable:
                    patience = 0.0  # do not wait again for the process that has the lock
        remote, self._owners = self._owners, {}
        with contextlib.suppress(BrokerUnavailable):
            self._give_up(remote.values())

    def _give_up(self, local_owners: Collection[LocalOwner]) -> None:
        """Give up the places where these owners slept."""
        for local_owner in local_owners:
            local_owner.end_wait()

        def apply(commit: Transitions) -> None:
            for local_owner in local_owners:
                commit.store.wakeups.give_up(local_owner.sleeper)
            commit.ring_rest()  # pass on hints that these owners did not follow
            commit.untimed = True

        try:
            if local_owners:
                self._commit(apply, patience=BRISK)
        finally:
            for local_owner in local_owners:
                self._store.wakeups.close_sleeper(local_owner.sleeper)

    # -- remote owners --------------------------------------------------------------------------

    def _remote_number(self, owner_id: str, *, new: bool) -> int:
        """The number of a listed remote owner; for others a new number if ``new``, else 0."""
        with self._store.reading_txn() as txn:
            rows = owner_rows(txn, self._store.tables)
        listed = [n for n, owner in rows if owner.id == owner_id and owner.lease]
        if listed or not new:
            return listed[0] if listed else 0
        return self._commit(lambda commit: commit.count_up("owners"))

    def _go_on(self, owner_id: str, owner: Owner | None = None) -> LocalOwner | None:
        """Serve the calls of a remote owner in this process from now on.

        With ``owner`` the owner attaches, perhaps again. Without it, the owner must be on the list.
        """
        with self._turns.of(owner_id):
            here = self._owners.get(owner_id)
            if here is not None and owner is None:  # another thread was faster
                return here
            if not (number := self._remote_number(owner_id, new=owner is not None)):
                return None
            wakeups, sleepers = self._store.wakeups, list[Sleeper]()
            if here is not None and here.number == number:
                sleepers.append(here.sleeper)
            elif here is not None:
                here.end_wait()

            def apply(commit: Transitions) -> Owner | None:
                if owner is not None:
                    list_owner(commit, number, owner)
                    note_attached(commit, number, owner)
                current = owner_of(commit.txn, commit.t, number)
                if not sleepers and current is not None:  # a replayed request has one
                    sleepers.append(wakeups.take(number))
                    commit.ring_rest()  # a hint may have gone to a process that died
                    commit.untimed = True
                if here is not None and current is not None and here.sleeper is not sleepers[0]:
                    wakeups.give_up(here.sleeper)
                return current

            try:
                current = self._commit(apply)
                if current is None:  # the owner was given up meanwhile
                    return None
                local_owner = LocalOwner(current, number, wakeups, sleepers[0])
            except BaseException:
                self._owners.pop(owner_id, None)
                for sleeper in sleepers:
                    wakeups.give_up(sleeper)
                raise
            local_owner.wake()  # end its first wait at once, since it may have missed a hint
            self._owners[owner_id] = local_owner
        self._watch(local_owner)
        return local_owner

    def anew(self, local_owner: LocalOwner) -> LocalOwner | None:
        """A remote owner that was lost and has attached again through another server; else None."""
        if self._remote_number(local_owner.owner.id, new=False) in (0, local_owner.number):
            return None
        with self._turns.of(local_owner.owner.id):
            if self._owners.get(local_owner.owner.id) is local_owner:
                del self._owners[local_owner.owner.id]
                self._give_up([local_owner])
        return self._go_on(local_owner.owner.id)

    def count_silence(self, now: int) -> float:
        """Give up remote owners that were silent for the length of their lease."""
        with self._store.reading_txn() as txn:
            words = heard(txn, self._store.tables, now)
        silent, again = self._silence.look(words)

        def apply(commit: Transitions) -> None:
            rows = owner_rows(commit.txn, commit.t)
            heard_now = heard(commit.txn, commit.t, commit.now)
            for number, owner in rows:
                if number in silent and heard_now.get(number) == words[number]:
                    self._store.wakeups.ring_owner(number)
                    strike(commit, number, owner, None)
            commit.ring_rest()

        if silent:
            self._commit(apply, patience=self._store.commits.brisk)
        self._forget()
        return again

    def _forget(self) -> None:
        """Give up the sleeping places of remote owners that are no longer listed.

        These owners may never call again. A sleeping owner is only woken, and forgotten later. An
        owner that is ``near`` is kept: its next step learns that the owner is lost.
        """
        away = [m for m in list(self._owners.values()) if m.owner.lease and not m.near]
        with self._store.reading_txn() as txn:
            listed = {number for number, _ in owner_rows(txn, self._store.tables)}
        left = [one for one in away if one.number not in listed and self._forget_one(one)]
        with self._watching:
            self._unwatch()
        self._give_up(left)

    def _forget_one(self, gone: LocalOwner) -> bool:
        """Forget an owner; False if it sleeps, or has attached again."""
        with self._turns.of(gone.owner.id):
            if self._owners.get(gone.owner.id) is gone and gone.sleeper.asleep.end_if_empty():
                del self._owners[gone.owner.id]
                return True
        gone.wake()
        return False

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """Remove an owner of any process from the list; return the number of its leases."""

        def apply(commit: Transitions) -> int:
            for number, owner in owner_rows(commit.txn, commit.t):
                if owner.id == owner_id:
                    self._store.wakeups.ring_owner(number)  # wake the owner: it may be alive
                    return strike(commit, number, owner, causes)
            return 0

        return self._commit(apply)

    def wake(self, owner_id: str) -> None:
        """End an owner's sleep, from any thread."""
        if local_owner := self._owners.get(owner_id):
            local_owner.wake()

    # -- deaths ---------------------------------------------------------------------------------

    def alive(self) -> list[Owner]:
        """The owners attached now, in any process."""
        with self._store.reading_txn() as txn:
            rows = owner_rows(txn, self._store.tables)
        return [owner for number, owner in rows if owner.lease or self._liveness.alive(number)]

    def parked(self, local_owner: LocalOwner, timeout: float, fds: Sequence[int]) -> Parked:
        """Sleep as an owner, and give back the jobs of owners that died meanwhile.

        The look at the neighbours comes before the sleep. A new owner hints the others before its
        commit, so right after a hint the list may not have the new owner yet. The exchange between
        the hint and the next sleep waits for that commit.

        Raises:
            StoreGone: the store was deleted, or another was put in its place.
        """
        with local_owner.sleeper.asleep.inside() as may:
            if not may:
                return []  # the owner was given up or attached again a moment ago
            self._store.room.check_place()
            timeout = min(timeout, self._watch(local_owner))
            ready, died = yield from local_owner.parked(timeout, fds)
        if died:
            self._reap_soon()
        return ready

    def _watch(self, local_owner: LocalOwner) -> float:
        """Watch the owner's neighbours for deaths; return the seconds until the next look."""
        seconds = float("inf")
        while self._choose(local_owner):  # a neighbour died before it could be watched
            if not self._reap_soon():
                return BRISK
            seconds = 0.0  # the owner may take the jobs of the dead neighbour
        return seconds

    def _choose(self, local_owner: LocalOwner) -> bool:
        """Choose new neighbours if the list has changed; True when a neighbour is dead already."""
        with self._store.reading_txn() as txn:
            tables = self._store.tables
            epoch = txn.stat(tables.owner)["entries"], txn.get(self._store.key("owners"))
            if epoch == local_owner.epoch:
                return False
            rows = owner_rows(txn, tables)
        ring = [(n, owner.kind == "worker") for n, owner in rows if not owner.lease]
        numbers = neighbours(local_owner.number, ring)
        with self._watching:
            local_owner.watched_fds, gone = self._liveness.watch(numbers)
            local_owner.watched = numbers
            self._unwatch()
        local_owner.epoch = None if gone else epoch
        return gone

    def _unwatch(self) -> None:
        wanted = {number for one in list(self._owners.values()) for number in one.watched}
        self._liveness.unwatch(wanted)

    def _reap_soon(self) -> bool:
        """Reap; False when another process writes. Then the next wait finds the same deaths."""
        try:
            self.reap()
        except StoreGone:
            raise
        except BrokerUnavailable as error:
            log.debug("dead owners are handled later: %s", error)
            return False
        return True

    def reap(self) -> int:
        """Give back the jobs of owners that died; return the number of these owners.

        Does nothing to a store that is gone: its files may now belong to another store.

        Raises:
            StoreGone: the store was deleted, or another was put in its place.
        """
        self._store.room.check_place()
        with self._store.reading_txn() as txn:
            rows = owner_rows(txn, self._store.tables)
        alive = self._liveness.alive
        gone = {number for number, owner in rows if not owner.lease and not alive(number)}
        if not gone:
            return 0
        reaped: list[Owner] = []

        def apply(commit: Transitions) -> None:
            reaped.clear()  # if the request is replayed, begin with an empty list
            for number, owner in owner_rows(commit.txn, commit.t):
                if number in gone and not self._liveness.alive(number):
                    strike(commit, number, owner, causes_of(commit, number, owner))
                    point("store.reaping")
                    reaped.append(owner)
            commit.ring_rest()  # pass on hints that these owners did not follow

        self._commit(apply, patience=self._store.commits.brisk)
        point("store.reaped")
        for owner in reaped:
            if owner.board:
                remove_scoreboard(owner.board, owner.id, self._store.folder_of("boards"))
        return len(reaped)

    def sweep(self, commit: Transitions) -> None:
        """Remove the files of owners that are no longer listed."""
        rows = owner_rows(commit.txn, commit.t)
        self._liveness.sweep({number for number, _ in rows})
        boards = self._store.folder_of("boards")
        sweep_scoreboards(boards, {os.path.basename(o.board) for _, o in rows})

    def after_fork_child(self) -> None:
        """Drop all owners in a forked child: they belong to the parent.

        Close the copied descriptors at once. An open copy would make a dead parent seem alive.
        """
        self._liveness.after_fork_child()
        self._watching, self._turns = threading.Lock(), Turns()
        for local_owner in list(self._owners.values()):
            os.close(local_owner.sleeper.fd)
        self._owners = {}
