"""The shared owner of a job server: many clients, one owner, one exchange for all."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from in_loop import in_loop

from tidemill import Tidemill, TidemillError
from tidemill.brokers.contract.exchange import Mode, Reply, Step
from tidemill.core.clock import new_id
from tidemill.core.commit_delay import CommitDelay
from tidemill.core.envelope import Envelope
from tidemill.core.job import Lease, Outcome, State, Verdict
from tidemill.core.owner import Owner
from tidemill.errors import BrokerUnavailable
from tidemill.server import shared_owner as module
from tidemill.server.dispatcher import MAX_VERDICTS, Dispatcher
from tidemill.server.shared_owner import SharedOwner
from tidemill.server.waiters import JobKinds, ReservedJob, Waiter, Waiters

Test = Callable[[SharedOwner], Coroutine[Any, Any, None]]


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
async def test_a_client_gets_many_jobs_while_others_wait_for_one(mill: Tidemill) -> None:
    async with opened(mill) as shared_owner:
        waits = (("a", 12), ("b", 1), ("c", 5), ("d", 2))
        waiters = [
            asyncio.ensure_future(shared_owner.reserve([q], n, timeout=50)) for q, n in waits
        ]
        for at, (waiter, (queue, count)) in enumerate(zip(waiters, waits, strict=True)):
            await parked(
                shared_owner, *waiters[at:]
            )  # jobs that come between two looks are shared out
            await mill.queue(queue).aput_many(["x"] * count)
            assert len(await waiter) == count


@in_loop
async def test_looks_for_large_wishes_come_before_the_look_for_all() -> None:
    waiters = Waiters()
    waits = (("a", 100), ("b", 1), ("c", 70), ("d", 3), ("a", 1), ("b", 1))
    new = [Waiter((q,), room, Mode.STRICT, asyncio.Future()) for q, room in waits]
    for waiter in new:
        waiters.add(waiter)
    waiters.looked(new)

    def round_of(looks: int) -> list[tuple[int, int, bool]]:
        wants = [waiters.want(Mode.MERGED, JobKinds())[0] for _ in range(looks)]
        return [(want.count, len(want.queues), want.sleep) for want in wants]

    for _ in range(2):
        assert round_of(2) == [(70, 2, False), (2, 4, True)]
    waiters.drop(new[1])
    assert round_of(3) == [(70, 2, False), (3, 1, False), (1, 4, True)]
    for waiter in (new[0], new[2], new[3]):
        waiters.drop(waiter)
    assert round_of(1) == [(1, 2, True)]


@in_loop
async def test_a_client_that_joins_a_waiting_one_costs_no_step(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    monkeypatch.setattr(module, "LONG_WAIT", 0.05)
    real = mill.broker.exchange
    monkeypatch.setattr(mill.broker, "exchange", lambda s: (steps.append(s), real(s))[1])
    async with opened(mill) as shared_owner:
        waiting = [asyncio.ensure_future(shared_owner.reserve(["a", "b"], timeout=50))]
        await parked(shared_owner, *waiting)
        before = len(steps)
        # given others who wait for no more than it does, some of them not for long
        assert await shared_owner.reserve(["b"], timeout=0.05) == []
        others = (["b"], ["a"], ["b", "a"])
        waiting += [asyncio.ensure_future(shared_owner.reserve(q, timeout=50)) for q in others]
        await asyncio.sleep(0)
        assert len(steps) == before
        # then each gets what comes
        await put(mill, "a1", "a2", queue="a")
        await put(mill, "b1", "b2", queue="b")
        got = [job for waiter in waiting for job in await waiter]
        assert sorted(ids(got)) == ["a1", "a2", "b1", "b2"]
        # and who waits for more, or for a moment only, has a look of its own
        before = len(steps)
        assert await shared_owner.reserve(["a"], timeout=0) == []
        assert len(steps) > before


@in_loop
async def test_many_clients_that_joined_share_a_look(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    real = mill.broker.exchange
    monkeypatch.setattr(mill.broker, "exchange", lambda s: (steps.append(s), real(s))[1])
    async with opened(mill) as shared_owner:
        # given many that joined one, each with a queue of its own
        names = [f"q{n}" for n in range(30)]
        first = asyncio.ensure_future(shared_owner.reserve(names, timeout=50))
        await parked(shared_owner, first)
        others = [asyncio.ensure_future(shared_owner.reserve([name], timeout=50)) for name in names]
        await parked(shared_owner, first, *others)
        assert all(
            isinstance(waiter, Waiter) and waiter.joined
            for waiter in shared_owner._dispatcher.inbox
        )
        before = len(steps)
        # when something comes for the last of them
        await put(mill, "1", "2", queue=names[-1])
        assert [ids(await waiter) for waiter in (first, others[-1])] == [["1"], ["2"]]
        # then they were not looked for one by one, and all of them wait on
        assert len(steps) - before < len(names) / 2
        for name, waiter in zip(names[:3], others, strict=False):
            await put(mill, name, queue=name)
            assert ids(await waiter) == [name]
        for waiter in others:
            waiter.cancel()


@in_loop
async def test_a_job_that_comes_while_a_client_joins_is_not_slept_through(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    gets_up, real = threading.Event(), mill.broker.wait
    gets_up.set()

    def wait(owner_id: str, timeout: float) -> None:
        real(owner_id, timeout)
        gets_up.wait(30)

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
async def test_clients_that_joined_and_left_are_forgotten(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONG_WAIT", 0.0)
    monkeypatch.setattr(module, "MAX_VERDICTS", 10)
    async with opened(mill) as shared_owner:
        first = asyncio.ensure_future(shared_owner.reserve(["a"], timeout=50))
        await parked(shared_owner, first)
        for _ in range(100):
            assert await shared_owner.reserve(["a"], timeout=0) == []
            assert len(shared_owner._dispatcher.inbox) <= 10
        await put(mill, "1")
        assert ids(await first) == ["1"]


@in_loop
async def test_a_client_gets_no_job_from_another_look_before_its_own() -> None:
    """It may have a better one in another queue."""
    waiters, loop = Waiters(), asyncio.get_running_loop()
    mine = Waiter(("a",), 1, Mode.MERGED, loop.create_future())
    other = Waiter(("a", "b"), 1, Mode.MERGED, loop.create_future())
    waiters.add(mine)
    waiters.add(other)
    want, first = waiters.want(Mode.MERGED, JobKinds())
    assert (want.count, first) == (1, [mine])
    lease = Lease(1, 1, 0, 0, 1, 0.0, 0.0, 0.0, b"")
    assert waiters.hand_out(ReservedJob(lease, Envelope(id="1", queue="a"))) is mine
    assert waiters.hand_out(ReservedJob(lease, Envelope(id="2", queue="a"))) is None
    # once it has looked, it gets what comes
    while not (first := waiters.want(Mode.MERGED, JobKinds())[1]):
        pass
    waiters.looked(first)
    assert waiters.want(Mode.MERGED, JobKinds())[0].count == 1
    assert waiters.hand_out(ReservedJob(lease, Envelope(id="3", queue="a"))) is other
    assert not waiters


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
async def test_a_job_found_in_time_is_delivered_after_the_deadline(mill: Tidemill) -> None:
    async with opened(mill) as shared_owner:
        waiters = shared_owner._dispatcher._waiters
        looked = waiters.looked

        def look_and_rest(first: list[Waiter]) -> None:
            looked(first)
            time.sleep(0.3)  # the time of the client is over here

        waiters.looked = look_and_rest  # type: ignore[method-assign,assignment]
        await put(mill, "1")
        assert ids(await shared_owner.reserve(["a"], 10, timeout=0.1)) == ["1"]


@in_loop
async def test_a_job_that_a_cancelled_client_did_not_read_goes_back(mill: Tidemill) -> None:
    async with opened(mill) as shared_owner:
        client = asyncio.ensure_future(shared_owner.reserve(["a"], timeout=50))
        await parked(shared_owner, client)
        await put(mill, "1")
        (waiter,) = shared_owner._dispatcher._waiters or [None]
        while waiter is not None and not waiter.answer.done():
            await asyncio.sleep(0)
        client.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await client
        assert ids(await shared_owner.reserve(["a"], timeout=50)) == ["1"]


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
            assert message is not None
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
    assert record is not None
    assert record.state is State.READY


@in_loop
async def test_close_answers_requests_behind_many_verdicts(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, busy, goes_on = mill.broker.exchange, threading.Event(), threading.Event()

    def exchange(step: Step) -> Reply:
        busy.set()
        goes_on.wait(30)
        return real(step)

    def settle(token: int) -> asyncio.Future[bool]:
        return asyncio.ensure_future(shared_owner.settle(Verdict(token, Outcome.SUCCESS)))

    # given a client that asks behind more verdicts than one step takes, during an exchange
    async with opened(mill) as shared_owner:
        monkeypatch.setattr(mill.broker, "exchange", exchange)
        settled = [settle(1)]
        await asyncio.to_thread(busy.wait, 30)
        settled += [settle(token) for token in range(2, 2 * MAX_VERDICTS)]
        client = asyncio.ensure_future(shared_owner.reserve(["a"], timeout=50))
        await asyncio.sleep(0)
        # when the owner is closed before the exchange ends
        closing = asyncio.ensure_future(shared_owner.close())
        await asyncio.sleep(0)
        goes_on.set()
        # then all are answered
        async with asyncio.timeout(30):
            await closing
            assert await client == []
            assert await asyncio.gather(*settled) == [False] * len(settled)


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
async def test_a_verdict_without_a_waiting_client_is_sent_again_after_any_error(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(mill) as shared_owner:
        await put(mill, "1")
        (job,) = await shared_owner.reserve(["a"])
        real, refused = mill.broker.exchange, 0

        def exchange(step: Step) -> Reply:
            nonlocal refused
            if step.verdicts and not refused:
                refused += 1
                raise TidemillError("not now")
            return real(step)

        monkeypatch.setattr(mill.broker, "exchange", exchange)
        await parked(shared_owner)
        with monkeypatch.context() as patch:  # both are heard at once
            patch.setattr(shared_owner._dispatcher, "wake", lambda: None)
            shared_owner.give_back(job.lease.token)
        with pytest.raises(TidemillError, match="not now"):
            await shared_owner.reserve(["a"], timeout=50)
        assert refused == 1
        assert ids(await shared_owner.reserve(["a"], timeout=50)) == ["1"]


class PatientDelay(CommitDelay):
    """Waits as long as it is told to for those who were answered."""

    patience = 30.0

    def expect(self, answered: int, pending: int, took: float = 0.0) -> None:
        super().expect(answered, pending)
        self._until = time.monotonic() + self.patience


@in_loop
async def test_the_dispatcher_waits_for_answered_clients_before_it_sleeps(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(mill, "1", "2")  # before the owner is open, since a put wakes the dispatcher
    async with opened(mill) as shared_owner:
        await parked(shared_owner)
        patient = shared_owner._dispatcher._delay = PatientDelay()
        calls: list[str] = []
        exchange, wait = mill.broker.exchange, mill.broker.wait

        def exchanged(step: Step) -> Reply:
            calls.append("settle" if step.verdicts else "take")
            return exchange(step)

        monkeypatch.setattr(mill.broker, "exchange", exchanged)
        monkeypatch.setattr(mill.broker, "wait", lambda *a: calls.append("wait") or wait(*a))
        with monkeypatch.context() as patch:  # both are heard at once
            patch.setattr(shared_owner._dispatcher, "wake", lambda: None)
            first = asyncio.create_task(shared_owner.reserve(["a"]))
            await asyncio.sleep(0)
        jobs = [*await shared_owner.reserve(["a"]), *await first]
        await asyncio.sleep(0.1)
        patient.patience = 0.0
        assert await asyncio.gather(*[shared_owner.settle(done(job)) for job in jobs]) == [True] * 2
        assert "wait" not in calls[: calls.index("settle")]


@in_loop
async def test_a_deadline_at_the_moment_of_the_look_is_noticed(mill: Tidemill) -> None:
    class Racing(Waiter):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "late" and value:  # the thread is done with its look at this very moment
                super().__setattr__("looked", True)

    async with opened(mill) as shared_owner:
        waiter = Racing(("a",), 1, Mode.STRICT, asyncio.get_running_loop().create_future())
        shared_owner._too_late(waiter)
        assert waiter.answer.result() == []


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
