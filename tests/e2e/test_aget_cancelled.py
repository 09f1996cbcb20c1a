"""A get that is cancelled or interrupted by a signal while its message is on the way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import eventually

from tidemill import Message, Tidemill
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.core.job import Outcome


class Gate:
    """Holds up acknowledgements until it is opened."""

    def __init__(self, exchange: Callable[[Step], Reply]) -> None:
        self._exchange = exchange
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, step: Step) -> Reply:
        if step.verdicts:
            self.reached.set()
            assert self.opened.wait(60)
        return self._exchange(step)


@pytest.fixture
def gate(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(mill.broker.exchange)
    monkeypatch.setattr(mill.broker, "exchange", gate)
    yield gate
    gate.opened.set()


async def reached(gate: Gate) -> None:
    """Until a message is being acknowledged; some moments later that is stored."""
    await asyncio.to_thread(gate.reached.wait, 60)
    asyncio.get_running_loop().call_later(0.2, gate.opened.set)


def test_the_message_is_returned_and_the_cancellation_follows(mill: Tidemill, gate: Gate) -> None:
    got: list[Message | None] = []

    async def consume() -> None:
        got.append(await mill.queue("q").aget())
        await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.ensure_future(consume())
        await reached(gate)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # who is impatient cancels twice
        with pytest.raises(asyncio.CancelledError):
            await task

    mill.queue("q").put(1, ttr=0)
    asyncio.run(main())
    assert [message and message.body for message in got] == [1]
    assert mill.queue("q").get(timeout=0) is None


def test_several_messages_are_returned_together_and_the_cancellation_follows(
    mill: Tidemill, gate: Gate
) -> None:
    got: list[Message] = []

    async def consume() -> None:
        got.extend(await mill.queue("q").aget_many(5))
        await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.ensure_future(consume())
        await reached(gate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    # given messages with and without acknowledgement
    mill.queue("q").put("once", ttr=0)
    mill.queue("q").put("held", ttr=600)
    # when the call is cancelled while the acknowledgement is stored
    asyncio.run(main())
    # then
    assert [message.body for message in got] == ["once", "held"]
    assert got[1].ack()
    assert mill.queue("q").get(timeout=0) is None


def test_a_timeout_that_came_too_late_leaves_no_cancellation_behind(
    mill: Tidemill, gate: Gate
) -> None:
    async def by_context() -> Message | None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:
            late = asyncio.ensure_future(reached(gate))
            late.add_done_callback(lambda _: limit.reschedule(loop.time()))
            message = await mill.queue("q").aget()
        await asyncio.sleep(0.05)
        return message

    async def by_call() -> Message | None:
        call = asyncio.ensure_future(mill.queue("q").aget())
        await reached(gate)
        message = await asyncio.wait_for(call, 0.05)
        await asyncio.sleep(0.05)
        return message

    for body, work in enumerate((by_context, by_call)):
        gate.reached.clear()
        gate.opened.clear()
        mill.queue("q").put(body, ttr=0)
        message = asyncio.run(work())
        assert message.body == body


@pytest.mark.parametrize("n", [1, 5])
def test_a_message_with_a_ttr_goes_back_at_once(mill: Tidemill, n: int) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(mill.queue("q").aget_many(n))
        waiting = mill.runtime.consumers.session.waiting
        await asyncio.to_thread(eventually, lambda: waiting, "a waiting call")
        mill.queue("q").put(1)
        until = time.monotonic() + 30
        while waiting:  # the loop is held up since the put, and does not hear of the message
            assert time.monotonic() < until
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    message = mill.queue("q").get(30)  # its ttr is 60 s
    assert message.attempt == 1


# -- signals ---------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """The handler raises this."""


def interrupt_acknowledgement(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, *, done: bool
) -> None:
    """Raise in place of the next acknowledgement, or when it is ``done``."""
    real = mill.broker.exchange

    def exchange(step: Step) -> Reply:
        if not any(verdict.outcome == Outcome.SUCCESS for verdict in step.verdicts):
            return real(step)
        monkeypatch.setattr(mill.broker, "exchange", real)
        if done:
            assert real(step).settled == [True]
        raise Interrupt

    monkeypatch.setattr(mill.broker, "exchange", exchange)


def taken(mill: Tidemill) -> list[Any]:
    """The bodies of all messages, and that each is handed out for the first time."""
    found: list[Message] = []
    while (message := mill.queue("q").get(timeout=0)) is not None:
        found.append(message)
    assert {message.attempt for message in found} <= {1}
    return [message.body for message in found]


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_message_is_kept_when_its_acknowledgement_is_interrupted(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    for body in (1, 2):
        mill.queue("q").put(body, ttr=0, delay=0.001)
    time.sleep(0.01)  # both are due
    interrupt_acknowledgement(mill, monkeypatch, done=done)
    # when
    with pytest.raises(Interrupt):
        mill.queue("q").get(10)
    # then
    assert taken(mill) == ([2, 1] if done else [1, 2])


def test_a_message_with_a_ttr_goes_back_when_its_delivery_is_interrupted(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill.queue("q").put(1)
    real = mill.runtime.consumers._deliver

    def deliver(message: Message, stop: Any) -> Message | None:
        monkeypatch.setattr(mill.runtime.consumers, "_deliver", real)
        raise Interrupt

    monkeypatch.setattr(mill.runtime.consumers, "_deliver", deliver)
    with pytest.raises(Interrupt):
        mill.queue("q").get(10)
    assert taken(mill) == [1]


def test_an_expired_lease_is_not_put_once_more(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a consumer that takes so long that the message is another's by then
    monkeypatch.setattr("tidemill.client.messages.YOUNG_LEASE", 0.0)
    mill.queue("q").put(1, ttr=0)
    interrupt_acknowledgement(mill, monkeypatch, done=True)
    with pytest.raises(Interrupt):
        mill.queue("q").get(10)
    assert taken(mill) == []
