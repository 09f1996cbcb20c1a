"""``lmdb://``: the broker of one directory on disk. Durable, many processes, no server.

This file is the conversation: it turns each call of the seam into one commit. What a commit is made
of is in :mod:`.moves`, and who moves jobs in the rooms named there; an owner's exchange is in
:mod:`.exchange`, the owners of this process in :mod:`.members`, those who wait in :mod:`.waits`,
what is shown in :mod:`.inspect`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import lmdb

from tidemill.brokers.base import Departure, Feature, Filter, Page, QueueStats, Reply, Step
from tidemill.brokers.early import Heard
from tidemill.brokers.lmdb import acts, named
from tidemill.brokers.lmdb import schedules as schedule
from tidemill.brokers.lmdb.carrying import recall
from tidemill.brokers.lmdb.exchange import exchange, hear_behalf
from tidemill.brokers.lmdb.flows import FALL_MOST, finish_falls, flow, is_unfinished
from tidemill.brokers.lmdb.handoff import hand_over
from tidemill.brokers.lmdb.inspect import Inspection
from tidemill.brokers.lmdb.members import Members
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.moving import adopt, adopted, check_here, depart, stay
from tidemill.brokers.lmdb.nonces import put_once, sweep_nonces
from tidemill.brokers.lmdb.order import arrange
from tidemill.brokers.lmdb.puts import may_refuse, put
from tidemill.brokers.lmdb.roster import owner_rows, send
from tidemill.brokers.lmdb.store import PREFIX, Store, close_store, store_around
from tidemill.brokers.lmdb.storetime import StoreTime
from tidemill.brokers.lmdb.timers import come_due, prune
from tidemill.brokers.lmdb.waits import Waits
from tidemill.brokers.lmdb.wake import RESULT, bloom
from tidemill.brokers.parking import Parked, sleep
from tidemill.brokers.retention import Retention
from tidemill.brokers.schedules import Change, Changed, Schedule
from tidemill.brokers.steps import is_lost, lost
from tidemill.brokers.unknown import UnknownTask
from tidemill.errors import BrokerUnavailable, StoreFull, TidemillError
from tidemill.gate import Held, LimitStats, Terms
from tidemill.job import Command, Envelope, Lease, Owner, Put, Record, State

__all__ = ["LmdbBroker"]

T = TypeVar("T")
_PRUNE_MOST, _RECALL_MOST = 2000, 2000
_TICK = 30.0


class LmdbBroker:
    """A broker in an LMDB environment."""

    features = frozenset(Feature) - {Feature.DRAIN}

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

    @classmethod
    def around(cls, env: lmdb.Environment, prefix: str = PREFIX) -> LmdbBroker:
        """A broker inside the caller's own environment; its url opens it in another process."""
        store = store_around(env, prefix)
        return cls(store.url, store)

    def _enter(self) -> None:
        """Begin in this process, which may be a fork of the one that opened the broker."""
        store = self._store
        self._pid = os.getpid()
        self._members = Members(store, self._commit)
        self.waits = Waits(store, self._commit)
        store.brokers.add(self)
        self._time = StoreTime(store)
        self._inspection = Inspection(store, self._time)
        if not self._reading:
            store.room.keep_ballast()

    def after_fork_child(self) -> None:
        """In a forked child: owners and sleepers are the parent's."""
        self._members.after_fork_child()
        self.waits.after_fork_child()

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")
        if self._pid != os.getpid():
            self._store.ready()
            self._enter()

    @property
    def identity(self) -> str:
        """What tells this store from every other."""
        return self._time.identity

    @property
    def boards(self) -> str:
        """Where boards may lie."""
        return self._members.boards

    # -- committing -----------------------------------------------------------------------------

    def _moves(self, txn: lmdb.Transaction[bytes]) -> Moves:
        now, wall = self._time.micros()
        return Moves(self._store, txn, now, wall, self._retention)

    def _commit(
        self, apply: Callable[[Moves], T], /, last: bool = False, patience: float | None = None
    ) -> T:
        """One commit of work that must go on when the disk is full: the ballast was kept for it."""
        self._check_open()

        def whole(moves: Moves) -> T:
            value = apply(moves)
            if moves.ended:
                flow(moves)
            return value

        run = functools.partial(self._store.commits.run, self._moves, patience=patience)
        try:
            return run(whole, last=last)
        except StoreFull:
            if not self._store.room.give_ballast(run):
                raise
            return run(whole, last=last)

    def _act(self, apply: Callable[[Moves], T], /) -> T:
        """A commit that is refused once the store is on its way to another, and what it leaves."""
        last: list[Moves] = []

        def here(moves: Moves) -> T:
            last[:] = [moves]
            check_here(moves)
            return apply(moves)

        def go_on(moves: Moves) -> None:
            last[:] = [moves]
            come_due(moves)

        value = self._commit(here)
        while last[0].fallen >= FALL_MOST:  # others may write in between
            self._commit(go_on)
        return value

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
        self._check_open()

        def accept(moves: Moves) -> list[Put]:
            check_here(moves)
            # A job whose time has passed must not refuse another.
            if may_refuse(moves, jobs) and moves.next_due() <= 0:
                come_due(moves)
            moves.hand_over = hand_over
            return put(moves, jobs, hold, let_go)

        apply = put_once(nonce, jobs, accept) if nonce else accept
        if txn is None:
            return self._store.commits.run(self._moves, apply)
        with self._store.nested(txn) as inner:
            puts = apply(moves := self._moves(inner))
            moves.finish()
        return puts

    # -- owning ---------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        self._act(lambda moves: None)
        self._members.attach(owner)

    def detach(self, owner_id: str) -> None:
        self._check_open()
        self._members.detach(owner_id)

    def exchange(self, step: Step) -> Reply:
        self._check_open()
        if step.behalf:
            return self._commit(lambda moves: hear_behalf(moves, step))
        member = self._members.find(step.owner) if step.serial else self._members[step.owner]
        if member is None:
            return lost(step)
        commits, worker = self._store.commits, member.owner.kind == "worker"
        most = commits.brisk if worker else min(step.patience or commits.patience, commits.patience)
        reply = self._commit(lambda moves: exchange(moves, member, step), patience=most)
        if step.serial and is_lost(reply) and (anew := self._members.anew(member)):
            return self._commit(lambda moves: exchange(moves, anew, step))
        return reply

    def exchange_early(self, step: Step, heard: Heard) -> Reply:
        member = self._members[step.owner]
        return self._commit(lambda moves: exchange(moves, member, step, heard), last=True)

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        return sleep(self.parked(owner_id, timeout, fds))

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        self._check_open()
        member = self._members[owner_id]
        until_tick = max(0.0, self._next_tick - time.monotonic())
        ready = yield from self._members.parked(member, min(timeout, until_tick), fds)
        with contextlib.suppress(BrokerUnavailable):  # housekeeping comes again
            if time.monotonic() >= self._next_tick:
                self.tick()
        return ready

    def wake(self, owner_id: str) -> None:
        self._members.wake(owner_id)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        return self._members.release(owner_id, causes)

    def recall(self) -> int:
        given, there = 0, sum(row.carried for row in self.stats())
        while given < there and (batch := self._act(lambda moves: recall(moves, _RECALL_MOST))):
            given += batch  # not for ever: what went back may be carried again already
        return given

    def reap(self) -> int:
        """Give back what owners that died held; how many owners that were."""
        self._check_open()
        return self._members.reap()

    def tick(self) -> float:
        if self._reading:
            return _TICK
        self._next_tick = time.monotonic() + _TICK
        self.reap()
        with self._store.translating():
            self._store.env.reader_check()
        self._store.room.keep_ballast()

        def keep_time(moves: Moves) -> bool:
            self._time.save(moves)
            self._members.sweep(moves)
            more = come_due(moves)
            more = moves.lanes.sweep(_PRUNE_MOST) or moves.gates.catch_up() or more
            more = sweep_nonces(moves) or more
            more = arrange(moves, _PRUNE_MOST) or more
            return prune(moves, _PRUNE_MOST) >= _PRUNE_MOST or more

        while self._commit(keep_time, patience=self._store.commits.brisk):
            pass
        return _TICK

    def count_silence(self) -> float:
        self._check_open()
        return self._members.count_silence(self._time.micros()[0])

    # -- waiting for jobs -----------------------------------------------------------------------

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        records = self.get_many(ids)
        going_on = [i for i, r in zip(ids, records, strict=True) if r and not r.state.finished]
        keys, enough = [job_id.encode() for job_id in going_on], any if first else all

        def over(moves: Moves) -> bool:
            return enough(not is_unfinished(moves, key) for key in keys)

        if timeout > 0 and going_on and not (first and len(going_on) < len(ids)):
            self.waits.until(over, RESULT, bloom(ids), timeout)
            records = self.get_many(ids)
        return records

    def wait_space(self, queue: str, timeout: float) -> bool:
        self._check_open()
        return self.waits.for_space(queue, timeout)

    # -- inspecting -----------------------------------------------------------------------------

    def get(self, job_id: str) -> Record | None:
        return self.get_many([job_id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Record | None]:
        """The records of several jobs, of one moment."""
        self._check_open()
        return self._inspection.get(ids)

    def was_here(self, job_id: str) -> bool:
        return self._time.was_here(job_id)

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        self._check_open()
        return self._inspection.find(what, limit, cursor)

    def stats(self) -> list[QueueStats]:
        self._check_open()
        return self._inspection.stats()

    def owners(self) -> list[Owner]:
        self._check_open()
        return self._members.alive()

    def info(self) -> dict[str, Any]:
        self._check_open()
        return {"url": self.url, **self._inspection.info()}

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        self._check_open()
        return self._inspection.head(queue, state, count)

    # -- acting ---------------------------------------------------------------------------------

    def numbers(self, count: int) -> int:
        return self._commit(lambda moves: named.numbers(moves, count))

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        member = self._members[owner_id]
        return self._act(lambda moves: named.lease_named(moves, member.number, job_ids))

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        ids = list(job_ids)
        return self._act(lambda moves: acts.cancel(moves, ids, terminate=terminate))

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        ids = list(job_ids)
        return self._act(lambda moves: acts.kick(moves, ids, force=force))

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        ids = list(job_ids)
        return self._act(lambda moves: acts.delete(moves, ids))

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        self._act(lambda moves: acts.set_queue(moves, queue, paused=paused, max_size=max_size))

    def set_limit(
        self, name: str, terms: Terms | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        self._act(lambda moves: acts.set_limit(moves, name, terms, queue=queue, declared=declared))
        while not queue and self._act(lambda moves: moves.gates.go_on(name)):
            pass  # others may write in between

    def limits(self) -> list[LimitStats]:
        self._check_open()
        return self._inspection.limits()

    def held(self, job_id: str) -> Held | None:
        self._check_open()
        return self._inspection.held(job_id)

    def unknown_tasks(self) -> list[UnknownTask]:
        self._check_open()
        return self._inspection.unknown_tasks()

    def purge(self, queue: str) -> int:
        return acts.purge(self._act, self._store, queue)

    def forget_queue(self, queue: str) -> bool:
        return self._act(lambda moves: acts.forget_queue(moves, queue))

    def command(self, owner_id: str, command: Command) -> bool:
        def apply(moves: Moves) -> bool:
            for number, owner in owner_rows(moves.txn, moves.t):
                if owner.id == owner_id:
                    send(moves, number, command)
                    return True
            return False

        return self._commit(apply)

    # -- schedules ------------------------------------------------------------------------------

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        self._check_open()
        with self._store.reading_txn() as txn:
            return schedule.read(txn, self._store.tables.schedule, names)

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        self._check_open()
        with self._store.reading_txn() as txn:
            return schedule.page(txn, self._store.tables.schedule, after, limit)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        def apply(moves: Moves) -> list[Changed]:
            moves.hand_over = hand_over
            return schedule.change(moves, changes)

        if any(change.jobs for change in changes):
            self._members.as_waiting()
        return self._act(apply)

    # -- moving to another store ----------------------------------------------------------------

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        def leave(moves: Moves) -> Departure:
            if seal:
                finish_falls(moves)
            return depart(moves, where, seal)

        return self._commit(leave)

    def stay(self) -> None:
        self._commit(stay)

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        new = [Change(s.name, 0, s.due, s.body) for s in schedules]

        def apply(moves: Moves) -> list[bool]:
            taken = adopt(moves, departure, records, cursor)
            return taken + [changed.done for changed in schedule.change(moves, new)]

        return self._act(apply)

    def adopted(self, mark: str) -> str:
        self._check_open()
        with self._store.reading_txn() as txn:
            return adopted(self._store, txn, mark)

    def backup(self, target: str) -> None:
        self._check_open()
        self._inspection.backup(target)

    def close(self) -> None:
        if not self._closed and self._pid == os.getpid():
            with contextlib.ExitStack() as last:  # each of them, whatever becomes of the others
                last.callback(close_store, self._store)
                last.callback(setattr, self, "_closed", True)
                last.callback(self.waits.close)
                self._members.leave()
        self._closed = True
