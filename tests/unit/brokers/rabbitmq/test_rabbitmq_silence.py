"""Queues of RabbitMQ that do not answer: the cost for other queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import eventually
from rabbitmq_desk import LiveOwner, job
from servers import RabbitMQ

from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.rabbitmq import RabbitBroker

Open = Callable[..., RabbitBroker]


@pytest.fixture
def url(server: RabbitMQ) -> str:
    return server.url


def test_a_queue_that_does_not_answer_holds_up_no_other(
    server: RabbitMQ,
    open_one: Open,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # as one does whose log was lost with its server
    monkeypatch.setattr("tidemill.brokers.rabbitmq.amqp.topology._SILENT", 1.0)
    monkeypatch.setattr("tidemill.brokers.rabbitmq.amqp.channel._PAUSE", 0.2)
    producer, broker, urgent, plain = open_one(), open_one(), job(priority=5), job()
    producer.put([urgent, plain, job("other")])
    worker = LiveOwner(broker)
    (running,) = worker.await_all(1, queues=("other",))
    channel = broker._owners[worker.id]._channel
    era = channel.era
    high = f"'%2F_{prefix}.tasks.high.default'"
    server.eval(f"sys:suspend({high})")
    try:
        (lease,) = worker.await_all(1, queues=("default",))
        eventually(lambda: "does not answer" in caplog.text, "the end of patience")
        # law 5: what runs is not the server's meanwhile, which would hand it to others
        assert channel.sync(30)
        assert channel.era == era
        assert worker.settle(running)
    finally:
        server.eval(f"sys:resume({high})")
    assert lease.open().id == plain.id
    assert f"the queue {prefix}.tasks.high.default does not answer" in caplog.text
    assert worker.settle(lease)
    # and when it answers again, its jobs come
    (lease,) = worker.await_all(1, queues=("default",))
    assert lease.open().id == urgent.id


def test_a_late_answer_of_a_queue_breaks_no_connection(
    server: RabbitMQ,
    open_one: Open,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # law 5: else what was taken meanwhile would run twice
    monkeypatch.setattr("tidemill.brokers.rabbitmq.amqp.channel.BEGINS_WITHIN", 1.0)
    near, far = open_one(), open_one()
    worker, other = LiveOwner(near), LiveOwner(far, "w2")
    near.put([job("hangs"), job("well")])
    (first,) = worker.await_all(1, queues=("hangs",))
    assert worker.settle(first)
    near.put([job("hangs") for _ in range(8)])
    hangs = f"{prefix}.tasks.normal.hangs"
    channel, told = near._owners[worker.id]._channel, list[bool]()
    server.eval(f"sys:suspend('%2F_{hangs}')")
    try:
        # given: a channel that waits for a queue, and is asked more until it is left
        left: Any = channel._channel
        here = worker.exchange(want=Want(8, ("hangs",))).leases
        eventually(lambda: not all(one.known for _, one in list(channel._whose.values())), "a wait")
        channel._thread.do(lambda: channel.round_trip(told.append))
        eventually(lambda: f"the queue {hangs} does not answer" in caplog.text, "the end")
        assert told == [False]
        (lease,) = worker.await_all(1, queues=("well",))
        assert not other.take(queues=("well",))
        connects, era = near._in.connects, channel.era
    finally:
        server.eval(f"sys:resume('%2F_{hangs}')")
    # when it has answered
    eventually(lambda: left.is_closed, "the end of the channel")
    # then
    assert channel.sync(30)
    assert (near._in.connects, channel.era) == (connects, era)
    assert worker.touch(lease)
    assert not other.take(queues=("well",))
    assert worker.settle(lease)
    worker.await_all(8 - len(here), queues=("hangs",))
