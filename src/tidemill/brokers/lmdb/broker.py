"""``lmdb://``: the broker of one directory on disk. Durable, many processes, no server.

Each call that changes the store becomes one commit: :mod:`.transitions` has the changes of a
commit, and :mod:`.claim.exchange` holds the step of an owner. A call that only passes its arguments
on to a function of a commit, or to a look at the store, is one line here. The owners of this
process are in :mod:`.owners`, and its waiters in :mod:`.look.waits`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import lmdb

from tidemill.brokers.contract.admin import Admin
from tidemill.brokers.contract.early_leases import LeaseCallback
from tidemill.brokers.contract.exchange import Reply, Step, is_lost, lost
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import History
from tidemill.brokers.contract.inspection import Inspection
from tidemill.brokers.contract.job_numbers import JobNumbers
from tidemill.brokers.contract.limits import LimitCalls
from tidemill.brokers.contract.retention import Retention
from tidemill.brokers.contract.schedules import Change, Changed, Schedules
from tidemill.brokers.contract.transfer import Transfer
from tidemill.brokers.lmdb import admin, transfer
from tidemill.brokers.lmdb.claim.due import come_due, prune
from tidemill.brokers.lmdb.claim.exchange import exchange, fetch_committed, hand_over, hear_behalf
from tidemill.brokers.lmdb.engine.store import PREFIX, Store, StoreTime, close_store, store_around
from tidemill.brokers.lmdb.engine.wakeup import RESULT, bloom
from tidemill.brokers.lmdb.look.history import (
    keep_rows,
    kinds_of_history,
    prune_history,
    read_history,
)
from tidemill.brokers.lmdb.look.inspect import Inspector
from tidemill.brokers.lmdb.look.waits import Waits
from tidemill.brokers.lmdb.owners import Owners
from tidemill.brokers.lmdb.put.put import may_refuse, put, put_once, sweep_nonces
from tidemill.brokers.lmdb.put.put_one import PutOne, is_plain
from tidemill.brokers.lmdb.put.schedules import apply_changes, page_of_schedules, read_schedules
from tidemill.brokers.lmdb.put.unique import sweep_keys
from tidemill.brokers.lmdb.put.workflows import FALL_MOST, flow, is_unfinished
from tidemill.brokers.lmdb.settle import settle
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.brokers.shared.forwarded import Call, P, R, StoreCalls, by, forwarded_to
from tidemill.brokers.shared.lost_jobs import LostJob, log_lost
from tidemill.brokers.shared.waits import Parked
from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope
from tidemill.core.job import Lease, Owner, Put, Record, Verdict
from tidemill.errors import BrokerUnavailable, TidemillError

_PRUNE_MOST = 2000
_TICK = 30.0

T = TypeVar("T")


def looked(method: Call[P, R], look: Callable[..., R]) -> Call[P, R]:
    """A call of the contract that ``look`` answers in one read transaction."""

    def read(broker: LmdbBroker, **given: Any) -> R:
        broker._check_open()
        with broker._store.reading_txn() as txn:
            return look(broker._store, txn, **given)

    return forwarded_to(method, read)


def committed(method: Call[P, R], apply: Callable[..., R]) -> Call[P, R]:
    """A call of the contract that ``apply`` answers in one commit."""

    def commit(broker: LmdbBroker, **given: Any) -> R:
        return broker._commit(lambda commit: apply(commit, **given))

    return forwarded_to(method, commit)


def acted(method: Call[P, R], act: Callable[..., R], *, deletes: bool = False) -> Call[P, R]:
    """A call of the contract that ``act`` answers (:meth:`LmdbBroker._act`)."""

    def commit(broker: LmdbBroker, **given: Any) -> R:
        if "job_ids" in given:  # a replayed request reads them again
            given["job_ids"] = list(given["job_ids"])
        return broker._act(lambda commit: act(commit, **given), deletes=deletes)

    return forwarded_to(method, commit)


class LmdbBroker(StoreCalls):
    features = frozenset(Feature)
    _owners: Owners

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
        self._owners = Owners(store, self._commit, lambda: self._time.micros()[0])
        self.waits = Waits(store, self._commit)
        store.brokers.add(self)
        self._time = StoreTime(store)
        self._inspector = Inspector(store, self._time, self.url)

    @classmethod
    def around(cls, env: lmdb.Environment, prefix: str = PREFIX) -> LmdbBroker:
        """Make a broker in the caller's own environment; other processes use the broker's URL."""
        store = store_around(env, prefix)
        return cls(store.url, store)

    @property
    def identity(self) -> str:
        return self._time.identity

    @property
    def boards(self) -> str:
        return self._owners.boards

    def after_fork_child(self) -> None:
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
        """Commit, then count down all dependents; refuse while the jobs move to another store."""
        # Deletes are refused only in a sealed store.
        last: list[Transitions] = []

        def here(commit: Transitions) -> T:
            last[:] = [commit]
            if not deletes or commit.is_sealed:
                transfer.check_here(commit)
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

    # -- producing ------------------------------------------------------------------------------

    def put(
        self,
        jobs: Sequence[Envelope],
        *,
        txn: Any = None,
        hold: Collection[str] = (),
        let_go: Collection[str] = (),
        nonce: str = "",
    ) -> list[Put]:
        def accept(commit: Transitions) -> list[Put]:
            transfer.check_here(commit)
            # Overdue jobs end first. Then they do not count against ``max_size`` or hold a key.
            if may_refuse(commit, jobs) and commit.next_due() <= 0:
                come_due(commit)
            commit.hand_over = hand_over
            return put(commit, jobs, hold, let_go)

        self._check_open()
        apply, quick = put_once(nonce, jobs, accept) if nonce else accept, None
        if txn is None:
            if not nonce and not let_go and is_plain(jobs):
                quick = PutOne(self._store, self._time.micros, jobs[0])
            return self._store.commits.run(self._transitions, apply, quick=quick)
        with self._store.nested(txn) as inner:
            puts = apply(commit := self._transitions(inner))
            commit.finish()
        return puts

    # -- owning ---------------------------------------------------------------------------------

    def settle_inside(self, owner_id: str, verdict: Verdict, txn: Any) -> bool:
        self._check_open()
        local = self._owners[owner_id]
        with self._store.nested(txn) as inner:
            commit = self._transitions(inner)
            come_due(commit)
            done = settle(commit, local.number, local.owner.name, verdict)
            flow(commit)
            commit.finish()
        return done

    def attach(self, owner: Owner) -> None:
        self._act(lambda commit: None)
        self._owners.attach(owner)

    def exchange(self, step: Step) -> Reply:
        self._check_open()
        if step.behalf:
            return self._commit(lambda commit: hear_behalf(commit, step))
        local_owner = self._owners.find(step.owner) if step.serial else self._owners[step.owner]
        if local_owner is None:
            return lost(step)
        worker = local_owner.owner.kind == "worker"
        if (
            worker
            and not step.serial
            and (reply := fetch_committed(self._store, local_owner, step))
        ):
            return reply
        commits = self._store.commits
        most = commits.brisk if worker else min(step.patience or commits.patience, commits.patience)
        reply = self._commit(lambda commit: exchange(commit, local_owner, step), patience=most)
        if step.serial and is_lost(reply) and (anew := self._owners.anew(local_owner)):
            return self._commit(lambda commit: exchange(commit, anew, step))
        return reply

    def exchange_early(self, step: Step, heard: LeaseCallback) -> Reply:
        local_owner = self._owners[step.owner]
        return self._commit(lambda commit: exchange(commit, local_owner, step, heard), last=True)

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        self._check_open()
        local_owner = self._owners[owner_id]
        until_tick = max(0.0, self._next_tick - time.monotonic())
        ready = yield from self._owners.parked(local_owner, min(timeout, until_tick), fds)
        # If this tick fails, the next tick does its work.
        with contextlib.suppress(BrokerUnavailable):
            if time.monotonic() >= self._next_tick:
                self.tick()
        return ready

    def reap(self) -> int:
        self._check_open()
        return self._owners.reap()

    def tick(self) -> float:
        if self._reading:
            return _TICK
        self._next_tick = time.monotonic() + _TICK
        self.reap()
        with self._store.translating():
            self._store.env.reader_check()

        def keep_time(commit: Transitions) -> bool:
            self._store.room.renew()
            self._time.save(commit)
            self._owners.sweep(commit)
            more = come_due(commit)
            more = commit.partitions.sweep(_PRUNE_MOST) or more
            more = sweep_keys(commit, _PRUNE_MOST) >= _PRUNE_MOST or more
            more = sweep_nonces(commit) or more
            more = prune_history(commit, _PRUNE_MOST) >= _PRUNE_MOST or more
            return prune(commit, _PRUNE_MOST) >= _PRUNE_MOST or more

        while self._commit(keep_time, patience=self._store.commits.brisk):
            pass
        return _TICK

    # -- waiting for jobs -----------------------------------------------------------------------

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        records = self.get_many(ids)
        going_on = [i for i, r in zip(ids, records, strict=True) if r and not r.state.finished]
        keys, enough = [job_id.encode() for job_id in going_on], any if first else all

        def over(commit: Transitions) -> bool:
            return enough(not is_unfinished(commit, key) for key in keys)

        if timeout > 0 and going_on and not (first and len(going_on) < len(ids)):
            self.waits.until(over, RESULT, bloom(ids), timeout)
            records = self.get_many(ids)
        return records

    def wait_space(self, queue: str, timeout: float) -> bool:
        self._check_open()
        return self._reading or self.waits.for_space(queue, timeout)

    # -- reading --------------------------------------------------------------------------------

    def get_many(self, ids: Sequence[str]) -> list[Record | None]:
        """The records of several jobs, read in one transaction."""
        self._check_open()
        return self._inspector.get(ids)

    def was_here(self, job_id: str) -> bool:
        return self._time.was_here(job_id)

    find = by("_inspector", Inspection.find)
    head = by("_inspector", JobNumbers.head)
    ahead = by("_inspector", Inspection.ahead)
    stats = by("_inspector", Inspection.stats)
    info = by("_inspector", Inspection.info)
    limits = by("_inspector", LimitCalls.limits)
    held = by("_inspector", LimitCalls.held)

    def backup(self, target: str) -> None:
        self._check_open()
        self._inspector.backup(target)

    history = looked(History.history, read_history)
    history_kinds = looked(History.history_kinds, kinds_of_history)

    # -- administration -------------------------------------------------------------------------

    cancel = acted(Admin.cancel, admin.cancel)
    retry = acted(Admin.retry, admin.retry)
    delete = acted(Admin.delete, admin.delete, deletes=True)
    alter = acted(Admin.alter, admin.alter)
    set_queue = acted(Admin.set_queue, admin.set_queue)
    forget_queue = acted(Admin.forget_queue, admin.forget_queue)
    set_limit = acted(LimitCalls.set_limit, admin.set_limit)
    command = committed(Admin.command, admin.command)
    keep_history = committed(History.keep_history, keep_rows)

    # -- numbered jobs, schedules, moves --------------------------------------------------------

    numbers = committed(JobNumbers.numbers, admin.numbers)

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        number = self._owners[owner_id].number
        return self._act(lambda commit: admin.lease_named(commit, number, job_ids))

    def wall(self) -> float:
        return clock.wall()

    schedules = looked(Schedules.schedules, read_schedules)
    list_schedules = looked(Schedules.list_schedules, page_of_schedules)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        def apply(commit: Transitions) -> list[Changed]:
            commit.hand_over = hand_over
            return apply_changes(commit, changes)

        if any(change.jobs for change in changes):
            self._owners.as_waiting()
        return self._act(apply)

    depart = committed(Transfer.depart, transfer.depart)
    stay = committed(Transfer.stay, transfer.stay)
    adopt = acted(Transfer.adopt, transfer.adopt)
    adopted = looked(Transfer.adopted, transfer.adopted)
