"""Many coroutines of one app: who waits keeps nobody from acting."""

from __future__ import annotations

import asyncio
import builtins
import threading
import time
import warnings

import pytest

from tidemill import ResultTimeout, State, Tidemill
from tidemill.client.threads import Threads
from tidemill.core.job import Envelope, Put
from tidemill.testing import worker


@pytest.fixture
def few_threads(mill: Tidemill) -> Tidemill:
    """An app whose pools are full soon."""
    mill.threads, mill.waiters = Threads("act", 2), Threads("wait", 4)
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
        await asyncio.sleep(0.1)
        # when: every thread that waits is taken
        assert mill.waiters.is_full
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
            with pytest.raises(ResultTimeout, match="tidemill explain"):
                await job.aresult(timeout=0.2)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(main())


def test_more_results_than_threads(few_threads: Tidemill) -> None:
    mill, go = few_threads, threading.Event()

    @mill.task
    def slow(n: int) -> int:
        go.wait(20)
        return n

    async def main() -> None:
        jobs = [await slow.aenqueue(n) for n in range(12)]
        waiting = [asyncio.ensure_future(job.aresult()) for job in jobs]
        await asyncio.sleep(0.1)
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
    """None falls behind: who was answered is waited for, up to half of what a commit takes."""
    real, sizes = mill.broker.put, list[int]()

    def slow(jobs: list[Envelope]) -> list[Put]:
        time.sleep(0.4)
        sizes.append(len(jobs))
        return real(jobs)

    monkeypatch.setattr(mill.broker, "put", slow)
    monkeypatch.setattr(mill.put_batching._commit_delay, "_each", 1.0)
    monkeypatch.setattr(mill.put_batching._commit_delay, "_most", 1.0)

    @mill.task
    def work() -> None: ...

    async def put(after: float) -> None:
        await asyncio.sleep(after)
        for _ in range(5):
            await work.aenqueue()

    async def main() -> None:  # the first is alone in its commit
        await asyncio.gather(*(put(after) for after in (0, 0.2, 0.2, 0.2)))

    asyncio.run(main())
    assert sum(sizes) == 20
    assert len(sizes) <= 7, sizes  # one alone, the other three, then all four each time
