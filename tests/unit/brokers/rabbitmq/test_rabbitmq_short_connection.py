"""A short connection: it leaves no socket, and a walk returns all messages of a place."""

from __future__ import annotations

import time
from typing import Any

import pytest
from harness import eventually
from pika.exceptions import ChannelWrongStateError
from rabbitmq_desk import LiveOwner, job

from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.rabbitmq import RabbitBroker
from tidemill.brokers.rabbitmq.amqp import short_connection
from tidemill.core.job import Outcome, State

FAILED = Filter(states=frozenset({State.FAILED}))


def test_a_visit_leaves_no_socket_when_pika_cannot_close_its_connection(
    broker: RabbitBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ChannelWrongStateError

    with short_connection.short_connection(broker._settings) as server:
        connection: Any = server._connection
        sock = connection._impl._transport._sock
        monkeypatch.setattr(connection, "close", refuse)
    assert sock.fileno() == -1


def test_a_walk_returns_messages_that_arrive_after_a_silence(broker: RabbitBroker) -> None:
    # given three failed jobs, and a connection that brings no message for three seconds
    broker.put([job(id=f"j{n}") for n in range(3)])
    worker = LiveOwner(broker)
    for lease in worker.await_all(3):
        assert worker.settle(lease, Outcome.FAIL, error="no")
    eventually(lambda: len(broker.find(FAILED, 10).records) == 3, "the failed jobs")
    with short_connection.short_connection(broker._settings) as server:
        hear, silent_until = server._hear, time.monotonic() + 3

        def hear_later(left: float) -> None:
            if left and time.monotonic() < silent_until:
                time.sleep(left)
            else:
                hear(left)

        server._hear = hear_later
        # then a walk still returns all of them
        assert len(list(server.walk(broker._writer.failed))) == 3
