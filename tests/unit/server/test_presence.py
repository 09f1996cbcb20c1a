"""The server gives up consumers whose process is dead, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from tidemill.brokers.contract.store import Store
from tidemill.core.job import Owner
from tidemill.server.http.waits import GRACE, LAPSE, Presence


class QuickLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer while nothing else is ready to run."""

    skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.skipped += max(0.0, self._scheduled[0].when() - self.time())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Join the threads, with no timer: its time would be skipped."""
        await super().shutdown_default_executor()


def run_quickly(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=QuickLoop) as runner:
        runner.run(work)


class OneConsumer:
    """A store with one consumer of another machine; it notes who is given up."""

    def __init__(self) -> None:
        self.released: list[str] = []

    def owners(self) -> list[Owner]:
        return [Owner(id="c", name="c", kind="consumer", lease=30.0)]

    def release(self, owner_id: str, causes: Any) -> int:
        self.released.append(owner_id)
        return 1


@pytest.fixture
def store() -> OneConsumer:
    return OneConsumer()


async def never() -> None:
    await asyncio.Event().wait()


async def at_once() -> None:
    return


async def until_released(store: OneConsumer) -> None:
    async with asyncio.timeout(600):
        while not store.released:
            await asyncio.sleep(0.01)


def test_a_consumer_whose_connection_breaks_is_given_up(store: OneConsumer) -> None:
    async def run() -> None:
        consumers = Presence(cast(Store, store), asyncio.Event())
        await consumers.wait(["c"], 30, at_once)
        await until_released(store)

    run_quickly(run())
    assert store.released == ["c"]


def test_a_consumer_that_was_answered_has_longer_to_ask_again(store: OneConsumer) -> None:
    # Its process may be stopped, or hold its interpreter lock.
    async def run() -> None:
        consumers = Presence(cast(Store, store), asyncio.Event())
        loop = asyncio.get_running_loop()
        began = loop.time()
        await consumers.wait(["c"], 0.01, never)
        await until_released(store)
        assert loop.time() - began >= LAPSE

    run_quickly(run())


def test_a_consumer_that_asks_again_is_not_given_up(store: OneConsumer) -> None:
    async def run() -> None:
        consumers = Presence(cast(Store, store), asyncio.Event())
        await consumers.wait(["c"], 30, at_once)
        again = asyncio.ensure_future(consumers.wait(["c"], 300, never))
        await asyncio.sleep(GRACE + 1)
        assert store.released == []
        again.cancel()
        consumers.close()

    run_quickly(run())
