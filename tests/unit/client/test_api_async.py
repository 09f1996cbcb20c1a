"""Many coroutines of one app: waiting coroutines do not keep others from acting."""

from __future__ import annotations

import asyncio
import builtins
import threading
import time
import warnings
from collections.abc import Callable

import pytest
from harness import LIMIT

from tidemill import ResultTimeout, State, Tidemill
from tidemill.client.threads import Threads
from tidemill.core.envelope import Envelope
from tidemill.core.job import Put
from tidemill.testing import worker


async def until(check: Callable[[], object]) -> None:
    """Wait without blocking the event loop."""
    end = time.monotonic() + LIMIT
    while not check():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


@pytest.fixture
def few_threads(mill: Tidemill) -> Tidemill:
    """An app whose pools are full soon."""
    mill.runtime.threads, mill.runtime.waiters = Threads("act", 2), Threads("wait", 4)
    return mill


def test_those_who_wait_starve_nobody(few_threads: Tidemill) -> None:
    mill = few_threads

    @mill.task
    def work(n: int) -> int:
        return n

    async def main() -> None:
        never = [await work.using(delay=1000).aenqueue(0) for _ in range(8)]
        waiting = [asyncio.ensure_future(job.aresult()) for job in never[:4]]
        waiting += [asyncio.ensure_future(mill.queue(f"q{n}").aget()) for n in range(4)]
        # when: every thread that waits is taken
        await until(lambda: mill.runtime.waiters.is_full)
        # then: short calls are made at once
        async with asyncio.timeout(20):
            job = await work.aenqueue(7)
            assert await job.astate() is State.READY
            await mill.queue("elsewhere").aput("text")
            message = await mill.queue("elsewhere").aget(timeout=0)
            assert message is not None
            await message.aack()
            assert await mill.queue("elsewhere").asize() == 0
            # and a wait ends in time, with what is known by then
            with pytest.raises(ResultTimeout, match=r"is still ready after 0\.2 s"):
                await job.aresult(timeout=0.2)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(main())


def test_more_results_than_threads(few_threads: Tidemill) -> None:
    mill, go = few_threads, threading.Event()

    @mill.task
    def slow(n: int) -> int:
        assert go.wait(60)
        return n

    async def main() -> None:
        jobs = [await slow.aenqueue(n) for n in range(12)]
        waiting = [asyncio.ensure_future(job.aresult()) for job in jobs]
        await until(lambda: mill.runtime.waiters.is_full)
        go.set()
        assert await asyncio.gather(*waiting) == list(range(12))
        began = time.monotonic()
        assert await asyncio.gather(*jobs) == list(range(12))
        assert time.monotonic() - began < 10

    with worker(mill):
        asyncio.run(main())


def test_a_blocking_wait_in_a_loop_is_pointed_out(mill: Tidemill) -> None:
    @mill.task
    def work() -> int:
        return 1

    async def main() -> None:
        job = await work.aenqueue()
        with (
            pytest.warns(RuntimeWarning, match="`await job`") as warned,
            pytest.raises(ResultTimeout),
        ):
            job.result(timeout=0.01)
        assert warned[0].filename == __file__
        with (
            pytest.warns(RuntimeWarning, match="`await job`") as warned,
            pytest.raises(ResultTimeout),
        ):
            job.wait(timeout=0.01)
        assert warned[0].filename == __file__
        with worker(mill):
            assert await job == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert job.result() == 1  # it does not wait
            assert job.result(timeout=0) == 1

    asyncio.run(main())


def test_a_notebook_may_wait(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)

    @mill.task
    def work() -> int:
        return 1

    async def main() -> None:
        with warnings.catch_warnings(), worker(mill):
            warnings.simplefilter("error")
            assert work.enqueue().result(timeout=20) == 1

    asyncio.run(main())


def test_coroutines_that_put_one_after_the_other_share_each_commit(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None falls behind: a commit waits for the coroutines that the last commit has answered."""
    real, sizes, others_wait = mill.broker.put, list[int](), threading.Event()
    batching = mill.runtime.put_batching
    delay = batching._commit_delay
    expect = delay.expect

    def first_alone(jobs: list[Envelope]) -> list[Put]:
        sizes.append(len(jobs))
        assert others_wait.wait(60)
        return real(jobs)

    def expect_for_long(answered: int, pending: int, took: float) -> None:
        expect(answered, pending)  # on a busy machine they take longer than such a commit

    monkeypatch.setattr(mill.broker, "put", first_alone)
    monkeypatch.setattr(delay, "expect", expect_for_long)
    monkeypatch.setattr(delay, "_each", 60.0)
    monkeypatch.setattr(delay, "_most", 60.0)

    @mill.task
    def work() -> None: ...

    async def put(times: int) -> None:
        for _ in range(times):
            await work.aenqueue()

    def has_waited() -> bool:
        delay.arrived(4)  # ends the wait for the coroutines, which put no more
        return not batching._busy.locked()

    async def main() -> None:
        coroutines = [asyncio.ensure_future(put(5))]
        await until(lambda: sizes)
        coroutines += [asyncio.ensure_future(put(4)) for _ in range(3)]
        await until(lambda: len(batching._waiting) == 3)
        others_wait.set()
        await asyncio.gather(*coroutines)
        await until(has_waited)

    asyncio.run(main())
    assert sizes == [1, 4, 4, 4, 4]
