"""Messages whose consumers die, on RabbitMQ: the server counts the deliveries of a message."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import eventually
from pika.adapters.blocking_connection import BlockingChannel

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.inspection import Filter
from tidemill.core.job import Record, State
from tidemill.core.retry import MESSAGE, RetryPolicy

sys.path.append(str(Path(__file__).parents[3] / "conformance"))

from broker_driver import LiveOwner, message


@pytest.fixture
def consumer(broker: Broker) -> LiveOwner:
    return LiveOwner(broker, "c1", "consumer")


def die_of_it(channel: BlockingChannel, prefix: str) -> None:
    """Take a message and never end it: what the server sees of a death."""
    place = f"{prefix}.messages.normal.default"
    got = eventually(lambda: (found := channel.basic_get(place))[0] and found)
    channel.basic_nack(got[0].delivery_tag, requeue=True)


def failed(broker: Broker) -> list[Record]:
    return broker.find(Filter(states=frozenset({State.FAILED}))).records


def test_the_first_death_returns_a_message_to_its_place(
    broker: Broker, consumer: LiveOwner, channel: BlockingChannel, prefix: str
) -> None:
    # law 7
    broker.put([message(id="poison", retries=MESSAGE), message(id="good", retries=MESSAGE)])

    die_of_it(channel, prefix)

    assert [lease.open().id for lease in consumer.await_all(2)] == ["poison", "good"]


def test_deaths_alone_end_a_message(
    broker: Broker, consumer: LiveOwner, channel: BlockingChannel, prefix: str
) -> None:
    broker.put(
        [message(id="poison", retries=RetryPolicy(2, delay=0.02, jitter=False, immediate=2))]
    )

    for _ in range(3):
        die_of_it(channel, prefix)
    consumer.take()

    (record,) = eventually(lambda: failed(broker))
    assert (record.attempt, record.error) == (3, "its consumer died")
