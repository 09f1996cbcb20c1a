"""``lmdb://``: the broker of one directory on disk. Durable, many processes, no server.

This file has the core of the contract. All other calls are in :mod:`.calls`, the commits in
:mod:`.base`. Each call becomes one commit: :mod:`.transitions` has the changes of a commit, and
:mod:`.exchange` holds the step of an owner. The owners of this process are in :mod:`.owners`, and
its waiters in :mod:`.waits`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import lmdb

from tidemill.brokers.contract.early_leases import LeaseCallback
from tidemill.brokers.contract.exchange import Reply, Step, is_lost, lost
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.parked_waits import Parked, sleep
from tidemill.brokers.lmdb.calls import (
    AdminCalls,
    HistoryCalls,
    InspectionCalls,
    JobNumberCalls,
    LimitCalls,
    ScheduleCalls,
    TransferCalls,
)
from tidemill.brokers.lmdb.due import come_due, prune
from tidemill.brokers.lmdb.exchange import exchange, hear_behalf
from tidemill.brokers.lmdb.handoff import hand_over
from tidemill.brokers.lmdb.history import prune_history
from tidemill.brokers.lmdb.idempotency import Puts, put_once, sweep_nonces
from tidemill.brokers.lmdb.put import may_refuse, put
from tidemill.brokers.lmdb.store import PREFIX, store_around
from tidemill.brokers.lmdb.transfer import check_here
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.brokers.lmdb.wakeup import RESULT, bloom
from tidemill.brokers.lmdb.workflows import is_unfinished
from tidemill.core.envelope import Envelope
from tidemill.core.errors import BrokerUnavailable
from tidemill.core.job import Put, Record
from tidemill.core.owner import Owner

_PRUNE_MOST = 2000
_TICK = 30.0


class LmdbBroker(
    InspectionCalls,
    AdminCalls,
    LimitCalls,
    JobNumberCalls,
    ScheduleCalls,
    HistoryCalls,
    TransferCalls,
):
    """A broker in an LMDB environment."""

    features = frozenset(Feature)

    @classmethod
    def around(cls, env: lmdb.Environment, prefix: str = PREFIX) -> LmdbBroker:
        """Make a broker in the caller's own environment; other processes use the broker's URL."""
        store = store_around(env, prefix)
        return cls(store.url, store)

    @property
    def identity(self) -> str:
        """The identity of this store; no other store has the same."""
        return self._time.identity

    @property
    def boards(self) -> str:
        """The folder for scoreboards."""
        return self._owners.boards

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
            return _accept(commit, jobs, hold, let_go)

        return self._put(put_once(nonce, jobs, accept) if nonce else accept, txn)

    def _put(self, apply: Callable[[Transitions], Puts], txn: Any) -> Puts:
        self._check_open()
        if txn is None:
            return self._store.commits.run(self._transitions, apply)
        with self._store.nested(txn) as inner:
            puts = apply(commit := self._transitions(inner))
            commit.finish()
        return puts

    # -- owning ---------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        self._act(lambda commit: None)
        self._owners.attach(owner)

    def detach(self, owner_id: str) -> None:
        self._check_open()
        self._owners.detach(owner_id)

    def exchange(self, step: Step) -> Reply:
        self._check_open()
        if step.behalf:
            return self._commit(lambda commit: hear_behalf(commit, step))
        local_owner = self._owners.find(step.owner) if step.serial else self._owners[step.owner]
        if local_owner is None:
            return lost(step)
        commits, worker = self._store.commits, local_owner.owner.kind == "worker"
        most = commits.brisk if worker else min(step.patience or commits.patience, commits.patience)
        reply = self._commit(lambda commit: exchange(commit, local_owner, step), patience=most)
        if step.serial and is_lost(reply) and (anew := self._owners.anew(local_owner)):
            return self._commit(lambda commit: exchange(commit, anew, step))
        return reply

    def exchange_early(self, step: Step, heard: LeaseCallback) -> Reply:
        local_owner = self._owners[step.owner]
        return self._commit(lambda commit: exchange(commit, local_owner, step, heard), last=True)

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        return sleep(self.parked(owner_id, timeout, fds))

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

    def wake(self, owner_id: str) -> None:
        self._owners.wake(owner_id)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        return self._owners.release(owner_id, causes)

    def reap(self) -> int:
        """Give back the jobs of owners that died; return the number of these owners."""
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
            more = sweep_nonces(commit) or more
            more = prune_history(commit, _PRUNE_MOST) >= _PRUNE_MOST or more
            return prune(commit, _PRUNE_MOST) >= _PRUNE_MOST or more

        while self._commit(keep_time, patience=self._store.commits.brisk):
            pass
        return _TICK

    def count_silence(self) -> float:
        self._check_open()
        return self._owners.count_silence(self._time.micros()[0])

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


def _accept(
    commit: Transitions,
    jobs: Sequence[Envelope],
    hold: Collection[str] = (),
    let_go: Collection[str] = (),
) -> list[Put]:
    check_here(commit)
    # Overdue jobs end first. Then they do not count against ``max_size`` or hold a key.
    if may_refuse(commit, jobs) and commit.next_due() <= 0:
        come_due(commit)
    commit.hand_over = hand_over
    return put(commit, jobs, hold, let_go)
