"""Taking messages: what failed calls and lost replies give back, and the table of held messages."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tidemill import InvalidOption, Message, Tidemill
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.network.repeated_calls import RepeatedCalls
from tidemill.core.job import Outcome, Verdict
from tidemill.errors import BrokerUnavailable


@pytest.fixture
def mill() -> Tidemill:
    return Tidemill("memory://")


@pytest.mark.parametrize("stored", [True, False])
def test_a_call_that_fails_gives_all_its_messages_back(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    # law 2: given a store that is lost while acknowledgements of messages with ttr=0 are stored
    queue, exchange = mill.queue("q"), mill.broker.exchange
    queue.put_many(["a", "b"], ttr=0)
    queue.put("c", ttr=3600)

    def lose(step: Step) -> Reply:
        if not step.verdicts:
            return exchange(step)
        monkeypatch.setattr(mill.broker, "exchange", exchange)
        if stored:
            exchange(step)
        raise BrokerUnavailable("the answer was lost")

    monkeypatch.setattr(mill.broker, "exchange", lose)
    # when
    with pytest.raises(BrokerUnavailable):
        queue.get_many(10, timeout=0)
    # then all messages are there, once
    assert sorted(message.body for message in queue.get_many(10, timeout=0)) == ["a", "b", "c"]


def test_a_message_whose_lease_was_lost_is_not_handed_out(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 2: given that the lease of one message ends before its acknowledgement is stored
    queue, exchange = mill.queue("q"), mill.broker.exchange
    queue.put_many(["a", "b"], ttr=0)

    def lose_first(step: Step) -> Reply:
        if step.verdicts:
            exchange(Step(step.owner, [Verdict(step.verdicts[0].token, Outcome.RELEASE)]))
        return exchange(step)

    monkeypatch.setattr(mill.broker, "exchange", lose_first)
    # when
    messages = queue.get_many(2, timeout=0)
    # then
    assert [message.body for message in messages] == ["b"]


@pytest.mark.parametrize("n", [0, -1, 1001, 1.5, True])
def test_a_number_out_of_bounds_is_refused(mill: Tidemill, n: int) -> None:
    with pytest.raises(InvalidOption, match="n must be a whole number from 1 to 1000"):
        mill.queue("q").get_many(n, timeout=0)


def test_touch_tells_the_ttr_that_holds_from_then_on(mill: Tidemill) -> None:
    mill.queue("q").put("a", ttr=100)
    message = mill.queue("q").get(timeout=0)
    assert message.touch(50)
    assert message.ttr == 50
    assert message.touch()
    assert message.ttr == 100


# -- lost replies ----------------------------------------------------------------------------------


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
def exchanges(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> LossyExchanges:
    lossy = LossyExchanges(mill.broker.exchange)
    monkeypatch.setattr(mill.broker, "exchange", lossy)
    return lossy


def taken(mill: Tidemill) -> Message:
    return mill.queue("q").get(timeout=0)


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
