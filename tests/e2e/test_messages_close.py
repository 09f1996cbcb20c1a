"""Closing an app ends what waits for its messages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness import eventually

from tidemill import Breaker, InvalidOption, Tidemill


class Call:
    """A call in a thread of its own, and how it ended."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._call = call
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error

    def end(self) -> Any:
        """Its result."""
        self.thread.join(30)
        assert not self.thread.is_alive()
        assert self.error is None, repr(self.error)
        return self.result


def waits(mill: Tidemill, count: int = 1) -> None:
    """Until so many consumers are inside of ``get``."""
    eventually(lambda: len(mill.runtime.consumers.session.waiting) == count, "waiting consumers")
    time.sleep(0.1)  # most have reached their wait; each moment before it must do as well


def test_a_loop_over_messages_ends_when_the_app_is_closed(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a loop that has got a message and waits for the next
    monkeypatch.setattr("tidemill.client.messages.PATIENCE", 60.0)
    got: list[Any] = []

    def consume() -> str:
        for message in mill.queue("q"):
            with message:
                got.append(message.body)
        return "ended"

    loop = Call(consume)
    mill.queue("q").put(1)
    eventually(lambda: got == [1], "the message")
    waits(mill)
    # when
    began = time.monotonic()
    mill.close()
    # then
    assert loop.end() == "ended"
    assert time.monotonic() - began < 30  # the close has woken the loop, and did not wait in vain


def test_a_loop_ends_when_its_own_body_closes_the_app(mill: Tidemill) -> None:
    mill.queue("q").put(1)
    mill.queue("q").put(2)
    for message in mill.queue("q"):
        assert message.ack()
        mill.close()


def test_a_loop_ends_wherever_it_is_when_the_app_is_closed(mill: Tidemill) -> None:
    """A close between two messages must not be slept through, nor open the app again."""
    mill.queue("q").put_many(list(range(2000)), ttr=0)
    started = threading.Event()

    def consume() -> str:
        for _ in mill.queue("q"):
            started.set()
        return "ended"

    loops = [Call(consume) for _ in range(3)]
    assert started.wait(30)
    time.sleep(0.05)
    mill.close()
    assert [loop.end() for loop in loops] == ["ended"] * 3


def test_waiting_calls_return_none(mill: Tidemill) -> None:
    calls = [Call(mill.queue("q").get), Call(lambda: mill.get(["a", "b"], 60))]
    waits(mill, 2)
    mill.close()
    assert [call.end() for call in calls] == [None, None]


def test_an_async_loop_ends_when_the_app_is_closed(mill: Tidemill) -> None:
    async def consume() -> str:
        async for _ in mill.queue("q"):
            raise AssertionError("there is no message")
        return "ended"

    loop = Call(lambda: asyncio.run(consume()))
    waits(mill)
    mill.close()
    assert loop.end() == "ended"


def test_a_closed_app_is_opened_again_by_the_next_loop(mill: Tidemill) -> None:
    for _ in range(2):
        mill.queue("q").put(1)
        for message in mill.queue("q"):
            assert message.ack()
            break
        mill.close()


@pytest.mark.parametrize("blank", ["", " ", "\u2003 "])
def test_a_blank_name_is_refused(mill: Tidemill, blank: str) -> None:
    queue = mill.queue("q")
    for call in (
        lambda: queue.put(1, id=blank),
        lambda: queue.put(1, key=blank),
        lambda: queue.put(1, tags=[blank]),
        lambda: mill.queue(blank),
        lambda: mill.get([blank], 0),
        lambda: mill.job(blank),
    ):
        with pytest.raises(InvalidOption, match=r"must not be (empty|blank)"):
            call()
    assert queue.get(timeout=0) is None


@pytest.mark.parametrize("failures", [0, -1, "x"])
def test_a_breaker_without_failures_is_refused(failures: Any) -> None:
    with pytest.raises(InvalidOption, match="failures of a breaker"):
        Breaker(failures)
