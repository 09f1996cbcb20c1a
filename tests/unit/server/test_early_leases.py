"""Jobs that are delivered before their commit: one commit for a whole round, and no loss."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import lmdb
import pytest
from in_loop import in_loop
from lmdb_desk import Gate

from tidemill import Tidemill
from tidemill.brokers.contract.early_leases import LeaseCallback
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.engine.transactions import Writing
from tidemill.core.clock import new_id
from tidemill.core.commit_delay import CommitDelay
from tidemill.core.job import Outcome, Owner, Verdict
from tidemill.errors import BrokerUnavailable
from tidemill.server.shared_owner import SharedOwner
from tidemill.server.waiters import PendingCommit, ReservedJob


class PatientDelay(CommitDelay):
    """Waits for all who were handed something, however long they take."""

    def expect(self, answered: int, pending: int, took: float = 0.0) -> None:
        super().expect(answered, pending)
        self._until = time.monotonic() + 30


class Faulty:
    """A broker whose commits fail ``times``, after jobs were handed out; or are done ``again``."""

    def __init__(self, broker: LmdbBroker, times: int = 0, *, again: bool = False) -> None:
        self._broker = broker
        self._times = times
        self._again = again
        self.rounds: list[tuple[int, int]] = []  # jobs handed out, and verdicts in the same commit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def exchange_early(self, step: Step, heard: LeaseCallback) -> Reply:
        def failing(leases: Any) -> Any:
            heard(leases)
            raise BrokerUnavailable("the disk is gone")

        if self._times:
            self._times -= 1
            try:
                return self._broker.exchange_early(step, failing)
            except BrokerUnavailable:
                if not self._again:
                    raise

        def counted(leases: Any) -> Any:
            verdicts = heard(leases)
            self.rounds.append((len(leases), len(verdicts)))
            return verdicts

        return self._broker.exchange_early(step, counted)


@contextlib.asynccontextmanager
async def opened(broker: Any) -> AsyncIterator[tuple[SharedOwner, list[PendingCommit]]]:
    """A shared owner, and its failed commits."""
    failed: list[PendingCommit] = []
    owner = Owner(id=new_id(), kind="consumer", name="shared")
    shared_owner = SharedOwner(broker, owner, tasks=True, on_lost_commit=failed.append)
    await shared_owner.open()
    try:
        async with asyncio.timeout(60):
            yield shared_owner, failed
    finally:
        await shared_owner.close()


def done(job: ReservedJob) -> Verdict:
    return Verdict(job.lease.token, Outcome.SUCCESS, started=job.lease.leased)


async def take_and_settle(shared_owner: SharedOwner) -> bool:
    [job] = await shared_owner.reserve(["a"], 1, 30)
    return await shared_owner.settle(done(job), job.commit)


@pytest.fixture
def mill(broker: LmdbBroker) -> Iterator[Tidemill]:
    with Tidemill(broker.url) as mill:
        yield mill


class FullDisk:
    """Some commits of the store fail, as on a disk that is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.coming: list[bool] = []  # whether the next commits fail
        end = Writing.__exit__

        def fail(writing: Writing, kind: Any, error: Any, trace: Any) -> None:
            if kind is None and self.coming and self.coming.pop(0):
                end(writing, RuntimeError, None, None)
                raise lmdb.DiskError("no space left on device")
            end(writing, kind, error, trace)

        monkeypatch.setattr(Writing, "__exit__", fail)


@in_loop
async def test_clients_reserve_and_settle_in_one_commit(mill: Tidemill, broker: LmdbBroker) -> None:
    counting = Faulty(broker)
    async with opened(counting) as (shared_owner, failed):
        shared_owner._dispatcher._early_delay = PatientDelay(least=1)
        await mill.queue("a").aput_many(range(20))
        assert await take_and_settle(shared_owner)
        assert counting.rounds == [(1, 1)]
        assert all(await asyncio.gather(*[take_and_settle(shared_owner) for _ in range(4)]))
        assert sum(taken for taken, _ in counting.rounds) == 5
        assert not failed
        (row,) = mill.queues()
        assert (row.ready, row.running) == (15, 0)


@in_loop
async def test_an_error_after_the_commit_takes_back_no_job(
    mill: Tidemill, broker: LmdbBroker
) -> None:
    """The commit is durable: the clients keep their jobs, and their verdicts count."""
    store: Any = Faulty(broker)
    sleeps = threading.Semaphore(0)
    async with opened(store) as (shared_owner, failed):
        await mill.queue("a").aput("x")

        def wait(*args: Any) -> Any:
            store.wait = rest
            raise BrokerUnavailable("the store is away for a moment")

        def rest(*args: Any) -> Any:  # the error has been handled
            sleeps.release()
            return broker.wait(*args)

        store.wait = wait
        [job] = await shared_owner.reserve(["a"], 1, 30)
        assert await asyncio.to_thread(sleeps.acquire, timeout=30)
        assert job.commit is not None
        assert await shared_owner.settle(done(job), job.commit)
        assert not failed


@pytest.mark.parametrize("again", [False, True])
@in_loop
async def test_a_failed_commit_takes_back_the_jobs_of_its_clients(
    mill: Tidemill, broker: LmdbBroker, again: bool
) -> None:
    """Its tokens are given to others then: what is said of it must not reach their jobs."""
    async with opened(Faulty(broker, 1, again=again)) as (shared_owner, failed):
        await mill.queue("a").aput("x", id="one")
        await mill.queue("b").aput("y", id="another")
        [lost] = await shared_owner.reserve(["a"], 1, 30)
        while not failed:
            await asyncio.sleep(0.005)
        assert failed == [lost.commit]
        [job] = await shared_owner.reserve(["b"], 1, 30)
        # done again, it was leased once more, for who does not wait any longer
        assert (job.lease.token == lost.lease.token) is not again
        assert not await shared_owner.settle(done(lost), lost.commit)
        assert not await shared_owner.touch(lost.lease.token, commit=lost.commit)
        shared_owner.give_back(lost.lease.token, lost.commit)
        assert await shared_owner.touch(job.lease.token, commit=job.commit)
        assert broker.get("one") is not None
        assert await shared_owner.settle(done(job), job.commit)


@in_loop
async def test_a_verdict_inside_a_failed_commit_is_not_stored(
    mill: Tidemill, broker: LmdbBroker
) -> None:
    async with opened(Faulty(broker, 1)) as (shared_owner, failed):
        shared_owner._dispatcher._early_delay = PatientDelay(least=1)
        await mill.queue("a").aput("x", id="one")
        assert not await take_and_settle(shared_owner)
        assert len(failed) == 1
        assert await take_and_settle(shared_owner)
        assert broker.get("one") is None


@in_loop
async def test_a_message_with_ttr_0_is_withheld_until_the_commit(
    mill: Tidemill, broker: LmdbBroker
) -> None:
    """Else a failed commit would deliver it twice."""
    async with opened(Faulty(broker, 1)) as (shared_owner, _):
        await mill.queue("a").aput("x", ttr=0)
        [job] = await shared_owner.reserve(["a"], 1, 30)
        assert job.commit is None
        assert await shared_owner.reserve(["a"]) == []


@in_loop
async def test_a_client_loses_a_job_when_a_put_in_its_commit_fails(
    mill: Tidemill, broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 1: the commit of a put and of who gets it fails, and then that of the put by itself
    disk = FullDisk(monkeypatch)
    async with opened(broker) as (shared_owner, failed):
        await mill.queue("b").aput("old", id="old")
        [old] = await shared_owner.reserve(["b"], 1, 30)
        shared_owner._dispatcher._early_delay = PatientDelay(least=1)
        # given a put and somebody who waits for it, in one commit
        await eventually(lambda: shared_owner._dispatcher.asleep)
        gate = Gate(broker._store)
        pending = broker._store.commits.pending
        put = asyncio.ensure_future(mill.queue("a").aput("x", id="x"))
        await eventually(lambda: len(pending) == 1)
        taking = asyncio.ensure_future(shared_owner.reserve(["a"], 1, 30))
        await eventually(lambda: len(pending) == 2)
        # when
        disk.coming = [False, True, True]  # that of the gate, that of both, that of the put
        gate.open.set()
        [lost] = await taking
        old_and_lost = (
            shared_owner.settle(done(old), old.commit),
            shared_owner.settle(done(lost), lost.commit),
        )
        answers = await asyncio.gather(*old_and_lost)
        # then it is told so, and what else was said in that moment is done
        assert answers == [True, False]
        assert failed == [lost.commit]
        with pytest.raises(BrokerUnavailable):
            await put
        assert broker.get("x") is None is broker.get("old")
        # and its word does not reach the job that has its token now
        await mill.queue("a").aput("y", id="y")
        [job] = await shared_owner.reserve(["a"], 1, 30)
        assert job.lease.token == lost.lease.token
        assert not await shared_owner.settle(done(lost), lost.commit)
        assert await shared_owner.settle(done(job), job.commit)


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.002)
