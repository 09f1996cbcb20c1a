"""Jobs that the desk hands out before their commit: one commit for a whole round, and no loss."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import lmdb
import pytest
from lmdb_desk import Gate

from tidemill import BrokerUnavailable, Tidemill
from tidemill.brokers.base import Reply, Step
from tidemill.brokers.early import Early, Heard
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.transaction import Writing
from tidemill.clock import new_id
from tidemill.gathering import Gathering
from tidemill.job import Outcome, Owner, Verdict
from tidemill.limits import Limit
from tidemill.server.desk import Desk, Held, Pledge


class Patient(Gathering):
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

    def exchange_early(self, step: Step, heard: Heard) -> Reply:
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
async def early_desk(broker: Any) -> AsyncIterator[tuple[Desk, list[Pledge]]]:
    """A desk, and the pledges that it broke."""
    broken: list[Pledge] = []
    owner = Owner(id=new_id(), kind="consumer", name="desk")
    desk = Desk(broker, owner, tasks=True, broken=broken.append)
    await desk.open()
    try:
        async with asyncio.timeout(60):
            yield desk, broken
    finally:
        await desk.close()


def done(held: Held) -> Verdict:
    return Verdict(held.lease.token, Outcome.SUCCESS, started=held.lease.leased)


async def take_and_settle(desk: Desk) -> bool:
    [held] = await desk.reserve(["a"], 1, 30)
    return await desk.settle(done(held), held.pledge)


@pytest.fixture
def mill(broker: LmdbBroker) -> Tidemill:
    return Tidemill(broker.url)


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


def test_only_lmdb_hands_out_early() -> None:
    assert issubclass(LmdbBroker, Early)
    with Tidemill("memory://") as mill:
        assert not isinstance(mill.broker, Early)


def test_clients_take_and_settle_in_one_commit(mill: Tidemill, broker: LmdbBroker) -> None:
    async def main() -> None:
        counting = Faulty(broker)
        async with early_desk(counting) as (desk, broken):
            desk._clerk._prompt = Patient(least=1)
            await mill.queue("a").aput_many(range(20))
            assert await take_and_settle(desk)
            assert counting.rounds == [(1, 1)]
            assert all(await asyncio.gather(*[take_and_settle(desk) for _ in range(4)]))
            assert sum(taken for taken, _ in counting.rounds) == 5
            assert all(taken == settled for taken, settled in counting.rounds)
            assert not broken
            (row,) = mill.queues()
            assert (row.ready, row.running) == (15, 0)

    with mill:
        asyncio.run(main())


@pytest.mark.parametrize("again", [False, True])
def test_a_commit_that_fails_takes_back_what_was_handed_out(
    mill: Tidemill, broker: LmdbBroker, again: bool
) -> None:
    """Its tokens are given to others then: what is said of it must not reach their jobs."""

    async def main() -> None:
        async with early_desk(Faulty(broker, 1, again=again)) as (desk, broken):
            await mill.queue("a").aput("x", id="one")
            await mill.queue("b").aput("y", id="another")
            [lost] = await desk.reserve(["a"], 1, 30)
            while not broken:
                await asyncio.sleep(0.005)
            assert broken == [lost.pledge]
            [held] = await desk.reserve(["b"], 1, 30)
            # done again, it was leased once more, for who does not wait any longer
            assert (held.lease.token == lost.lease.token) is not again
            assert not await desk.settle(done(lost), lost.pledge)
            assert not await desk.touch(lost.lease.token, pledge=lost.pledge)
            desk.give_back(lost.lease.token, lost.pledge)
            assert await desk.touch(held.lease.token, pledge=held.pledge)
            assert broker.get("one") is not None
            assert await desk.settle(done(held), held.pledge)

    with mill:
        asyncio.run(main())


def test_a_settlement_inside_a_commit_that_fails_is_not_done(
    mill: Tidemill, broker: LmdbBroker
) -> None:
    async def main() -> None:
        async with early_desk(Faulty(broker, 1)) as (desk, broken):
            desk._clerk._prompt = Patient(least=1)
            await mill.queue("a").aput("x", id="one")
            assert not await take_and_settle(desk)
            assert len(broken) == 1
            assert await take_and_settle(desk)
            assert broker.get("one") is None

    with mill:
        asyncio.run(main())


def test_what_is_gone_when_it_is_taken_is_not_handed_out_early(
    mill: Tidemill, broker: LmdbBroker
) -> None:
    """Or a commit that failed would have it there once more."""

    async def main() -> None:
        async with early_desk(Faulty(broker, 1)) as (desk, _):
            await mill.queue("a").aput("x", ttr=0)
            [held] = await desk.reserve(["a"], 1, 30)
            assert held.pledge is None
            assert await desk.reserve(["a"]) == []

    with mill:
        asyncio.run(main())


def test_limits_hold_for_what_is_taken_and_settled_in_one_step(
    mill: Tidemill, broker: LmdbBroker
) -> None:
    limit = Limit(concurrency=1, name="one at a time")

    @mill.task(queue="a", limit=limit)
    def work() -> None: ...

    async def main() -> None:
        async with early_desk(broker) as (desk, _):
            desk._clerk._prompt = Patient(least=1)
            for _ in range(3):
                await work.aenqueue()
            for _ in range(3):
                assert await take_and_settle(desk)
            (row,) = mill.queues()
            assert (row.ready, row.running) == (0, 0)
            assert [found.running for found in broker.limits()] == [0]

    with mill:
        asyncio.run(main())


def test_who_was_handed_what_a_failed_put_took_back_holds_nothing(
    mill: Tidemill, broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 1: the commit of a put and of who gets it fails, and then that of the put by itself
    disk = FullDisk(monkeypatch)

    async def main() -> None:
        async with early_desk(broker) as (desk, broken):
            await mill.queue("b").aput("old", id="old")
            [old] = await desk.reserve(["b"], 1, 30)
            desk._clerk._prompt = Patient(least=1)
            # given a put and somebody who waits for it, in one commit
            await eventually(lambda: desk._clerk.asleep)
            gate = Gate(broker._store)
            pending = broker._store.commits.pending
            put = asyncio.ensure_future(mill.queue("a").aput("x", id="x"))
            await eventually(lambda: len(pending) == 1)
            taking = asyncio.ensure_future(desk.reserve(["a"], 1, 30))
            await eventually(lambda: len(pending) == 2)
            # when
            disk.coming = [False, True, True]  # that of the gate, that of both, that of the put
            gate.open.set()
            [lost] = await taking
            old_and_lost = desk.settle(done(old), old.pledge), desk.settle(done(lost), lost.pledge)
            answers = await asyncio.gather(*old_and_lost)
            # then it is told so, and what else was said in that moment is done
            assert answers == [True, False]
            assert broken == [lost.pledge]
            with pytest.raises(BrokerUnavailable):
                await put
            assert broker.get("x") is None is broker.get("old")
            # and its word does not reach the job that has its token now
            await mill.queue("a").aput("y", id="y")
            [held] = await desk.reserve(["a"], 1, 30)
            assert held.lease.token == lost.lease.token
            assert not await desk.settle(done(lost), lost.pledge)
            assert await desk.settle(done(held), held.pledge)

    with mill:
        asyncio.run(main())


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.002)
