"""The shared owner of a job server: many clients, one owner, one exchange for all."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from in_loop import in_loop

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Mode, Reply, Step
from tidemill.core.clock import new_id
from tidemill.core.job import Outcome, Owner, State, Verdict
from tidemill.errors import BrokerUnavailable
from tidemill.server.dispatcher import MAX_VERDICTS, Dispatcher
from tidemill.server.shared_owner import SharedOwner
from tidemill.server.waiters import JobKinds, ReservedJob, Waiter, Waiters


@contextlib.asynccontextmanager
async def opened(mill: Tidemill, **options: Any) -> AsyncIterator[SharedOwner]:
    owner = Owner(id=new_id(), kind="consumer", name="shared")
    shared_owner = SharedOwner(mill.broker, owner, **options)
    await shared_owner.open()
    try:
        async with asyncio.timeout(60):
            yield shared_owner
    finally:
        await shared_owner.close()


def done(job: ReservedJob) -> Verdict:
    return Verdict(job.lease.token, Outcome.SUCCESS, started=job.lease.leased)


def ids(jobs: list[ReservedJob]) -> list[str]:
    return [job.envelope.id for job in jobs]


async def put(mill: Tidemill, *names: str, queue: str = "a", **options: Any) -> None:
    for name in names:
        await mill.queue(queue).aput(name, id=name, **options)


async def parked(shared_owner: SharedOwner, *waiters: asyncio.Task[list[ReservedJob]]) -> None:
    """Wait until these clients wait for jobs and the dispatcher sleeps in its broker."""
    dispatcher = shared_owner._dispatcher
    while not (
        _waits_in_its_broker(dispatcher)
        and len(list(dispatcher._waiters)) + len(dispatcher.inbox) == len(waiters)
    ):
        await asyncio.sleep(0.005)


def _waits_in_its_broker(dispatcher: Dispatcher) -> bool:
    """Whether the thread has read its inbox for the last time: ``asleep`` is set before."""
    frame = sys._current_frames().get(dispatcher._thread.ident or 0)
    while dispatcher.asleep and frame is not None:
        code = frame.f_code
        if code.co_name == "wait" and "brokers" in Path(code.co_filename).parts:
            return True
        frame = frame.f_back
    return False


@in_loop
async def test_jobs_are_reserved_in_order_and_settled_once(mill: Tidemill) -> None:
    async with opened(mill) as shared_owner:
        await put(mill, "1", "2", "3")
        first = await shared_owner.reserve(["a"], 2)
        assert ids(first) == ["1", "2"]
        assert await shared_owner.settle(done(first[0]))
        assert not await shared_owner.settle(done(first[0]))
        assert await shared_owner.touch(first[1].lease.token)
        assert not await shared_owner.touch(first[0].lease.token)
        release = Verdict(first[1].lease.token, Outcome.RELEASE)
        assert await shared_owner.settle(release)
        assert ids(await shared_owner.reserve(["a"], 10)) == ["2", "3"]
        assert await shared_owner.reserve(["a"]) == []


@in_loop
async def test_queues_are_emptied_in_their_order_or_as_one(mill: Tidemill) -> None:
    async with opened(mill) as shared_owner:
        await put(mill, "a1", "a2", queue="a")
        await put(mill, "b1", queue="b", priority=5)
        assert ids(await shared_owner.reserve(["b", "a"], 2)) == ["b1", "a1"]
        await put(mill, "b2", queue="b", priority=5)
        await put(mill, "a3", queue="a", priority=9)
        assert ids(await shared_owner.reserve(["a", "b"], 3, mode=Mode.MERGED)) == [
            "a3",
            "b2",
            "a2",
        ]


@in_loop
async def test_the_client_that_waits_longest_gets_the_job(mill: Tidemill) -> None:
    async with opened(mill) as shared_owner:
        waiting = []
        for queues in (["a", "b"], ["b"], ["a"]):
            waiting.append(asyncio.ensure_future(shared_owner.reserve(queues, timeout=50)))
            await parked(shared_owner, *waiting)
        await put(mill, "b1", "b2", queue="b")
        assert ids(await waiting[0]) == ["b1"]
        assert ids(await waiting[1]) == ["b2"]
        later = asyncio.ensure_future(shared_owner.reserve(["a"], timeout=50))
        await put(mill, "a1", "a2", queue="a")
        assert ids(await waiting[2]) == ["a1"]
        assert ids(await later) == ["a2"]


@in_loop
async def test_no_more_jobs_are_leased_than_clients_can_take(mill: Tidemill) -> None:
    async with opened(mill) as shared_owner:
        one = asyncio.ensure_future(shared_owner.reserve(["a"], timeout=50))
        other = asyncio.ensure_future(shared_owner.reserve(["b"], 5, timeout=50))
        await parked(shared_owner, one, other)
        await mill.queue("a").aput_many(["x"] * 4)
        assert len(await one) == 1
        await asyncio.sleep(0.05)
        (queue,) = mill.queues()
        assert (queue.ready, queue.running) == (3, 1)
        other.cancel()


@in_loop
async def test_a_job_that_comes_while_a_client_joins_is_not_slept_through(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    gets_up, real = threading.Event(), mill.broker.wait
    gets_up.set()

    def wait(owner_id: str, timeout: float, fds: Sequence[int]) -> list[int]:
        ready = real(owner_id, timeout, fds)
        gets_up.wait(30)
        return list(ready)

    monkeypatch.setattr(mill.broker, "wait", wait)
    async with opened(mill) as shared_owner:
        first = asyncio.ensure_future(shared_owner.reserve(["b", "a"], timeout=50))
        await parked(shared_owner, first)
        # given jobs that come while the thread is asleep, and is slow to get up
        gets_up.clear()
        await put(mill, "2", "3", queue="a")
        joined = asyncio.ensure_future(shared_owner.reserve(["a"], timeout=50))
        await asyncio.sleep(0)
        assert [
            isinstance(waiter, Waiter) and waiter.joined
            for waiter in shared_owner._dispatcher.inbox
        ] == [True]
        # then they are there when it does
        gets_up.set()
        assert [ids(await first), ids(await joined)] == [["2"], ["3"]]


@in_loop
async def test_new_clients_do_not_starve_waiting_clients() -> None:
    waiters = Waiters()

    def waiter(queue: str) -> Waiter:
        waiters.add(one := Waiter((queue,), 1, Mode.STRICT, asyncio.Future()))
        return one

    waiters.looked([waiter("b")])
    wants = []
    for _ in range(4):
        waiter("a")
        wants.append(waiters.want(Mode.MERGED, JobKinds()))
    assert [want.queues for want, _ in wants] == [("a",), ("b",), ("a",), ("b",)]
    assert [len(first) for _, first in wants] == [1, 0, 3, 0]


@in_loop
async def test_a_wait_whose_time_is_over_returns_nothing(mill: Tidemill) -> None:
    async with opened(mill) as shared_owner:
        assert await shared_owner.reserve(["a"], timeout=0.05) == []
        assert await shared_owner.reserve(["a"], timeout=0) == []
        await put(mill, "1")
        assert ids(await shared_owner.reserve(["a"], timeout=0)) == ["1"]


@in_loop
async def test_a_job_that_comes_due_goes_to_a_waiting_client(mill: Tidemill) -> None:
    async with opened(mill) as shared_owner:
        await put(mill, "1", delay=0.2)
        assert ids(await shared_owner.reserve(["a"], timeout=50)) == ["1"]


@in_loop
async def test_a_client_that_left_holds_nothing(mill: Tidemill) -> None:
    async with opened(mill) as shared_owner:
        for _ in range(20):  # at different moments: before, while and after it is handed out
            client = asyncio.ensure_future(shared_owner.reserve(["a"], timeout=50))
            await parked(shared_owner, client)
            job = await mill.queue("a").aput("x")
            client.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                shared_owner.give_all_back(await client)  # it was quicker, and had the job
            (again,) = await shared_owner.reserve(["a"], timeout=50)
            assert ids([again]) == [job.id]
            assert await shared_owner.settle(done(again))


@in_loop
async def test_a_hint_for_a_client_that_left_reaches_another_owner(mill: Tidemill) -> None:
    async with opened(mill) as shared_owner:
        for n in range(10):
            client = asyncio.ensure_future(shared_owner.reserve(["a"], timeout=50))
            await parked(shared_owner, client)
            other = asyncio.ensure_future(mill.queue("a").aget(timeout=30))
            await asyncio.sleep(0.05)
            client.cancel()  # the store still lists the owner as waiting
            await put(mill, str(n))
            message = await other
            await message.aack()


@in_loop
async def test_close_answers_waiting_clients_and_stores_their_verdicts(mill: Tidemill) -> None:
    await put(mill, "1", "2")
    async with opened(mill) as shared_owner:
        first, second = await shared_owner.reserve(["a"], 2)
        client = asyncio.ensure_future(shared_owner.reserve(["a"], timeout=50))
        await parked(shared_owner, client)
        settled = asyncio.ensure_future(shared_owner.settle(done(first)))
        await asyncio.sleep(0)
    assert await client == []
    assert await settled
    assert mill.broker.owners() == []
    record = mill.broker.get(second.envelope.id)
    assert record.state is State.READY


@in_loop
async def test_close_answers_all_verdicts_when_the_store_fails(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(step: Step) -> Reply:
        raise BrokerUnavailable("it is away")

    async with opened(mill) as shared_owner:
        monkeypatch.setattr(mill.broker, "exchange", exchange)
        settled = [
            asyncio.ensure_future(shared_owner.settle(Verdict(token, Outcome.SUCCESS)))
            for token in range(1, 3 * MAX_VERDICTS)
        ]
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*settled, return_exceptions=True)
    assert {type(answer) for answer in answers} == {BrokerUnavailable}


@in_loop
async def test_an_unreachable_store_is_reported_and_used_again_later(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(mill) as shared_owner:
        await put(mill, "1", "2")
        (job,) = await shared_owner.reserve(["a"])
        real, lost = mill.broker.exchange, True

        def exchange(step: Step) -> Reply:
            if lost:
                raise BrokerUnavailable("it is away")
            return real(step)

        monkeypatch.setattr(mill.broker, "exchange", exchange)
        with pytest.raises(BrokerUnavailable, match="away"):
            await shared_owner.settle(done(job))
        with pytest.raises(BrokerUnavailable, match="away"):
            await shared_owner.reserve(["a"])
        waiting = asyncio.ensure_future(shared_owner.reserve(["a"], timeout=50))
        shared_owner.give_back(job.lease.token)  # nobody hears of it, so it is kept in mind
        await asyncio.sleep(0.3)
        lost = False
        assert ids(await waiting) in (["1"], ["2"])
        assert len(await shared_owner.reserve(["a"], timeout=50)) == 1


@in_loop
async def test_an_owner_that_was_given_up_attaches_again(mill: Tidemill) -> None:
    async with opened(mill) as shared_owner:
        await put(mill, "1")
        (job,) = await shared_owner.reserve(["a"])
        mill.broker.release(shared_owner.owner.id, {})
        assert not await shared_owner.settle(done(job))
        assert ids(await shared_owner.reserve(["a"], timeout=50)) == ["1"]


@in_loop
async def test_many_clients_at_once_get_each_job_once(mill: Tidemill) -> None:
    seen: list[str] = []

    async with opened(mill) as shared_owner:

        async def client() -> None:
            while jobs := await shared_owner.reserve(["a", "b"], 3, timeout=0.5):
                seen.extend(ids(jobs))
                await asyncio.gather(*(shared_owner.settle(done(job)) for job in jobs))

        async def producer(queue: str) -> None:
            for _ in range(100):
                await mill.queue(queue).aput("x")

        clients = [asyncio.ensure_future(client()) for _ in range(20)]
        await asyncio.gather(producer("a"), producer("b"))
        await asyncio.gather(*clients)
        while len(seen) < 200:
            await client()
    assert len(seen) == len(set(seen)) == 200
    assert sum(queue.size for queue in mill.queues()) == 0
