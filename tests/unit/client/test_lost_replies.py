"""Consumers whose broker loses a reply that held a message."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tidemill import BrokerUnavailable, Message, Tidemill
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.network.repeated_calls import RepeatedCalls


class LossyExchanges:
    """The exchanges of one owner with a memory broker; the next reply with a lease can be lost."""

    def __init__(self, exchange: Callable[[Step], Reply]) -> None:
        self._exchange = exchange
        self._calls = RepeatedCalls(self._send)
        self._replies: dict[int, Reply] = {}
        self.loses = False

    def __call__(self, step: Step) -> Reply:
        return self._calls.exchange(step)

    def _send(self, step: Step, serial: int) -> Reply:
        if serial in self._replies:
            return copy.deepcopy(self._replies[serial])
        reply = self._exchange(step)
        self._replies[serial] = copy.deepcopy(reply)
        if self.loses and reply.leases:
            self.loses = False
            raise BrokerUnavailable("the reply was lost")
        return reply


@pytest.fixture
def mill() -> Tidemill:
    return Tidemill("memory://")


@pytest.fixture
def exchanges(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> LossyExchanges:
    lossy = LossyExchanges(mill.broker.exchange)
    monkeypatch.setattr(mill.broker, "exchange", lossy)
    return lossy


def taken(mill: Tidemill) -> Message:
    message = mill.queue("q").get_nowait()
    assert message is not None
    return message


def ready(mill: Tidemill) -> int:
    (stats,) = mill.queues()
    return stats.ready


def test_a_message_in_a_lost_reply_goes_back_when_its_call_ends(
    mill: Tidemill, exchanges: LossyExchanges
) -> None:
    # law 2: given a waiting call of get whose reply is lost
    mill.queue("q").put("a", ttr=3600)
    exchanges.loses = True
    # when the call fails
    with pytest.raises(BrokerUnavailable):
        mill.queue("q").get(timeout=5)
    # then no idle consumer holds the message
    assert ready(mill) == 1
    assert taken(mill).body == "a"


def test_a_message_in_a_lost_reply_goes_back_with_an_acknowledgement(
    mill: Tidemill, exchanges: LossyExchanges
) -> None:
    # given a consumer with a message, and a second message in a lost reply
    mill.queue("q").put("a", ttr=3600)
    first = taken(mill)
    mill.queue("q").put("b", ttr=3600)
    exchanges.loses = True
    with pytest.raises(BrokerUnavailable):
        mill.queue("q").get_nowait()
    # when the consumer acknowledges the first message
    first.ack()
    # then the second message is ready again
    assert ready(mill) == 1
    assert taken(mill).body == "b"
