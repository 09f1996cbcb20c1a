"""Many coroutines of one app: waiting coroutines do not keep others from acting."""

from __future__ import annotations

import asyncio
import builtins
import time
import warnings
from collections.abc import Callable

import pytest
from harness import LIMIT

from tidemill import ResultTimeout, State, Tidemill
from tidemill.client.threads import Threads
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
            await message.aack()
            assert await mill.queue("elsewhere").asize() == 0
            # and a wait ends in time, with what is known by then
            with pytest.raises(ResultTimeout, match=r"is still ready after 0\.2 s"):
                await job.aresult(timeout=0.2)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

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
