"""``mill.limits.hold``: code and jobs share the places of a limit, on every broker with limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import eventually
from kinds import Kind

from tidemill import Limit, State, Tidemill, TidemillError
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import HOLDS
from tidemill.client.limits import LimitHold
from tidemill.client.messages import Stop
from tidemill.core.job import Owner
from tidemill.errors import LeaseLost, LimitTimeout
from tidemill.testing import worker

SOON = 30.0
"""Seconds after which a test gives up a wait that must end at once."""

DB = Limit(name="db", concurrency=1)

pytestmark = pytest.mark.needs(Feature.LIMITS)


@pytest.fixture
def make_mill(kind: Kind, broker: Broker, tmp_path: Path) -> Iterator[Callable[[], Tidemill]]:
    """Apps on one broker, each with owners of its own."""
    made: list[Tidemill] = []

    def make() -> Tidemill:
        mill = Tidemill(kind.store_url(tmp_path))
        mill.runtime._broker = broker  # type: ignore[assignment]
        made.append(mill)
        return mill

    yield make
    for mill in made:
        mill.runtime._broker = None  # the fixture of the broker closes it
        mill.close()


@pytest.fixture
def mill(make_mill: Callable[[], Tidemill]) -> Tidemill:
    mill = make_mill()

    @mill.task(name="task", limit=DB)
    def task() -> str:
        return "ran"

    return mill


def holds(mill: Tidemill) -> list[str]:
    """The queues of holds in the store."""
    return [row.name for row in mill.broker.stats() if row.name.startswith(HOLDS)]


def assert_nothing_is_left(mill: Tidemill) -> None:
    assert holds(mill) == []
    assert mill.jobs().page().records == []
    assert [row.running for row in mill.limits.list() if row.name == "db"] in ([0], [])


def test_a_place_is_taken_for_the_block_and_free_after_it(mill: Tidemill) -> None:
    # given one place
    for _ in range(2):
        with mill.limits.hold("db", timeout=SOON):
            (row,) = [row for row in mill.limits.list() if row.name == "db"]
            assert row.running == 1
            # then nobody else gets it
            with (
                pytest.raises(LimitTimeout, match=r"'db' was free within 0\.05 s"),
                mill.limits.hold("db", timeout=0.05),
            ):
                pass
            assert len(holds(mill)) == 1
            assert mill.queues() == []
        assert_nothing_is_left(mill)


def test_an_error_in_the_block_frees_the_place(mill: Tidemill) -> None:
    with pytest.raises(ZeroDivisionError), mill.limits.hold("db"):
        raise ZeroDivisionError
    assert_nothing_is_left(mill)


def test_several_places_are_held_at_once(make_mill: Callable[[], Tidemill]) -> None:
    mill, limit = make_mill(), Limit(name="db", concurrency=2)
    with mill.limits.hold(limit, timeout=SOON), mill.limits.hold(limit, timeout=SOON):
        with pytest.raises(LimitTimeout), mill.limits.hold(limit, timeout=0):
            pass
        assert len(holds(mill)) == 2
    assert_nothing_is_left(mill)


def test_a_hold_waits_until_a_place_is_free(mill: Tidemill) -> None:
    # given a thread that waits for the place
    took = threading.Event()

    def other() -> None:
        with mill.limits.hold("db", timeout=SOON):
            took.set()

    thread = threading.Thread(target=other)
    with mill.limits.hold("db"):
        thread.start()
        eventually(lambda: len(holds(mill)) == 2, "the other hold waits")
        assert not took.is_set()
    # then it gets the place when the block ends
    assert took.wait(SOON)
    thread.join(SOON)
    assert_nothing_is_left(mill)


def test_holds_and_jobs_share_the_places(mill: Tidemill) -> None:
    @mill.task(name="inside", limit=DB, retries=0)
    def inside() -> None:
        with mill.limits.hold("db", timeout=0.05):
            pass

    @mill.task(name="other")
    def other() -> None: ...

    with worker(mill):
        # given a hold, then a job of the limit waits and others go on
        with mill.limits.hold("db", timeout=SOON):
            job = mill.tasks["task"].enqueue()
            other.enqueue().result(timeout=SOON)
            assert job.state == State.READY
        # then it runs after the block
        assert job.result(timeout=SOON) == "ran"
        # given a job that runs, then a hold gets no place
        failed = inside.enqueue()
        assert failed.wait(SOON) == State.FAILED
        assert failed.error.startswith("LimitTimeout: ")
    assert holds(mill) == []


def test_each_key_has_its_places(make_mill: Callable[[], Tidemill]) -> None:
    mill, limit = make_mill(), Limit(name="db", concurrency=1, key=lambda user: user)
    with mill.limits.hold(limit, key="ada", timeout=SOON):
        with mill.limits.hold(limit, key="bob", timeout=SOON):
            pass
        with pytest.raises(LimitTimeout), mill.limits.hold(limit, key="ada", timeout=0):
            pass
    assert_nothing_is_left(mill)


def test_a_hold_takes_a_token_of_a_rate(make_mill: Callable[[], Tidemill]) -> None:
    mill, limit = make_mill(), Limit("1/d", burst=2, name="db")
    for _ in range(2):
        with mill.limits.hold(limit, timeout=SOON):
            pass
    with pytest.raises(LimitTimeout), mill.limits.hold(limit, timeout=0):
        pass
    assert holds(mill) == []


def test_an_async_block_holds_a_place(mill: Tidemill) -> None:
    async def main() -> None:
        async with mill.limits.hold("db", timeout=SOON):
            with pytest.raises(LimitTimeout):
                async with mill.limits.hold("db", timeout=0.05):
                    pass
        async with mill.limits.hold("db", timeout=SOON):
            pass
        assert_nothing_is_left(mill)

    asyncio.run(main())


def test_a_cancelled_wait_leaves_nothing(mill: Tidemill) -> None:
    async def main() -> None:
        # given a task that waits for the place
        async def wait() -> None:
            async with mill.limits.hold("db"):
                pass

        async with mill.limits.hold("db"):
            waiting = asyncio.ensure_future(wait())
            await asyncio.to_thread(eventually, lambda: len(holds(mill)) == 2, "the wait")
            # when it is cancelled
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            # then its queue goes
            await asyncio.to_thread(eventually, lambda: len(holds(mill)) == 1, "the queue")
        assert_nothing_is_left(mill)

    asyncio.run(main())


def test_a_wait_that_is_cancelled_when_it_has_the_place_frees_it(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a thread that took the place, which the event loop does not know yet
    took, cancelled = threading.Event(), threading.Event()
    begin = LimitHold._begin

    def slow(hold: LimitHold, stop: Stop | None = None) -> None:
        begin(hold, stop)
        took.set()
        cancelled.wait(SOON)

    monkeypatch.setattr(LimitHold, "_begin", slow)

    async def block() -> None:
        async with mill.limits.hold("db"):
            raise AssertionError("the block must not begin")

    async def main() -> None:
        # when its caller is cancelled
        waiting = asyncio.ensure_future(block())
        await asyncio.to_thread(took.wait, SOON)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        cancelled.set()
        # then the place is free
        await asyncio.to_thread(eventually, lambda: not holds(mill), "the queue")
        assert_nothing_is_left(mill)

    asyncio.run(main())


def test_a_cancelled_block_frees_its_place(mill: Tidemill) -> None:
    async def main() -> None:
        inside = asyncio.Event()

        async def block() -> None:
            async with mill.limits.hold("db"):
                inside.set()
                await asyncio.Event().wait()

        running, began = map(asyncio.ensure_future, (block(), inside.wait()))
        await asyncio.wait((running, began), return_when=asyncio.FIRST_COMPLETED)
        running.cancel()  # an error of the block comes from the await below
        with pytest.raises(asyncio.CancelledError):
            await running
        assert_nothing_is_left(mill)

    asyncio.run(main())


def give_up_holders(mill: Tidemill) -> None:
    """Have the store give up the owners of all holds, as if their processes did not run."""
    for queue in holds(mill):
        assert mill.broker.release(queue.removeprefix(HOLDS), None) == 1


def test_a_lost_place_is_reported_at_the_end_of_the_block(mill: Tidemill) -> None:
    lost = pytest.raises(LeaseLost, match="'db' was lost inside the block")
    with lost, mill.limits.hold("db", timeout=SOON):
        give_up_holders(mill)
    assert_nothing_is_left(mill)


def test_an_error_of_the_block_goes_before_a_lost_place(mill: Tidemill) -> None:
    hold = mill.limits.hold("db", timeout=SOON)
    hold.__enter__()
    give_up_holders(mill)
    hold.__exit__(ZeroDivisionError)  # raises nothing, so the error of the block goes on
    assert_nothing_is_left(mill)


def test_the_end_of_the_app_frees_its_places(
    mill: Tidemill, make_mill: Callable[[], Tidemill]
) -> None:
    other = make_mill()
    other.task(name="task", limit=DB)(len)
    # given an app that holds the place, and waits for another
    hold = mill.limits.hold("db", timeout=SOON)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            with mill.limits.hold("db"):
                pass
        except TidemillError as error:
            errors.append(error)

    hold.__enter__()
    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: len(holds(mill)) == 2, "the wait")
    # when it is closed (its broker is not: the other app uses the same object)
    mill.runtime.consumers.close()
    mill.limits.close()
    # then the place is free, and the wait has ended
    thread.join(SOON)
    assert "the app was closed before a place of the limit 'db' was free" in str(errors[0])
    with other.limits.hold("db", timeout=SOON):
        pass
    hold.__exit__(None, None, None)  # nothing is left to free
    assert_nothing_is_left(other)


def test_the_first_hold_deletes_queues_of_owners_that_are_gone(
    mill: Tidemill, make_mill: Callable[[], Tidemill], broker: Broker
) -> None:
    # given queues of two owners that died before and after they took their message
    for owner in ("dead-1", "dead-2"):
        queue = mill.queue(HOLDS + owner)
        queue.put("a place", limit=DB, retries=0)
    broker.attach(Owner(id="alive", kind="consumer", name="here:1"))
    mill.queue(HOLDS + "alive").put("a place", limit=DB, retries=0)
    message = queue.get(timeout=0)
    assert message.bury()
    # when
    with make_mill().limits.hold(DB, timeout=SOON):
        # then those queues are gone, and that of an owner that lives is not
        assert HOLDS + "alive" in holds(mill)
        assert len(holds(mill)) == 2
    broker.detach("alive")


def test_a_hold_inside_a_batch_does_not_wait_for_its_commit(mill: Tidemill) -> None:
    with mill.batch():
        job: Any = mill.tasks["task"].enqueue()
        with mill.limits.hold("db", timeout=SOON):
            pass
    assert job.state == State.READY
