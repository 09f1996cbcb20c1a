"""Fixtures of the tests of RabbitMQ: prefixes, brokers that are closed, servers to kill."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from rabbitmq_desk import open_rabbit
from servers import RabbitMQ, rabbitmq_url

from tidemill.brokers.rabbitmq import RabbitBroker

Open = Callable[..., RabbitBroker]


@pytest.fixture
def prefix() -> str:
    """A prefix that no other test has."""
    return f"t{time.time_ns() % 10**15}"


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitMQ]:
    """A server for one module, whose tests may kill it."""
    server = RabbitMQ()
    yield server
    server.close()


@pytest.fixture
def url() -> str:
    """The server that all tests share. A module with a server of its own overrides this."""
    return rabbitmq_url()


@pytest.fixture
def open_one(url: str, prefix: str) -> Iterator[Open]:
    """Open brokers, on another server if a URL is given. At the end none has left a thread."""
    opened: list[RabbitBroker] = []

    def open_one(other: str = "", **options: object) -> RabbitBroker:
        opened.append(open_rabbit(other or url, prefix, **options))
        return opened[-1]

    yield open_one
    for broker in opened:
        broker.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("tidemill-")] == []


@pytest.fixture
def broker(prefix: str) -> Iterator[RabbitBroker]:
    """A broker on the shared server."""
    broker = open_rabbit(rabbitmq_url(), prefix)
    yield broker
    broker.close()


@pytest.fixture
def channel() -> Iterator[BlockingChannel]:
    """A channel to the shared server, as another program has one."""
    connection = pika.BlockingConnection(pika.URLParameters(rabbitmq_url()))
    channel = connection.channel()
    channel.confirm_delivery()
    yield channel
    connection.close()
