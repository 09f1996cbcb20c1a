"""Messages with ttr=0 at the seam: they are leased, and only an acknowledgement ends them."""

from __future__ import annotations

import pytest
from broker_driver import LiveOwner, message

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Mode, Want
from tidemill.core.job import Outcome


@pytest.mark.parametrize("sleep", [True, False])
def test_an_acknowledged_message_is_leased_to_no_one_else(
    broker: Broker, consumer: LiveOwner, sleep: bool
) -> None:
    # case Q16, law 2
    given = [message(ttr=0), message(ttr=0)]
    broker.put(given)
    want = Want(9, ("default",), Mode.STRICT, tasks=False, messages=True, sleep=sleep)
    leases = consumer.take_all(want)
    assert [lease.open() for lease in leases] == given
    # when
    assert [consumer.settle(lease) for lease in leases] == [True, True]
    assert not consumer.settle(leases[0])
    broker.detach(consumer.id)
    # then
    assert LiveOwner(broker, "c2", "consumer").take() == []


def test_a_released_message_goes_back_to_its_place(broker: Broker, consumer: LiveOwner) -> None:
    given = [message(ttr=0) for _ in range(3)]
    broker.put(given)
    [first] = consumer.take(1)
    # when
    assert consumer.settle(first, Outcome.RELEASE)
    # then
    again = consumer.await_all(3)
    assert [lease.open() for lease in again] == given
    assert {lease.attempt for lease in again} == {1}


def test_a_message_of_a_dead_consumer_goes_back(broker: Broker, consumer: LiveOwner) -> None:
    given = message(ttr=0)
    broker.put([given])
    assert len(consumer.take()) == 1
    # when
    broker.detach(consumer.id)
    # then
    [again] = LiveOwner(broker, "c2", "consumer").await_all(1)
    assert again.open() == given


def test_an_acknowledged_id_is_free_again(broker: Broker, consumer: LiveOwner) -> None:
    given = message(ttr=0)
    broker.put([given])
    assert consumer.settle(consumer.take()[0])
    assert broker.put([given])
