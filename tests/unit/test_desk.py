"""The desk of the job server: many clients, one owner, one exchange for all."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from tidemill import BrokerUnavailable, Tidemill, TidemillError
from tidemill.brokers.base import Mode, Reply, Step
from tidemill.clock import new_id
from tidemill.gathering import Gathering
from tidemill.job import Envelope, Lease, Outcome, Owner, State, Verdict
from tidemill.server import desk as desk_module
from tidemill.server.asks import Ask, Asks, Kinds
from tidemill.server.desk import Desk, Held

Test = Callable[[Desk], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def desk_of(mill: Tidemill, **options: Any) -> AsyncIterator[Desk]:
    owner = Owner(id=new_id(), kind="consumer", name="desk")
    desk = Desk(mill.broker, owner, **options)
    await desk.open()
    try:
        async with asyncio.timeout(60):
            yield desk
    finally:
        await desk.close()


def done(held: Held) -> Verdict:
    return Verdict(held.lease.token, Outcome.SUCCESS, started=held.lease.leased)


def ids(jobs: list[Held]) -> list[str]:
    return [held.envelope.id for held in jobs]


async def put(mill: Tidemill, *names: str, queue: str = "a", **options: Any) -> None:
    for name in names:
        await mill.queue(queue).aput(name, id=name, **options)


async def parked(desk: Desk, *asks: asyncio.Task[list[Held]]) -> None:
    """Until these have looked in vain, or have joined one that has, and the desk sleeps."""
    clerk = desk._clerk
    while not (clerk.asleep and len(list(clerk._asks)) + len(clerk.inbox) == len(asks)):
        await asyncio.sleep(0.005)


def test_what_is_there_is_handed_out_in_order_and_settled_once(mill: Tidemill) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            await put(mill, "1", "2", "3")
            first = await desk.reserve(["a"], 2)
            assert ids(first) == ["1", "2"]
            assert await desk.settle(done(first[0]))
            assert not await desk.settle(done(first[0]))
            assert await desk.touch(first[1].lease.token)
            assert not await desk.touch(first[0].lease.token)
            release = Verdict(first[1].lease.token, Outcome.RELEASE)
            assert await desk.settle(release)
            assert ids(await desk.reserve(["a"], 10)) == ["2", "3"]
            assert await desk.reserve(["a"]) == []

    asyncio.run(main())


def test_queues_are_emptied_in_the_order_they_are_named_or_as_one(mill: Tidemill) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            await put(mill, "a1", "a2", queue="a")
            await put(mill, "b1", queue="b", priority=5)
            assert ids(await desk.reserve(["b", "a"], 2)) == ["b1", "a1"]
            await put(mill, "b2", queue="b", priority=5)
            await put(mill, "a3", queue="a", priority=9)
            assert ids(await desk.reserve(["a", "b"], 3, mode=Mode.MERGED)) == ["a3", "b2", "a2"]

    asyncio.run(main())


def test_who_waits_longest_gets_it_and_a_new_one_does_not_overtake(mill: Tidemill) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            waiting = []
            for queues in (["a", "b"], ["b"], ["a"]):
                waiting.append(asyncio.ensure_future(desk.reserve(queues, timeout=50)))
                await parked(desk, *waiting)
            await put(mill, "b1", "b2", queue="b")
            assert ids(await waiting[0]) == ["b1"]
            assert ids(await waiting[1]) == ["b2"]
            later = asyncio.ensure_future(desk.reserve(["a"], timeout=50))
            await put(mill, "a1", "a2", queue="a")
            assert ids(await waiting[2]) == ["a1"]
            assert ids(await later) == ["a2"]

    asyncio.run(main())


def test_no_more_is_taken_than_clients_can_have(mill: Tidemill) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            one = asyncio.ensure_future(desk.reserve(["a"], timeout=50))
            other = asyncio.ensure_future(desk.reserve(["b"], 5, timeout=50))
            await parked(desk, one, other)
            await mill.queue("a").aput_many(["x"] * 4)
            assert len(await one) == 1
            await asyncio.sleep(0.05)
            (queue,) = mill.queues()
            assert (queue.ready, queue.running) == (3, 1)
            other.cancel()

    asyncio.run(main())


def test_who_wants_many_gets_them_while_others_wait_for_one(mill: Tidemill) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            waits = (("a", 10), ("b", 1), ("c", 6), ("d", 3))
            asks = [asyncio.ensure_future(desk.reserve([q], n, timeout=50)) for q, n in waits]
            for at, (ask, (queue, count)) in enumerate(zip(asks, waits, strict=True)):
                await parked(desk, *asks[at:])  # jobs that come between two looks are shared out
                await mill.queue(queue).aput_many(["x"] * count)
                assert len(await ask) == count

    asyncio.run(main())


def test_looks_for_those_who_want_many_come_before_that_for_all() -> None:
    async def main() -> None:
        asks = Asks()
        waits = (("a", 100), ("b", 1), ("c", 70), ("d", 3), ("a", 1), ("b", 1))
        new = [Ask((q,), room, Mode.STRICT, asyncio.Future()) for q, room in waits]
        for ask in new:
            asks.add(ask)
        asks.looked(new)

        def round_of(looks: int) -> list[tuple[int, int, bool]]:
            wants = [asks.want(Mode.MERGED, Kinds(), -1)[0] for _ in range(looks)]
            return [(want.count, len(want.queues), want.sleep) for want in wants]

        for _ in range(2):
            assert round_of(2) == [(70, 2, False), (2, 4, True)]
        asks.drop(new[1])
        assert round_of(3) == [(70, 2, False), (3, 1, False), (1, 4, True)]
        for ask in (new[0], new[2], new[3]):
            asks.drop(ask)
        assert round_of(1) == [(1, 2, True)]
        assert not asks._many

    asyncio.run(main())


def test_who_joins_one_that_waits_costs_no_step(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    monkeypatch.setattr(desk_module, "LONG", 0.05)

    async def main() -> None:
        real = mill.broker.exchange
        monkeypatch.setattr(mill.broker, "exchange", lambda s: (steps.append(s), real(s))[1])
        async with desk_of(mill) as desk:
            waiting = [asyncio.ensure_future(desk.reserve(["a", "b"], timeout=50))]
            await parked(desk, *waiting)
            before = len(steps)
            # given others who wait for no more than it does, some of them not for long
            assert await desk.reserve(["b"], timeout=0.05) == []
            others = (["b"], ["a"], ["b", "a"])
            waiting += [asyncio.ensure_future(desk.reserve(q, timeout=50)) for q in others]
            await asyncio.sleep(0)
            assert len(steps) == before
            # then each gets what comes
            await put(mill, "a1", "a2", queue="a")
            await put(mill, "b1", "b2", queue="b")
            got = [held for ask in waiting for held in await ask]
            assert sorted(ids(got)) == ["a1", "a2", "b1", "b2"]
            # and who waits for more, or for a moment only, has a look of its own
            before = len(steps)
            assert await desk.reserve(["a"], timeout=0) == []
            assert len(steps) > before

    asyncio.run(main())


def test_many_who_joined_cost_no_look_each(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    async def main() -> None:
        real = mill.broker.exchange
        monkeypatch.setattr(mill.broker, "exchange", lambda s: (steps.append(s), real(s))[1])
        async with desk_of(mill) as desk:
            # given many that joined one, each with a queue of its own
            names = [f"q{n}" for n in range(30)]
            first = asyncio.ensure_future(desk.reserve(names, timeout=50))
            await parked(desk, first)
            others = [asyncio.ensure_future(desk.reserve([name], timeout=50)) for name in names]
            await parked(desk, first, *others)
            assert all(isinstance(ask, Ask) and ask.joined for ask in desk._clerk.inbox)
            before = len(steps)
            # when something comes for the last of them
            await put(mill, "1", "2", queue=names[-1])
            assert [ids(await ask) for ask in (first, others[-1])] == [["1"], ["2"]]
            # then they were not looked for one by one, and all of them wait on
            assert len(steps) - before < len(names) / 2
            for name, ask in zip(names[:3], others, strict=False):
                await put(mill, name, queue=name)
                assert ids(await ask) == [name]
            for ask in others:
                ask.cancel()

    asyncio.run(main())


def test_what_comes_while_somebody_joins_is_not_slept_through(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        gets_up, real = threading.Event(), mill.broker.wait
        gets_up.set()

        def wait(owner_id: str, timeout: float) -> None:
            real(owner_id, timeout)
            gets_up.wait(30)

        monkeypatch.setattr(mill.broker, "wait", wait)
        async with desk_of(mill) as desk:
            first = asyncio.ensure_future(desk.reserve(["b", "a"], timeout=50))
            await parked(desk, first)
            # given jobs that come while the thread is asleep, and is slow to get up
            gets_up.clear()
            await put(mill, "2", "3", queue="a")
            joined = asyncio.ensure_future(desk.reserve(["a"], timeout=50))
            await asyncio.sleep(0)
            assert [isinstance(ask, Ask) and ask.joined for ask in desk._clerk.inbox] == [True]
            # then they are there when it does
            gets_up.set()
            assert [ids(await first), ids(await joined)] == [["2"], ["3"]]

    asyncio.run(main())


def test_of_those_who_joined_and_left_not_many_are_kept(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "LONG", 0.0)
    monkeypatch.setattr(desk_module, "MOST", 10)

    async def main() -> None:
        async with desk_of(mill) as desk:
            first = asyncio.ensure_future(desk.reserve(["a"], timeout=50))
            await parked(desk, first)
            for _ in range(100):
                assert await desk.reserve(["a"], timeout=0) == []
                assert len(desk._clerk.inbox) <= 10
            await put(mill, "1")
            assert ids(await first) == ["1"]

    asyncio.run(main())


def test_nobody_gets_a_job_by_anothers_look_before_its_own() -> None:
    """It may have a better one in another queue."""

    async def main() -> None:
        asks, loop = Asks(), asyncio.get_running_loop()
        mine = Ask(("a",), 1, Mode.MERGED, loop.create_future())
        other = Ask(("a", "b"), 1, Mode.MERGED, loop.create_future())
        asks.add(mine)
        asks.add(other)
        want, first = asks.want(Mode.MERGED, Kinds(), -1)
        assert (want.count, first) == (1, [mine])
        lease = Lease(1, 1, 0, 0, 1, 0.0, 0.0, 0.0, b"")
        assert asks.hand(Held(lease, Envelope(id="1", queue="a"))) is mine
        assert asks.hand(Held(lease, Envelope(id="2", queue="a"))) is None
        # once it has looked, it gets what comes
        while not (first := asks.want(Mode.MERGED, Kinds(), -1)[1]):
            pass
        asks.looked(first)
        assert asks.want(Mode.MERGED, Kinds(), -1)[0].count == 1
        assert asks.hand(Held(lease, Envelope(id="3", queue="a"))) is other
        assert not asks

    asyncio.run(main())


def test_who_waits_is_looked_for_also_while_others_come_all_the_time() -> None:
    async def main() -> None:
        asks = Asks()

        def ask(queue: str) -> Ask:
            asks.add(one := Ask((queue,), 1, Mode.STRICT, asyncio.Future()))
            return one

        asks.looked([ask("b")])
        wants = []
        for _ in range(4):
            ask("a")
            wants.append(asks.want(Mode.MERGED, Kinds(), -1))
        assert [want.queues for want, _ in wants] == [("a",), ("b",), ("a",), ("b",)]
        assert [len(first) for _, first in wants] == [1, 0, 3, 0]

    asyncio.run(main())


def test_a_time_that_is_over_ends_the_wait_with_nothing(mill: Tidemill) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            assert await desk.reserve(["a"], timeout=0.05) == []
            assert await desk.reserve(["a"], timeout=0) == []
            await put(mill, "1")
            assert ids(await desk.reserve(["a"], timeout=0)) == ["1"]

    asyncio.run(main())


def test_what_comes_due_is_handed_to_who_waits(mill: Tidemill) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            await put(mill, "1", delay=0.2)
            assert ids(await desk.reserve(["a"], timeout=50)) == ["1"]

    asyncio.run(main())


def test_a_client_that_left_has_taken_nothing(mill: Tidemill) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            for _ in range(20):  # at different moments: before, while and after it is handed out
                client = asyncio.ensure_future(desk.reserve(["a"], timeout=50))
                await parked(desk, client)
                job = await mill.queue("a").aput("x")
                client.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    desk.give_all_back(await client)  # it was quicker, and had the job
                (again,) = await desk.reserve(["a"], timeout=50)
                assert ids([again]) == [job.id]
                assert await desk.settle(done(again))

    asyncio.run(main())


def test_a_job_that_was_found_in_time_is_handed_over_after_it(mill: Tidemill) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            asks = desk._clerk._asks
            looked = asks.looked

            def look_and_rest(first: list[Ask]) -> None:
                looked(first)
                time.sleep(0.3)  # the time of the client is over here

            asks.looked = look_and_rest  # type: ignore[method-assign,assignment]
            await put(mill, "1")
            assert ids(await desk.reserve(["a"], 10, timeout=0.1)) == ["1"]

    asyncio.run(main())


def test_an_answer_that_a_cancelled_client_did_not_read_goes_back(mill: Tidemill) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            client = asyncio.ensure_future(desk.reserve(["a"], timeout=50))
            await parked(desk, client)
            await put(mill, "1")
            (ask,) = desk._clerk._asks or [None]
            while ask is not None and not ask.answer.done():
                await asyncio.sleep(0)
            client.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await client
            assert ids(await desk.reserve(["a"], timeout=50)) == ["1"]

    asyncio.run(main())


def test_a_hint_for_a_client_that_left_reaches_somebody_else(mill: Tidemill) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            for n in range(10):
                client = asyncio.ensure_future(desk.reserve(["a"], timeout=50))
                await parked(desk, client)
                other = asyncio.ensure_future(mill.queue("a").aget(timeout=30))
                await asyncio.sleep(0.05)
                client.cancel()  # the store still has the desk for one who waits
                await put(mill, str(n))
                message = await other
                assert message is not None
                await message.aack()

    asyncio.run(main())


def test_the_end_answers_who_waits_and_hears_what_was_said(mill: Tidemill) -> None:
    async def main() -> None:
        await put(mill, "1", "2")
        async with desk_of(mill) as desk:
            first, second = await desk.reserve(["a"], 2)
            client = asyncio.ensure_future(desk.reserve(["a"], timeout=50))
            await parked(desk, client)
            settled = asyncio.ensure_future(desk.settle(done(first)))
            await asyncio.sleep(0)
        assert await client == []
        assert await settled
        assert mill.broker.owners() == []
        record = mill.broker.get(second.envelope.id)
        assert record is not None
        assert record.state is State.READY

    asyncio.run(main())


def test_a_store_that_cannot_be_reached_is_told_of_and_come_back_to(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            await put(mill, "1", "2")
            (held,) = await desk.reserve(["a"])
            real, broken = mill.broker.exchange, True

            def exchange(step: Step) -> Reply:
                if broken:
                    raise BrokerUnavailable("it is away")
                return real(step)

            monkeypatch.setattr(mill.broker, "exchange", exchange)
            with pytest.raises(BrokerUnavailable, match="away"):
                await desk.settle(done(held))
            with pytest.raises(BrokerUnavailable, match="away"):
                await desk.reserve(["a"])
            waiting = asyncio.ensure_future(desk.reserve(["a"], timeout=50))
            desk.give_back(held.lease.token)  # nobody hears of it, so it is kept in mind
            await asyncio.sleep(0.3)
            broken = False
            assert ids(await waiting) in (["1"], ["2"])
            assert len(await desk.reserve(["a"], timeout=50)) == 1

    asyncio.run(main())


def test_what_nobody_waits_for_is_said_again_after_any_error(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            await put(mill, "1")
            (held,) = await desk.reserve(["a"])
            real, refused = mill.broker.exchange, 0

            def exchange(step: Step) -> Reply:
                nonlocal refused
                if step.verdicts and not refused:
                    refused += 1
                    raise TidemillError("not now")
                return real(step)

            monkeypatch.setattr(mill.broker, "exchange", exchange)
            await parked(desk)
            with monkeypatch.context() as patch:  # both are heard at once
                patch.setattr(desk._clerk, "wake", lambda: None)
                desk.give_back(held.lease.token)
            with pytest.raises(TidemillError, match="not now"):
                await desk.reserve(["a"], timeout=50)
            assert refused == 1
            assert ids(await desk.reserve(["a"], timeout=50)) == ["1"]

    asyncio.run(main())


class Patient(Gathering):
    """Waits as long as it is told to for those who were answered."""

    patience = 30.0

    def expect(self, answered: int, pending: int, took: float = 0.0) -> None:
        super().expect(answered, pending)
        self._until = time.monotonic() + self.patience


def test_who_was_answered_is_waited_for_before_the_desk_sleeps(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            await put(mill, "1", "2")
            await parked(desk)
            patient = desk._clerk._gathering = Patient()
            calls: list[str] = []
            exchange, wait = mill.broker.exchange, mill.broker.wait

            def exchanged(step: Step) -> Reply:
                calls.append("settle" if step.verdicts else "take")
                return exchange(step)

            monkeypatch.setattr(mill.broker, "exchange", exchanged)
            monkeypatch.setattr(mill.broker, "wait", lambda *a: calls.append("wait") or wait(*a))
            with monkeypatch.context() as patch:  # both are heard at once
                patch.setattr(desk._clerk, "wake", lambda: None)
                first = asyncio.create_task(desk.reserve(["a"]))
                await asyncio.sleep(0)
            jobs = [*await desk.reserve(["a"]), *await first]
            await asyncio.sleep(0.1)
            patient.patience = 0.0
            assert await asyncio.gather(*[desk.settle(done(held)) for held in jobs]) == [True] * 2
            assert "wait" not in calls[: calls.index("settle")]

    asyncio.run(main())


def test_a_time_that_is_over_while_the_look_ends_is_noticed(mill: Tidemill) -> None:
    class Racing(Ask):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "late" and value:  # the thread is done with its look at this very moment
                super().__setattr__("looked", True)

    async def main() -> None:
        async with desk_of(mill) as desk:
            ask = Racing(("a",), 1, Mode.STRICT, asyncio.get_running_loop().create_future())
            desk._too_late(ask)
            assert ask.answer.result() == []

    asyncio.run(main())


def test_an_owner_that_was_given_up_comes_back(mill: Tidemill) -> None:
    async def main() -> None:
        async with desk_of(mill) as desk:
            await put(mill, "1")
            (held,) = await desk.reserve(["a"])
            mill.broker.release(desk.owner.id, {})
            assert not await desk.settle(done(held))
            assert ids(await desk.reserve(["a"], timeout=50)) == ["1"]

    asyncio.run(main())


def test_many_clients_at_once_get_each_job_once(mill: Tidemill) -> None:
    async def main() -> None:
        seen: list[str] = []

        async with desk_of(mill) as desk:

            async def client() -> None:
                while jobs := await desk.reserve(["a", "b"], 3, timeout=0.5):
                    seen.extend(ids(jobs))
                    await asyncio.gather(*(desk.settle(done(held)) for held in jobs))

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

    asyncio.run(main())
