"""The base of all calls of the broker: this process's state of a store, and its commits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TypeVar

import lmdb

from tidemill.brokers.lmdb.due import come_due
from tidemill.brokers.lmdb.inspect import Inspection
from tidemill.brokers.lmdb.owners import Owners
from tidemill.brokers.lmdb.store import Store, close_store
from tidemill.brokers.lmdb.store_clock import StoreTime
from tidemill.brokers.lmdb.transfer import check_here, is_sealed
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.brokers.lmdb.waits import Waits
from tidemill.brokers.lmdb.workflows import FALL_MOST, flow
from tidemill.brokers.shared.lost_jobs import LostJob, log_lost
from tidemill.core.errors import TidemillError
from tidemill.core.retention import Retention

T = TypeVar("T")


class StoreCalls:
    """An open store in this process."""

    def __init__(
        self, url: str, store: Store, retention: Retention | None = None, *, reading: bool = False
    ) -> None:
        self.url = url
        self._reading = reading
        self._store = store
        self._retention = retention or Retention()
        self._closed = False
        self._next_tick = 0.0
        self._enter()

    def _enter(self) -> None:
        """Prepare for this process, which may be a fork of the process that opened the broker."""
        store = self._store
        self._pid = os.getpid()
        self._owners = Owners(store, self._commit)
        self.waits = Waits(store, self._commit)
        store.brokers.add(self)
        self._time = StoreTime(store)
        self._inspection = Inspection(store, self._time)

    def after_fork_child(self) -> None:
        """Drop owners and sleepers in a forked child: they belong to the parent."""
        self._owners.after_fork_child()
        self.waits.after_fork_child()

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")
        if self._pid != os.getpid():
            self._store.ready()
            self._enter()

    def _transitions(self, txn: lmdb.Transaction[bytes]) -> Transitions:
        now, wall = self._time.micros()
        return Transitions(self._store, txn, now, wall, self._retention)

    def _commit(
        self,
        apply: Callable[[Transitions], T],
        /,
        last: bool = False,
        patience: float | None = None,
    ) -> T:
        """Commit the changes of ``apply``, and log the jobs that it lost."""
        self._check_open()

        lost: list[LostJob] = []

        def whole(commit: Transitions) -> T:
            value = apply(commit)
            if commit.ended:
                flow(commit)
            lost[:], commit.lost = commit.lost, []
            return value

        value = self._store.commits.run(self._transitions, whole, last=last, patience=patience)
        if lost:
            log_lost(lost)
        return value

    def _act(self, apply: Callable[[Transitions], T], /, *, deletes: bool = False) -> T:
        """Commit, then count down all dependents; refuse while the jobs move to another store.

        Deletes are refused only in a sealed store.
        """
        last: list[Transitions] = []

        def here(commit: Transitions) -> T:
            last[:] = [commit]
            if not deletes or is_sealed(commit):
                check_here(commit)
            return apply(commit)

        def go_on(commit: Transitions) -> None:
            last[:] = [commit]
            come_due(commit)

        value = self._commit(here)
        # Each piece is a commit of its own: other processes may write between the pieces.
        while last[0].fallen >= FALL_MOST:
            self._commit(go_on)
        return value

    def close(self) -> None:
        if not self._closed and self._pid == os.getpid():
            with contextlib.ExitStack() as last:  # every step runs, even when another fails
                last.callback(close_store, self._store)
                last.callback(setattr, self, "_closed", True)
                last.callback(self.waits.close)
                self._owners.leave()
        self._closed = True
