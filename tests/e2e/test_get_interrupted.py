"""A ``get`` that a signal handler interrupts by raising an exception."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tidemill import Message, Tidemill
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.core.job import Outcome


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
