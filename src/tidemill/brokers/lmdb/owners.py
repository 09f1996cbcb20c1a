"""The owners of this process in an LMDB store: their places to sleep, and the list of owners.

Local owners have no lease here: an owner without a FIFO is dead. :mod:`.owner_table` has the list.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Generator, Sequence

from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.lmdb.engine.environment import translated
from tidemill.brokers.lmdb.engine.group_commit import BRISK
from tidemill.brokers.lmdb.engine.store import Store
from tidemill.brokers.lmdb.engine.wakeup import Sleeper, WakeUps
from tidemill.brokers.lmdb.owner_table import heard, list_owner, note_attached, owner_rows
from tidemill.brokers.lmdb.settle import strike
from tidemill.brokers.lmdb.transitions import Commit, Transitions
from tidemill.brokers.shared import owners as shared
from tidemill.brokers.shared.liveness import Liveness
from tidemill.brokers.shared.owners import Causes, Ended, Proof, Row
from tidemill.brokers.shared.remote_owners import SignOfLife
from tidemill.brokers.shared.waits import Parked, Until
from tidemill.core.files import Folder
from tidemill.core.job import Owner
from tidemill.core.scoreboard import sweep_scoreboards
from tidemill.errors import BrokerUnavailable, StoreFull


class LocalOwner(shared.AttachedOwner):
    """An owner of this process: its number, and its place to sleep."""

    def __init__(self, owner: Owner, number: int, wakeups: WakeUps, sleeper: Sleeper) -> None:
        super().__init__(owner, number)
        self.wakeups = wakeups
        self.sleeper = sleeper
        self.asked: Want | None = None  # the want that the owner left when it went to sleep
        self.told = 0  # the highest token that the owner may know
        self.last_queue = 0  # the last queue that a fair want took from

    def parked(self, timeout: float, fds: Sequence[int]) -> Generator[Until, list[int], Ended]:
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
        self.sleeper.wake()

    def after_fork_child(self) -> None:
        os.close(self.sleeper.fd)


class Owners(shared.Owners[LocalOwner]):
    """The owners that this process has in one store. ``now`` tells the store's time."""

    def __init__(self, store: Store, commit: Commit, now: Callable[[], int]) -> None:
        self._store = store
        self._commit = commit
        self._now = now
        try:
            folder: Folder | None = store.folder_of("owners")
        except FileNotFoundError:  # the store never had an owner, and this process only reads
            folder = None
        super().__init__(Liveness(folder))

    def as_waiting(self) -> None:
        """Mark this process's workers as waiting, so that they can get jobs of fired schedules."""
        for local_owner in list(self._by_id.values()):
            if local_owner.owner.kind == "worker":
                local_owner.wakeups.set_waiting(local_owner.sleeper, True)

    @property
    def boards(self) -> str:
        """The folder of scoreboards; empty when the disk takes no more folders."""
        try:
            return self._board_folder().path
        except OSError:
            return ""

    def _board_folder(self) -> Folder:
        return self._store.folder_of("boards")

    def listed(self) -> list[Owner]:
        rows = self._rows()
        alive = self._liveness.alive
        return [row.owner for row in rows if row.owner.lease or alive(row.number)]

    def _rows(self) -> list[Row]:
        with self._store.reading_txn() as txn:
            rows = owner_rows(txn, self._store.tables)
        return [Row(owner, number, float("inf")) for number, owner in rows]

    def _state(self, attached: LocalOwner) -> object:
        with self._store.reading_txn() as txn:
            tables = self._store.tables
            return txn.stat(tables.owner)["entries"], txn.get(self._store.key("owners"))

    def _trusts(self) -> bool:
        return True

    def _is_near(self, row: Row) -> bool:
        return True  # the scoreboards lie in the store

    def _draw(self, owner: Owner) -> int:
        return self._commit(lambda commit: commit.count_up("owners"))

    def _make(self, owner: Owner, number: int) -> LocalOwner:
        wakeups, sleepers = self._store.wakeups, list[Sleeper]()

        def take(commit: Transitions) -> None:
            if not sleepers:  # if the request is replayed, the sleeper exists already
                sleepers.append(wakeups.take(number))
            commit.ring_rest()  # a hint may have gone to a process that died
            commit.untimed = True

        try:
            self._commit(take)
            return LocalOwner(owner, number, wakeups, sleepers[0])
        except BaseException:
            for sleeper in sleepers:
                wakeups.give_up(sleeper)
            raise

    def _list(self, attached: LocalOwner, before: LocalOwner | None) -> None:
        self._commit(lambda commit: list_owner(commit, attached.number, attached.owner))

    def _let_go(self, owner_id: str, causes: Causes, proof: Proof, *, brisk: bool) -> int | None:
        def apply(commit: Transitions) -> int | None:
            for number, owner in owner_rows(commit.txn, commit.t):
                if owner.id == owner_id and self._is_proven(commit, number, owner, proof):
                    self._store.wakeups.ring_owner(number)  # wake the owner: it may be alive
                    held = strike(commit, number, owner, causes)
                    commit.ring_rest()  # pass on hints that this owner did not follow
                    return held
            return None

        return self._commit(apply, patience=self._store.commits.brisk if brisk else None)

    def _is_proven(self, commit: Transitions, number: int, owner: Owner, proof: Proof) -> bool:
        """Whether the proof of an owner's death still holds."""
        if isinstance(proof, Row):
            return number == proof.number and not self._liveness.alive(number)
        words = {} if proof is None else heard(commit.txn, commit.t, commit.now)
        return proof is None or words.get((owner.id, number)) == proof

    def attach(self, owner: Owner) -> None:
        self._store.room.check_place()
        if not owner.lease:  # its former self would be taken for dead without its FIFO
            self.detach(owner.id)
        try:
            super().attach(owner)
        except OSError as error:  # the disk has no room for the FIFO of the owner
            raise translated(error, self._store.folder)  # noqa: B904 - it names its cause

    def detach(self, owner_id: str, *, brisk: bool = True) -> None:
        super().detach(owner_id, brisk=brisk)

    def _drop(self, attached: LocalOwner) -> None:
        super()._drop(attached)
        with contextlib.suppress(BrokerUnavailable, StoreFull):
            self._give_up([attached])

    def leave(self) -> None:
        # If the list cannot be written, other owners notice that these owners are gone.
        with contextlib.suppress(BrokerUnavailable, StoreFull):
            for attached in list(self._by_id.values()):
                if not attached.owner.lease:
                    self.detach(attached.owner.id)
        left = list(self._by_id.values())
        for attached in left:
            super()._drop(attached)
        with contextlib.suppress(BrokerUnavailable, StoreFull):
            self._give_up(left)

    def _give_up(self, local_owners: Collection[LocalOwner]) -> None:
        """Give up the places where these owners slept."""

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

    def _join(self, owner: Owner) -> int:
        def apply(commit: Transitions) -> int:
            rows = owner_rows(commit.txn, commit.t)
            listed = [number for number, one in rows if one.id == owner.id and one.lease]
            number = listed[0] if listed else commit.count_up("owners")
            list_owner(commit, number, owner)
            note_attached(commit, number, owner)
            return number

        return self._commit(apply)

    def _remote(self, owner_id: str) -> tuple[Owner, int] | None:
        remote = (row for row in self._rows() if row.owner.id == owner_id and row.owner.lease)
        return next(((row.owner, row.number) for row in remote), None)

    def _words(self) -> dict[tuple[str, int], SignOfLife]:
        with self._store.reading_txn() as txn:
            return heard(txn, self._store.tables, self._now())

    def parked(self, attached: LocalOwner, timeout: float, fds: Sequence[int]) -> Parked:
        """Sleep as an owner, and give back the jobs of owners that die meanwhile."""
        # The look at the neighbours comes before the sleep. A new owner hints the others before its
        # commit, so right after a hint the list may not have the new owner yet. The exchange
        # between the hint and the next sleep waits for that commit.
        self._store.room.check_place()
        return (yield from super().parked(attached, timeout, fds))

    def reap(self) -> int:
        # Does nothing to a store that is gone: its files may now belong to another store.
        self._store.room.check_place()
        return super().reap()

    def sweep(self, commit: Transitions) -> None:
        """Remove the scoreboards of owners that are no longer listed."""
        rows = owner_rows(commit.txn, commit.t)
        sweep_scoreboards(self._board_folder(), {os.path.basename(o.board) for _, o in rows})
